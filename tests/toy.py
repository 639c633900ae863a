"""A toy target that tests make in milliseconds: eight random layers over a vocabulary of characters."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

from speculator.draft.eagle3 import DraftConfig, Eagle3Draft

ALPHABET = "abcdefghijklmnopqrstuvwxyz .,?0123456789:"
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "\n"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}: {{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


def toy_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {token: index for index, token in enumerate([*SPECIAL, *ALPHABET])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=CHAT_TEMPLATE,
    )


def make_toy_model(
    directory: Path, *, seed: int = 0, hidden_size: int = 32, family: str = "llama", common: float = 0.0
) -> Path:
    """Write a complete Hugging Face model directory; returns it.

    All embeddings share a vector whose elements deviate by `common`: the larger, the likelier are the same few tokens
    after any other, which a draft head learns within seconds.
    """
    torch.manual_seed(seed)
    tokenizer = toy_tokenizer()
    config = CONFIG_MAPPING[family](
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config)
    if common:
        model.get_input_embeddings().weight.data += common * torch.randn(hidden_size)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def set_every_bias_and_norm(model_dir: Path) -> None:
    """A fresh model's biases are zero and its norms one, which would hide a mistake in either.

    Saved in bfloat16, so that every dtype computes with the same weights.
    """
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            offset = 1.0 if "norm" in name else 0.0
            parameter.data.normal_(offset, 0.3, generator=generator)
    model.to(torch.bfloat16).save_pretrained(model_dir)


def random_draft(model_dir: Path, *, seed: int, draft_vocab_size: int = 24, scale: float = 1.0) -> Eagle3Draft:
    """A draft with random weights for the toy target in `model_dir`; every seed has the same draft vocabulary."""
    from speculator.draft.checkpoint import read_target_tensor

    generator = torch.Generator().manual_seed(seed)
    config = DraftConfig.for_target(
        json.loads((model_dir / "config.json").read_text()), draft_vocab_size=draft_vocab_size
    )
    embed = read_target_tensor(model_dir, "model.embed_tokens.weight")
    vocab = torch.Generator().manual_seed(0)
    kept = torch.randperm(config.vocab_size, generator=vocab)[: config.draft_vocab_size].sort().values
    draft = Eagle3Draft(config, embed, kept - torch.arange(config.draft_vocab_size))
    for parameter in draft.parameters():
        parameter.data.normal_(0, scale, generator=generator)
    return draft

"""Initialise a new, untrained draft for a target; nearly all its proposals are rejected.

**The draft vocabulary**, the target tokens that the draft can propose, is chosen once for a lineage, then frozen. A
small vocabulary makes the draft's output layer cheap; it can never propose other tokens. Byte-pair merges are learned
in the order of frequency, so of merged tokens those with low ids are frequent (Zipf's law). Frequent single
characters rank before them: they are the lowest ids of byte-level tokenizers, but not of SentencePiece's. That prior is
mixed half and half with token counts of texts from the service's own domain, if given: on real answers to mathematics,
code and questions 8,192 of SmolLM2's 49,152 tokens cover 91% by rank alone and 96% with counts of the domain's prompts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from speculator.draft.checkpoint import expected_shapes, read_target_tensor
from speculator.draft.eagle3 import DraftConfig, Eagle3Draft
from speculator.errors import ConfigError
from speculator.target_folder import EMBEDDING, LM_HEAD, NORM, check_folder, output_scale, reading, weight_files

# Flattens Zipf's law over the special and byte tokens with the lowest ids.
_RANK_OFFSET = 100
_PRIOR_SHARE = 0.5
_SPACE = "▁"
"""What SentencePiece writes for a space."""
# SentencePiece has thousands of characters, by frequency. These are the Latin and Cyrillic ones and punctuation.
_MOST_FIRST = 256


def choose_draft_vocab(
    vocab_size: int, size: int, counts_V: Tensor | None = None, *, characters: Sequence[int] = ()
) -> Tensor:
    """Choose the draft vocabulary. Returns offsets `d2t` [min(size, vocab_size)] int64: target id = draft id + offset.

    `counts_V` [V] are token counts of texts like those to be served. `characters` are ids that rank before the others.
    """
    ids_V = torch.arange(vocab_size)
    is_character_V = torch.isin(ids_V, torch.tensor(characters, dtype=torch.int64))
    prior_V = torch.empty(vocab_size, dtype=torch.float64)
    prior_V[torch.cat([ids_V[is_character_V], ids_V[~is_character_V]])] = 1.0 / (ids_V.double() + _RANK_OFFSET)
    score_V = prior_V / prior_V.sum()
    if counts_V is not None and bool(counts_V.any()):
        score_V = _PRIOR_SHARE * score_V + (1 - _PRIOR_SHARE) * counts_V.double() / counts_V.sum()
    chosen_D = score_V.topk(min(size, vocab_size)).indices.sort().values
    return chosen_D - torch.arange(len(chosen_D))


Text = str | Sequence[int]
"""A text, or its token ids."""


def count_tokens(model_dir: Path, texts: Iterable[Text], vocab_size: int) -> Tensor:
    """Count the target's tokens in `texts`: [V] int64. Raises ConfigError for unknown token ids, and for texts to be
    tokenised if there is no `tokenizer.json` that fits.
    """
    texts = list(texts)
    known = torch.tensor([token for text in texts if not isinstance(text, str) for token in text], dtype=torch.int64)
    if len(known) and not 0 <= int(known.min()) <= int(known.max()) < vocab_size:
        raise ConfigError(f"the texts have token id {int(known.max())}, vocab_size is {vocab_size}: check --model")
    counts_V = torch.bincount(known, minlength=vocab_size)
    if not (unread := [text for text in texts if isinstance(text, str)]):
        return counts_V
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"the target in {model_dir} has no tokenizer.json: save its tokenizer with transformers, or leave "
            "--vocab-from out"
        )
    with reading(model_dir):
        tokenizer = Tokenizer.from_file(str(path))
        check_vocabulary(model_dir, tokenizer, vocab_size)
        for encoding in tokenizer.encode_batch_fast(unread, add_special_tokens=False):
            ids = torch.tensor(encoding.ids, dtype=torch.int64)
            # Added tokens may have ids beyond the embedding: no request can contain them.
            counts_V += torch.bincount(ids[ids < vocab_size], minlength=vocab_size)
    return counts_V


def _characters(model_dir: Path, vocab_size: int) -> list[int]:
    """The ids of SentencePiece's most frequent characters, the space included, by `tokenizer.json`; none of others."""
    try:
        vocab = json.loads((model_dir / "tokenizer.json").read_bytes())["model"]["vocab"]
        pieces = vocab.items() if _SPACE in vocab else ()
        return sorted(token for piece, token in pieces if len(piece) == 1 and token in range(vocab_size))[:_MOST_FIRST]
    except (OSError, ValueError, AttributeError, LookupError, TypeError, RecursionError):
        return []


def check_vocabulary(model_dir: Path, tokenizer: Any, vocab_size: int) -> None:
    """Raise ConfigError for a tokenizer that has more tokens than the target's embedding has rows."""
    largest = max(tokenizer.get_vocab(with_added_tokens=False).values(), default=0)
    if largest >= vocab_size:
        raise ConfigError(
            f"{model_dir}: the tokenizer has token id {largest}, vocab_size is {vocab_size}: check --model"
        )


DEFAULT_DRAFT_VOCAB_SIZE = 8192
# Scale of `fc`'s output. Target features have a root mean square far above 1 (22 in SmolLM2's high layer), and the
# layer's output is added to them: at full scale they would dominate what it learns at first. Normed features have 1.
_FEATURE_SCALE = 0.1
_OUTPUT_SCALE = 0.5
# Initial attention score of a query at its own position; scores of others are about 0. Otherwise a random attention
# head would hardly attend to the newest token among hundreds, and that token says most about the next one.
_OWN_SCORE = 8.0
_OFFSET_NORMS = frozenset({"gemma", "gemma2", "gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
"""Types of targets whose norms multiply by 1 + weight; the draft's multiplies by its weight."""


def fresh_draft(
    model_dir: Path,
    *,
    draft_vocab_size: int | None = None,
    intermediate_size: int | None = None,
    seed: int | None = None,
    texts: Iterable[Text] = (),
    switches: Iterable[str] = (),
) -> Eagle3Draft:
    """Make a draft in float32 for the Hugging Face target in `model_dir`; the same arguments give the same draft.

    The layer is random, and its attention heads attend to their own positions. Final norm and output rows start as the
    target's, so that the layer must learn to write into the target's output space. `texts` are examples of the
    service's traffic, to choose the draft vocabulary. `switches` (`SWITCHES` in speculator/draft/checkpoint.py) turns
    features on. Raises ConfigError for an incomplete model, DraftMismatchError for an unsuitable target.
    """
    size = draft_vocab_size or DEFAULT_DRAFT_VOCAB_SIZE
    target = check_folder(model_dir)
    config = DraftConfig.for_target(target, draft_vocab_size=size, intermediate_size=intermediate_size)
    config = replace(config, **dict.fromkeys(switches, True))
    _check_size(config, model_dir)
    d2t_D = draft_vocab_of(model_dir, config, texts)
    embed_Vd = read_target_tensor(model_dir, EMBEDDING)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed or 0)
        draft = Eagle3Draft(config, embed_Vd, d2t_D)
        if not (config.fc_norm or config.norm_before_fc):
            draft.fc.weight.mul_(_FEATURE_SCALE)
        _attend_to_own_position(draft)
        draft.midlayer.mlp.down_proj.weight.mul_(_OUTPUT_SCALE)
        offset = 1.0 if str(target.get("model_type")) in _OFFSET_NORMS else 0.0
        draft.norm.weight.copy_((read_target_tensor(model_dir, NORM).float() + offset) * output_scale(target))
        draft.lm_head.weight.copy_(read_target_tensor(model_dir, LM_HEAD)[draft.target_ids])
    return draft


def draft_vocab_of(model_dir: Path, config: DraftConfig, texts: Iterable[Text]) -> Tensor:
    """The offsets `d2t` [D] of a fresh draft. Raises ConfigError."""
    texts = list(texts)
    counts_V = count_tokens(model_dir, texts, config.vocab_size) if texts else None
    characters = _characters(model_dir, config.vocab_size)
    return choose_draft_vocab(config.vocab_size, config.draft_vocab_size, counts_V, characters=characters)


def _check_size(config: DraftConfig, model_dir: Path) -> None:
    """Raise ConfigError if the draft would be larger than the whole target: then a size in config.json is wrong."""
    num_elements = sum(math.prod(shape) for shape in expected_shapes(config).values())
    num_bytes = sum(path.stat().st_size for path in set(weight_files(model_dir).values()))
    if num_elements > 2 * num_bytes:
        raise ConfigError(
            f"{model_dir}: by config.json a draft has {num_elements:,} elements, the target's weights are "
            f"{num_bytes:,} bytes: check --model"
        )


def _attend_to_own_position(draft: Eagle3Draft) -> None:
    """Set random key weights, and query weights that give each position its own key: at the same position the rotations
    cancel, so the score is |key|².
    """
    config, attention = draft.config, draft.midlayer.self_attn
    keys_Ghw = attention.k_proj.weight.view(config.num_key_value_heads, config.head_dim, -1)
    # Inputs have a root mean square of 1, so a score |key|² / √h is √h · w · variance.
    keys_Ghw.normal_(std=math.sqrt(_OWN_SCORE / (math.sqrt(config.head_dim) * keys_Ghw.shape[-1])))
    heads_a_key = config.num_attention_heads // config.num_key_value_heads
    attention.q_proj.weight.copy_(keys_Ghw.repeat_interleave(heads_a_key, 0).flatten(0, 1))

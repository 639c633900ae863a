"""A new draft for a target: it has learnt nothing yet, so nearly all its proposals are rejected."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

import torch

from speculator.checkpoint import read_target_tensor
from speculator.errors import ConfigError
from speculator.model import DraftConfig, Eagle3Draft
from speculator.vocab import choose_draft_vocab, count_tokens

DEFAULT_DRAFT_VOCAB_SIZE = 8192
# Target features have a root mean square far above 1 (22 in SmolLM2's high layer) and the layer's output is added to
# them: at full scale they drown what it learns at first.
_FEATURE_SCALE = 0.1
_OUTPUT_SCALE = 0.5
# At first a head's score of its own position, where it reads the newest token; those of others are about 0. Among
# hundreds of positions a random head would hardly see that token, and it says most about the next one.
_OWN_SCORE = 8.0


def fresh_draft(
    model_dir: Path, *, draft_vocab_size: int = DEFAULT_DRAFT_VOCAB_SIZE, seed: int, texts: Iterable[str] = ()
) -> Eagle3Draft:
    """A draft in float32 for the Hugging Face target in `model_dir`; the same arguments give the same draft.

    The layer is random, and its heads look at their own positions. The final norm and the output rows start as the
    target's, which fixes the space that the layer has to write into. `texts` tell which tokens the service will need
    (see speculator/vocab.py).
    Raises ConfigError when the folder lacks `config.json` or a tensor, DraftMismatchError for an unsuitable target.
    """
    try:
        target = json.loads((model_dir / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model_dir} is not a Hugging Face model folder: no readable config.json") from error
    config = DraftConfig.for_target(target, draft_vocab_size=draft_vocab_size)
    texts = list(texts)
    counts_V = count_tokens(model_dir, texts, config.vocab_size) if texts else None
    d2t_D = choose_draft_vocab(config.vocab_size, config.draft_vocab_size, counts_V)
    embed_Vd = read_target_tensor(model_dir, "model.embed_tokens.weight")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        draft = Eagle3Draft(config, embed_Vd, d2t_D)
        draft.fc.weight.mul_(_FEATURE_SCALE)
        _look_at_own_position(draft)
        draft.midlayer.mlp.down_proj.weight.mul_(_OUTPUT_SCALE)
        draft.norm.weight.copy_(read_target_tensor(model_dir, "model.norm.weight"))
        draft.lm_head.weight.copy_(read_target_tensor(model_dir, "lm_head.weight")[draft.target_ids])
    return draft


def _look_at_own_position(draft: Eagle3Draft) -> None:
    """Random keys, and every query the key of its position; the rotation of both is the same there and cancels out."""
    config, attention = draft.config, draft.midlayer.self_attn
    keys_Ghw = attention.k_proj.weight.view(config.num_key_value_heads, config.head_dim, -1)
    # Inputs have size 1, so a score |key|² / √h is √h · w · variance.
    keys_Ghw.normal_(std=math.sqrt(_OWN_SCORE / (math.sqrt(config.head_dim) * keys_Ghw.shape[-1])))
    heads_a_key = config.num_attention_heads // config.num_key_value_heads
    attention.q_proj.weight.copy_(keys_Ghw.repeat_interleave(heads_a_key, 0).flatten(0, 1))

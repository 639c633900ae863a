"""A new draft for a target: it has learnt nothing yet, so nearly all its proposals are rejected."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from speculator.checkpoint import expected_shapes, read_target_tensor
from speculator.errors import ConfigError
from speculator.model import DraftConfig, Eagle3Draft
from speculator.target_folder import EMBEDDING, LM_HEAD, NORM, check_folder, weight_files
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
    model_dir: Path, *, draft_vocab_size: int | None = None, seed: int | None = None, texts: Iterable[str] = ()
) -> Eagle3Draft:
    """A draft in float32 for the Hugging Face target in `model_dir`; the same arguments give the same draft.

    The layer is random, and its heads look at their own positions. The final norm and the output rows start as the
    target's, which fixes the space that the layer has to write into. `texts` tell which tokens the service will need
    (see speculator/vocab.py).
    Raises ConfigError for a folder that is no complete model, DraftMismatchError for an unsuitable target.
    """
    size = draft_vocab_size or DEFAULT_DRAFT_VOCAB_SIZE
    config = DraftConfig.for_target(check_folder(model_dir), draft_vocab_size=size)
    _check_size(config, model_dir)
    d2t_D = draft_vocab_of(model_dir, config, texts)
    embed_Vd = read_target_tensor(model_dir, EMBEDDING)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed or 0)
        draft = Eagle3Draft(config, embed_Vd, d2t_D)
        draft.fc.weight.mul_(_FEATURE_SCALE)
        _look_at_own_position(draft)
        draft.midlayer.mlp.down_proj.weight.mul_(_OUTPUT_SCALE)
        draft.norm.weight.copy_(read_target_tensor(model_dir, NORM))
        draft.lm_head.weight.copy_(read_target_tensor(model_dir, LM_HEAD)[draft.target_ids])
    return draft


def draft_vocab_of(model_dir: Path, config: DraftConfig, texts: Iterable[str]) -> Tensor:
    """The offsets `d2t` [D] of a fresh draft. Raises ConfigError."""
    texts = list(texts)
    counts_V = count_tokens(model_dir, texts, config.vocab_size) if texts else None
    return choose_draft_vocab(config.vocab_size, config.draft_vocab_size, counts_V)


def _check_size(config: DraftConfig, model_dir: Path) -> None:
    """A draft is one layer of many: one that has more elements than the target has half bytes is a wrong size's."""
    num_elements = sum(math.prod(shape) for shape in expected_shapes(config).values())
    num_bytes = sum(path.stat().st_size for path in set(weight_files(model_dir).values()))
    if num_elements > 2 * num_bytes:
        raise ConfigError(
            f"{model_dir}: by config.json a draft has {num_elements:,} elements, the target's weights are "
            f"{num_bytes:,} bytes: check --model"
        )


def _look_at_own_position(draft: Eagle3Draft) -> None:
    """Random keys, and every query the key of its position; the rotation of both is the same there and cancels out."""
    config, attention = draft.config, draft.midlayer.self_attn
    keys_Ghw = attention.k_proj.weight.view(config.num_key_value_heads, config.head_dim, -1)
    # Inputs have size 1, so a score |key|² / √h is √h · w · variance.
    keys_Ghw.normal_(std=math.sqrt(_OWN_SCORE / (math.sqrt(config.head_dim) * keys_Ghw.shape[-1])))
    heads_a_key = config.num_attention_heads // config.num_key_value_heads
    attention.q_proj.weight.copy_(keys_Ghw.repeat_interleave(heads_a_key, 0).flatten(0, 1))

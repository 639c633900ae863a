"""How much of a GPU's memory SGLang takes where the trainer has the same one.

Nobody sees there what the other will need: SGLang starts first and takes a share of what is free, for weights and
cache. Both needs follow from files: the target's weights, the draft's shapes, config.json. They are computed, not
measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from speculator.errors import ConfigError
from speculator.target_folder import read_config, weight_files

FRACTION = "--mem-fraction-static"
"""SGLang's share of what is free on its GPU when it starts, for weights and cache."""
_GIB = 2**30
_TRAINED_BYTES = 20
"""A trained weight in float32: itself, its gradient, two moments of AdamW, and its average."""
_STEP_BYTES = 2 * _GIB
"""The trainer's CUDA context, and what a step computes between the weights."""
_WORK_SHARE, _LEAST_WORK_BYTES = 0.15, 3 * _GIB
"""What SGLang needs beside weights and cache, for graphs and what a pass computes."""
_CONTEXT_BYTES = _GIB
"""Of a process that has only looked at its GPU, or less."""
_LEAST_CONTEXT = 8192
"""Tokens for which there must be room in the cache."""
_CACHE_BYTES = 2
"""Of a key's or a value's number."""


@dataclass(frozen=True)
class CardShares:
    """Bytes on one GPU that holds SGLang, and the trainer beside it."""

    card: int
    """What is free when SGLang starts."""
    target: int
    draft: int
    least_cache: int
    work: int
    trainer: int
    """What it has yet to take."""

    @property
    def fraction(self) -> float:
        """Of the card for SGLang's weights and cache. Raises ConfigError with the sum where that is too little."""
        need = self.target + self.draft + self.least_cache
        left = self.card - self.work - self.trainer
        if need > left:
            parts = {
                "target": self.target,
                "draft": self.draft,
                f"{_LEAST_CONTEXT} tokens of cache": self.least_cache,
                "what SGLang computes with": self.work,
                "trainer": self.trainer,
            }
            said = ", ".join(f"{name} {size / _GIB:.1f}" for name, size in parts.items())
            raise ConfigError(
                f"{self.card / _GIB:.1f} GiB of the GPU are free, and SGLang and the trainer together need "
                f"{(need + self.work + self.trainer) / _GIB:.1f} ({said}): give the trainer another GPU "
                f"(SLIPSTREAM_TRAINER_GPU), or pass {FRACTION} after --"
            )
        return math.floor(1000 * left / self.card) / 1000


def card_shares(
    free_bytes: int,
    model_dir: Path,
    draft_shapes: Mapping[str, Sequence[int]],
    *,
    used_bytes: int = 0,
    tp_size: int = 1,
) -> CardShares:
    """What the target of this folder and a draft of these shapes need.

    `used_bytes` of the GPU are taken: by the trainer, where SGLang alone has been started again. Raises ConfigError.
    """
    config = read_config(model_dir)
    files = set(weight_files(model_dir).values())
    draft_weights = sum(math.prod(shape) for shape in draft_shapes.values())
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    layers = config["num_hidden_layers"] + 1
    token_bytes = 2 * layers * (config.get("num_key_value_heads") or heads) * head_dim * _CACHE_BYTES
    embedding_bytes = config["vocab_size"] * config["hidden_size"] * 2
    trainer_bytes = _TRAINED_BYTES * draft_weights + embedding_bytes + _STEP_BYTES
    return CardShares(
        card=free_bytes,
        target=sum(path.stat().st_size for path in files) // tp_size,
        # It has the target's embedding, which is there already, and is exchanged for one that is staged beside it.
        draft=2 * 2 * draft_weights // tp_size,
        least_cache=_LEAST_CONTEXT * token_bytes // tp_size,
        work=max(int(_WORK_SHARE * free_bytes), _LEAST_WORK_BYTES),
        trainer=max(trainer_bytes - (used_bytes if used_bytes > _CONTEXT_BYTES else 0), 0),
    )

"""Compute SGLang's share of a GPU's memory where the trainer uses the same GPU.

Neither process can see what the other will need: SGLang starts first and takes a share of the free memory, for weights
and cache. So both needs are computed from files: the target's weights, the draft's shapes, config.json.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from speculator.errors import ConfigError
from speculator.target_folder import read_config, weight_files

FRACTION = "--mem-fraction-static"
"""SGLang's option: the share of its GPU's free memory that it takes at start, for weights and cache."""
_GIB = 2**30
_TRAINED_BYTES = 20
"""Bytes a trained weight in float32: itself, its gradient, two moments of AdamW, and its average."""
_STEP_BYTES = 2 * _GIB
"""The trainer's CUDA context and activations."""
_WORK_SHARE, _LEAST_WORK_BYTES = 0.15, 3 * _GIB
"""SGLang's memory beside weights and cache: CUDA graphs and activations."""
_CONTEXT_BYTES = _GIB
"""Most memory that bare CUDA contexts take."""
_LEAST_CONTEXT = 8192
"""Tokens that the KV cache must hold at least."""
_CACHE_BYTES = 2
"""Bytes of one number in the KV cache."""


@dataclass(frozen=True)
class GpuMemoryNeeds:
    """Memory needs, in bytes, of SGLang and the trainer on one GPU."""

    free: int
    """Free memory when SGLang starts."""
    target: int
    draft: int
    least_cache: int
    work: int
    trainer: int
    """Memory that the trainer has not allocated yet."""

    @property
    def fraction(self) -> float:
        """Share of the free memory for SGLang's weights and cache. Raises ConfigError where that is too little."""
        need = self.target + self.draft + self.least_cache
        left = self.free - self.work - self.trainer
        if need > left:
            parts = {
                "target": self.target,
                "draft": self.draft,
                f"{_LEAST_CONTEXT} tokens of cache": self.least_cache,
                "SGLang's graphs and activations": self.work,
                "trainer": self.trainer,
            }
            said = ", ".join(f"{name} {size / _GIB:.1f}" for name, size in parts.items())
            raise ConfigError(
                f"{self.free / _GIB:.1f} GiB of the GPU are free, and SGLang and the trainer together need "
                f"{(need + self.work + self.trainer) / _GIB:.1f} ({said}): give the trainer another GPU "
                f"(SLIPSTREAM_TRAINER_GPU), or pass {FRACTION} after --"
            )
        return math.floor(1000 * left / self.free) / 1000


def gpu_memory_needs(
    free_bytes: int,
    model_dir: Path,
    draft_shapes: Mapping[str, Sequence[int]],
    *,
    used_bytes: int = 0,
    tp_size: int = 1,
) -> GpuMemoryNeeds:
    """The memory needs for a target and a draft of these shapes.

    `used_bytes` are allocated on the GPU already: by the trainer, where only SGLang restarts. Raises ConfigError.
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
    return GpuMemoryNeeds(
        free=free_bytes,
        target=sum(path.stat().st_size for path in files) // tp_size,
        # Twice: a new version is staged beside the one in service. The embedding is the target's.
        draft=2 * 2 * draft_weights // tp_size,
        least_cache=_LEAST_CONTEXT * token_bytes // tp_size,
        work=max(int(_WORK_SHARE * free_bytes), _LEAST_WORK_BYTES),
        trainer=max(trainer_bytes - (used_bytes if used_bytes > _CONTEXT_BYTES else 0), 0),
    )

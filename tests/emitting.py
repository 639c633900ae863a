"""What verification emits, by its definition: noise for every token."""

from __future__ import annotations

import torch
from torch import Tensor

from speculator.draft.sampling_params import SamplingParams
from speculator.draft.verification import served_logits


def emitted(logits: Tensor, params: SamplingParams, noise: Tensor) -> Tensor:
    """The token ids [...] for logits and Gumbel noise [..., V]; greedy ones without it."""
    if params.temperature == 0:
        return logits.argmax(-1)
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return (served_logits(logits.to(wide), params) + noise.to(wide)).argmax(-1)

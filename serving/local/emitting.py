"""What the target emits, from its logits.

Shape letters: P proposals, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from serving.local.generation import Generation
from serving.local.noise import shared_draws
from speculator.verify import count_accepted, emit, served_logprobs


def emitted_after(
    generation: Generation, logits_PV: Tensor, likeliest_P: list[int], proposed: Sequence[int] = ()
) -> list[int]:
    """What the target emits after the last P tokens fed to it, up to the first that was not `proposed`.

    A sampled row costs a vector of noise: none is sampled that is not committed.
    """
    sampling, seed = generation.source.sampling, generation.source.seed
    if sampling.temperature == 0:
        return likeliest_P[: count_accepted(proposed, likeliest_P) + 1]
    length, size = len(generation.tokens), logits_PV.shape[-1]
    emitted: list[int] = []
    for row, wanted in enumerate([*proposed, None]):
        emitted.append(emit(logits_PV[row], sampling, shared_draws(seed, length + row, size)))
        if emitted[-1] != wanted:
            break
    return emitted


def logprobs_of(generation: Generation, logits_PV: Tensor, tokens: list[int]) -> list[float]:
    """Of P tokens that the target emitted, for a request that wants to know."""
    if not generation.request.logprobs:
        return []
    return served_logprobs(logits_PV, generation.source.sampling, torch.tensor(tokens, device=logits_PV.device))

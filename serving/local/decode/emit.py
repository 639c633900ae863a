"""What the target emits, from its logits.

Shape letters: P positions, T rows of a request, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from serving.local.noise import shared_draws
from serving.local.request import Generation
from speculator.draft.verification import emit, served_logprobs
from speculator.proposals.draft_tree import DraftTree


def emitted_after(
    generation: Generation, logits_TV: Tensor, likeliest_T: list[int], tree: DraftTree
) -> tuple[list[int], list[int]]:
    """What the target emits after the newest token and the proposals that it accepts, from the logits of their rows:
    as `DraftTree.walk` has it, the tokens and the nodes that proposed all but the last.

    A sampled row costs a vector of noise: none is sampled that is not committed.
    """
    sampling, seed = generation.source.sampling, generation.source.seed
    if sampling.temperature == 0:
        return tree.walk(lambda row, _: likeliest_T[row])
    length, size = len(generation.tokens), logits_TV.shape[-1]
    return tree.walk(lambda row, depth: emit(logits_TV[row], sampling, shared_draws(seed, length + depth, size)))


def logprobs_of(generation: Generation, logits_PV: Tensor, tokens: list[int]) -> list[float]:
    """Of P tokens that the target emitted, for a request that wants to know."""
    if not generation.request.logprobs:
        return []
    return served_logprobs(logits_PV, generation.source.sampling, torch.tensor(tokens, device=logits_PV.device))

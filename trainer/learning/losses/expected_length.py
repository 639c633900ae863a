"""A loss on the expected number of accepted proposals of a chain, which is what a round gains.

With a_k = Σ min(s, q) the probability that proposal k is accepted once all before it were, s the served distribution,

    expected_length   −Σ_k reach_k,   reach_k = a_1 · … · a_k

Its gradient weighs a_k by reach_{k−1} · V_k, V_k = 1 + a_{k+1} (1 + …): by how often proposal k is reached, and by how
many acceptances depend on it. Almost no proposal of a fresh draft is accepted, so this loss alone has hardly a
gradient: mix it with `cross_entropy`.
"""

from __future__ import annotations

import torch
from torch import Tensor


class ExpectedLength:
    """Accumulates reach_k of one batch's chains, step by step."""

    def __init__(self, num_chains: int, device: torch.device) -> None:
        self._reach_N = torch.ones(num_chains, device=device)

    def add(self, chains_S: Tensor, rates_S: Tensor) -> Tensor:
        """Multiply the chains' reach by their acceptance rates; returns the sum. Call once a step, with all chains."""
        reach_S = self._reach_N[chains_S] * rates_S
        self._reach_N = self._reach_N.index_put((chains_S,), reach_S)
        return reach_S.sum()

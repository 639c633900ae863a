"""The number of proposals that a chain is expected to have accepted, which is what a round earns.

With a_k the chance that proposal k is accepted once all before it were, Σ min(s, q) of what is served,

    expected_length   −Σ_k reach_k,   reach_k = a_1 · … · a_k

Its gradient weighs a_k by reach_{k−1} · V_k, V_k = 1 + a_{k+1} (1 + …): by how often proposal k matters, and by what
hangs on it. A fresh draft accepts nothing, so alone it has hardly a gradient: mix it with `cross_entropy`.
"""

from __future__ import annotations

import torch
from torch import Tensor


class ExpectedLength:
    """Reach of the chains of one batch, step by step."""

    def __init__(self, num_chains: int, device: torch.device) -> None:
        self._reach_N = torch.ones(num_chains, device=device)

    def add(self, chains_S: Tensor, rates_S: Tensor) -> Tensor:
        """Σ of the reach of the next proposal of these chains, accepted at these rates; all of one step in one call."""
        reach_S = self._reach_N[chains_S] * rates_S
        self._reach_N = self._reach_N.index_put((chains_S,), reach_S)
        return reach_S.sum()

"""Choose the draft depth of a simulated batch at which a token costs the least time.

A verification that is offered γ proposals, each accepted with probability α when it is reached, commits
(1 − α^{γ+1}) / (1 − α) tokens, the bonus included. Seer (arXiv 2511.14617, adaptive grouped speculative decoding) takes
the depth at which a token costs the least,

    γ* = argmin_γ (D(γ) + T(γ)) · (1 − α) / (1 − α^{γ+1}),  γ ≤ 8

D being the time to draft and T that of a round of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAX_DEPTH = 8


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A request's expected benefit from proposals."""

    acceptance: float
    """α: probability that a proposal is accepted, if those before it were."""
    most: int = MAX_DEPTH
    """Most proposals that its suffix drafts have."""


def committed_tokens(acceptance: float, depth: int) -> float:
    """(1 − α^{γ+1}) / (1 − α): tokens that a verification commits."""
    return float(depth + 1) if acceptance >= 1 else (1 - acceptance ** (depth + 1)) / (1 - acceptance)


def best_depth(claims: Sequence[Claim], round_s: Callable[[int], float]) -> int:
    """γ*: the depth of a batch at which a token costs the least; `round_s(γ)` is D(γ) + T(γ) of the whole batch."""

    def cost(depth: int) -> float:
        return round_s(depth) / sum(committed_tokens(claim.acceptance, min(depth, claim.most)) for claim in claims)

    return min(range(max((claim.most for claim in claims), default=0) + 1), key=cost) if claims else 0

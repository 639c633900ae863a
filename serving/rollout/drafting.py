"""How deep each request of a batch drafts: by what it earns, how long it will still run, and whom it matters to.

A verification that is offered γ proposals, each accepted with probability α when it is reached, commits
(1 − α^{γ+1}) / (1 − α) tokens, the bonus included. Seer (arXiv 2511.14617, adaptive grouped speculative decoding) takes
the depth at which a token costs the least,

    γ* = argmin_γ (D(γ) + T(γ)) · (1 − α) / (1 − α^{γ+1}),  γ ≤ 8

D being the time to draft and T that of a round of the whole batch, and shares it out by priority: first the requests
of high priority, the others from what is left. DAS (arXiv 2511.13841) gives the longest samples the most, short ones
nothing, since a rollout ends when its longest sample does. Here

* `best_depth` is γ* over requests whose α differ, each only as deep as its length allows,
* `depth_by_length` is DAS's share, from 0 for what will end soon to the most for what will run long,
* `share` deals a total number of proposals: in order of priority, each to the request that earns the most with it,
  α^{k} for its k-th proposal.

A total bounds the rows of a verification, as FastGRPO (arXiv 2509.21792) does with C_peak / batch for each request.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAX_DEPTH = 8


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What one request of a batch could do with proposals."""

    acceptance: float
    """α: that a proposal is accepted, if those before it were."""
    most: int = MAX_DEPTH
    """`depth_by_length` of the request."""
    is_high: bool = False
    """Of high priority: served before all others."""


def committed_tokens(acceptance: float, depth: int) -> float:
    """(1 − α^{γ+1}) / (1 − α): tokens that a verification commits."""
    return float(depth + 1) if acceptance >= 1 else (1 - acceptance ** (depth + 1)) / (1 - acceptance)


def depth_by_length(remaining: int, *, short: int, long: int, most: int = MAX_DEPTH) -> int:
    """0 for at most `short` expected remaining tokens, `most` from `long` on, in proportion between them."""
    share = (remaining - short) / max(long - short, 1)
    return round(most * min(max(share, 0.0), 1.0))


def best_depth(claims: Sequence[Claim], round_s: Callable[[int], float]) -> int:
    """γ*: the depth of a batch at which a token costs the least; `round_s(γ)` is D(γ) + T(γ) of the whole batch."""

    def cost(depth: int) -> float:
        return round_s(depth) / sum(committed_tokens(claim.acceptance, min(depth, claim.most)) for claim in claims)

    return min(range(max((claim.most for claim in claims), default=0) + 1), key=cost) if claims else 0


def share(claims: Sequence[Claim], total: int) -> list[int]:
    """Depths of the claims, together at most `total`."""
    depths = [0] * len(claims)
    gains = [(not claim.is_high, -claim.acceptance, row) for row, claim in enumerate(claims) if claim.most > 0]
    heapq.heapify(gains)
    while gains and total > 0:
        is_low, gain, row = heapq.heappop(gains)
        depths[row] += 1
        total -= 1
        if depths[row] < claims[row].most:
            heapq.heappush(gains, (is_low, gain * claims[row].acceptance, row))
    return depths

"""Compare ways of decoding as if rounds of equal shape took equally long.

On a shared machine the same rounds take 15% more in one minute than in the next, which hides what a better choice of
rounds earns. So a round is charged the median of all rounds of its shape, whoever ran them: what is left of a
difference between two ways of decoding is which rounds they chose and what those committed. Rounds of a rare shape are
charged what they took. Prefill is the same for all and left out; planning is measured by itself.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

_COMMON = 8
"""Least number of rounds of one shape for their median to be used."""


class Round(NamedTuple):
    """One round: its requests, its longest chain, and its two parts in seconds. Of several requests rounds of one shape
    may verify more and less: what they share is a median of such.
    """

    batch: int
    num_proposals: int
    num_steps: int
    """Steps of the head; 0 where it was not used."""
    num_pairs: int
    """Pairs that the head read first."""
    verify_s: float | None
    """None where the same pass also prefilled a prompt: the round is charged as others of its shape."""
    draft_s: float


def at_equal_cost(runs: Sequence[Sequence[Round]]) -> list[float]:
    """Seconds of each run at equal cost."""
    verify, draft = defaultdict[tuple[int, int], list[float]](list), defaultdict[Hashable, list[float]](list)
    for run in runs:
        for one in run:
            if one.verify_s is not None:
                verify[_verified(one)].append(one.verify_s)
            draft[_drafted(one)].append(one.draft_s)
    return [
        sum(_usual(_alike(one, verify), one.verify_s) + _usual(draft[_drafted(one)], one.draft_s) for one in run)
        for run in runs
    ]


def _alike(one: Round, verify: Mapping[tuple[int, int], Sequence[float]]) -> Sequence[float]:
    """What rounds of its shape took, or where its own time is not known those of as many requests, or else all."""
    alike = verify.get(_verified(one), ())
    if alike or one.verify_s is not None:
        return alike
    times = [(batch, seconds) for (batch, _), times in verify.items() for seconds in times]
    return [seconds for batch, seconds in times if batch == one.batch] or [seconds for _, seconds in times]


def _verified(one: Round) -> tuple[int, int]:
    return one.batch, one.num_proposals


def _drafted(one: Round) -> Hashable:
    # A head that was not used for a while reads many pairs at once.
    return one.batch, one.num_steps, one.num_pairs if one.num_pairs > 4 * one.batch else 0


def _usual(alike: Sequence[float], seconds: float | None) -> float:
    return statistics.median(alike) if seconds is None or len(alike) >= _COMMON else seconds

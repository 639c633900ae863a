"""Drafts that are only a number, for tests of the trainer's review: what they accept, and who is told."""

from __future__ import annotations

import random

from speculator.errors import StreamError
from trainer.statistics import AcceptanceCounts, PairedScores

LENGTH = 2.0
NOISE = 0.02
"""What one trace says more or less of a draft than others do, relative; requests differ by far more."""


def accepted(version: int, trace_id: str, change: float) -> AcceptanceCounts:
    """What a version that differs from others by `change` would commit on a trace."""
    hardness = random.Random(trace_id).uniform(0.5, 1.5)
    luck = 1 + random.Random(f"{version} {trace_id}").gauss(0, NOISE)
    return AcceptanceCounts(num_committed=100, num_rounds=100 / (LENGTH * (1 + change)) * hardness * luck)


def partly_worse(rng: random.Random, *, share: float, loss: float) -> PairedScores:
    """A trace that both drafts decode alike, but for a `share` of the traces."""
    tokens, length = rng.randint(40, 120), rng.uniform(1.2, 2.2)
    factor = 1 - loss if rng.random() < share else 1.0
    both = [AcceptanceCounts(num_committed=tokens, num_rounds=tokens / (length * each)) for each in (factor, 1.0)]
    return PairedScores(*both)


class Pointer:
    """What the review asks of Redis."""

    def __init__(self) -> None:
        self.version, self.is_away = 1, False
        self.pin: int | None = None

    def pinned(self) -> int | None:
        if self.is_away:
            raise StreamError("away")
        return self.pin

    def replace(self, old: int, new: int) -> bool:
        if self.version == old:
            self.version = new
        return self.version == new

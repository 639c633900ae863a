"""Share one pool fairly between jobs: of equal urgency, the job with the fewest tokens for its weight goes first.

A job's time is the tokens that it has got, divided by its weight. A job that comes, or comes back, begins at the lowest
time of the jobs that are there, or at its own if that is higher: what it did not use before gives it no claim to the
whole pool. This is fair queueing by start times (Goyal, Vin and Cheng, SIGCOMM 1996), with tokens as they come in the
place of packet lengths.

A running sample yields to another job only where that job, after the exchange, would hold at most half as many slots
for its weight as the one that gives. Otherwise it waits until samples end, since every move costs reading a context
again.
"""

from __future__ import annotations

from collections import Counter

_FEW = 2
"""How many times fewer slots for its weight a job must hold, to be given one that is held."""
MOST_JOBS = 1000
"""Jobs that are remembered while none of their samples is under way."""


class FairShares:
    def __init__(self) -> None:
        self._times: dict[str, float] = {}
        self._under_way: Counter[str] = Counter()
        self._running: Counter[str] = Counter()

    def virtual_time(self, job: str) -> float:
        """Tokens that the job has got, divided by its weight."""
        return self._times.get(job, 0.0)

    def add_samples(self, job: str, num_samples: int) -> None:
        if not self._under_way[job]:
            others = [self._times[other] for other, count in self._under_way.items() if count]
            self._times[job] = max(self.virtual_time(job), min(others, default=0.0))
        self._under_way[job] += num_samples

    def sample_ended(self, job: str) -> None:
        """One sample of the job has ended."""
        self._under_way[job] -= 1
        if not self._under_way[job]:
            del self._under_way[job]
            if len(self._times) > MOST_JOBS:
                del self._times[job]

    def count_running(self, job: str, change: int) -> None:
        """Count `change` more samples of the job that hold a slot."""
        self._running[job] += change
        if not self._running[job]:
            del self._running[job]

    def displaces(self, waiting: tuple[str, float], running: tuple[str, float]) -> bool:
        """Whether the first of two jobs, each with its weight, should have a slot that the other one holds."""
        (comes, more), (goes, less) = waiting, running
        return _FEW * (self._running[comes] + 1) / more <= (self._running[goes] - 1) / less

    def charge(self, job: str, num_tokens: int, weight: float) -> None:
        self._times[job] = self.virtual_time(job) + num_tokens / weight

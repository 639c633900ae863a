"""What waits, best first.

The samples of a prompt are work items of their own, and whichever engine has a free slot takes the next one: queue
scheduling with prompt replication as in ROLL Flash (arXiv 2510.11345). There is no batch whose end anything waits for.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from serving.rollout.nouns import Sample, SampleId
from serving.rollout.order import Rank, urgency

_LOOKS = 64
_SPARE = 64
"""Outdated entries that the heap may have beside as many as it has live ones."""


class WaitingQueue:
    """A heap of samples; an outdated entry is skipped when it surfaces."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, int, Sample]] = []
        self._tickets: dict[SampleId, int] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, sample: Sample) -> bool:
        return sample.sample_id in self._tickets

    def put(self, sample: Sample, rank: Rank) -> None:
        """Queue a sample; one that waits already gets the new rank."""
        self.discard(sample)
        ticket = self._tickets[sample.sample_id] = next(self._numbers)
        heapq.heappush(self._heap, (rank, ticket, sample))

    def discard(self, sample: Sample) -> None:
        self._tickets.pop(sample.sample_id, None)
        # Samples of groups that have ended would stay for as long as something better waits.
        if len(self._heap) > 2 * len(self._tickets) + _SPARE:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)

    def first(self) -> Sample | None:
        """The best; it stays."""
        while self._heap and not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def take(self, fits: Callable[[Sample], bool], will_fit: Callable[[Sample], bool]) -> Sample | None:
        """The best that fits, among the first 64: what does not fit keeps its place. Nothing less urgent goes before
        one that `will_fit` once others have ended.
        """
        passed_over: list[tuple[Rank, int, Sample]] = []
        found: Sample | None = None
        awaited: Rank | None = None
        while found is None and len(passed_over) < _LOOKS and (sample := self.first()) is not None:
            if awaited is not None and urgency(sample) > awaited:
                break
            entry = heapq.heappop(self._heap)
            if fits(sample):
                found = sample
            else:
                passed_over.append(entry)
                if awaited is None and will_fit(sample):
                    awaited = urgency(sample)
        for entry in passed_over:
            heapq.heappush(self._heap, entry)
        if found is not None:
            self.discard(found)
        return found

    def _is_live(self, entry: tuple[Rank, int, Sample]) -> bool:
        _, ticket, sample = entry
        return self._tickets.get(sample.sample_id) == ticket

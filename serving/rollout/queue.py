"""What waits, best first, for any engine or for one."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable

from serving.rollout.order import Rank, urgency
from serving.rollout.work import Sample, SampleId

_LOOKS = 64
_SPARE = 64
"""Outdated entries that a heap may have beside as many as it has live ones."""

_Entry = tuple[Rank, int, Sample]


class WaitingQueue:
    """Heaps of samples by the engine that may take them (None: any); an outdated entry is skipped when it surfaces."""

    def __init__(self) -> None:
        self._heaps: defaultdict[str | None, list[_Entry]] = defaultdict(list)
        self._tickets: dict[SampleId, tuple[int, str | None]] = {}
        self._counts: Counter[str | None] = Counter()
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, sample: Sample) -> bool:
        return sample.sample_id in self._tickets

    def num_bound(self, engine: str) -> int:
        """How many wait for this engine alone."""
        return self._counts[engine]

    def put(self, sample: Sample, rank: Rank) -> None:
        """Queue for `sample.engine`; one that waits already gets the new rank and place."""
        self.discard(sample)
        ticket = next(self._numbers)
        self._tickets[sample.sample_id] = ticket, sample.engine
        self._counts[sample.engine] += 1
        heapq.heappush(self._heaps[sample.engine], (rank, ticket, sample))

    def discard(self, sample: Sample) -> None:
        if sample.sample_id in self._tickets:
            _, place = self._tickets.pop(sample.sample_id)
            self._counts[place] -= 1
            self._clear_up(place)

    def first(self, engine: str) -> Sample | None:
        """The best that this engine may take; it stays."""
        heap = self._best_heap(engine)
        return heap[0][2] if heap else None

    def take(self, engine: str, fits: Callable[[Sample], bool], will_fit: Callable[[Sample], bool]) -> Sample | None:
        """The best that this engine may take and that fits, among the first 64: what does not fit keeps its place.
        Nothing less urgent goes before one that `will_fit` once others have ended.
        """
        passed_over: list[tuple[list[_Entry], _Entry]] = []
        found: Sample | None = None
        awaited: Rank | None = None
        while found is None and len(passed_over) < _LOOKS and (heap := self._best_heap(engine)):
            sample = heap[0][2]
            if awaited is not None and urgency(sample) > awaited:
                break
            entry = heapq.heappop(heap)
            if fits(sample):
                found = sample
                self.discard(found)
            else:
                passed_over.append((heap, entry))
                if awaited is None and will_fit(sample):
                    awaited = urgency(sample)
        for heap, entry in passed_over:
            heapq.heappush(heap, entry)
        return found

    def _best_heap(self, engine: str) -> list[_Entry]:
        """Of the engine's own heap and that of all engines the one with the better head; empty if both are."""
        own, shared = self._cleaned(engine), self._cleaned(None)
        if own and shared:
            return min(own, shared, key=lambda heap: heap[0])
        return own or shared

    def _cleaned(self, place: str | None) -> list[_Entry]:
        heap = self._heaps[place]
        while heap and not self._is_live(heap[0]):
            heapq.heappop(heap)
        return heap

    def _clear_up(self, place: str | None) -> None:
        """Samples of groups that have ended would stay for as long as something better waits."""
        heap = self._heaps[place]
        if len(heap) > 2 * self._counts[place] + _SPARE:
            heap[:] = [entry for entry in heap if self._is_live(entry)]
            heapq.heapify(heap)

    def _is_live(self, entry: _Entry) -> bool:
        _, ticket, sample = entry
        return self._tickets.get(sample.sample_id, (-1, None))[0] == ticket

"""The samples that wait for an engine, in the order of the scheduler's policy."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from serving.rollout.order import Rank, urgency
from serving.rollout.samples import Sample, SampleId

_Entry = tuple[Rank, int, Sample]
"""Rank, the number of the entry, and the sample."""
_Key = tuple[str, int]
"""Job and shape."""
_MAX_EXAMINED = 64
_MAX_EXAMINED_A_SHAPE = 8
_SPARE = 64
"""Outdated entries that the heaps may have beyond the number of live ones."""


def _kind(sample: Sample) -> tuple[Rank, str, bool]:
    return urgency(sample), sample.job, sample.is_probe


class WaitingQueue:
    """A heap of samples for each job and shape; an outdated entry is skipped when it surfaces."""

    def __init__(self, virtual_time: Callable[[str], float] = lambda job: 0.0) -> None:
        """Of jobs with equally urgent samples, the one with the least `virtual_time` goes first."""
        self._virtual_time = virtual_time
        self._heaps: dict[_Key, list[_Entry]] = {}
        self._tickets: dict[SampleId, int] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, sample: Sample) -> bool:
        return sample.sample_id in self._tickets

    def put(self, sample: Sample, rank: Rank, shape: int = 0) -> None:
        """Queue a sample; one that waits already gets the new rank. Engines choose between samples of different shapes,
        such as long prompts and long answers.
        """
        self.discard(sample)
        ticket = self._tickets[sample.sample_id] = next(self._numbers)
        heapq.heappush(self._heaps.setdefault((sample.job, shape), []), (rank, ticket, sample))

    def discard(self, sample: Sample) -> None:
        self._tickets.pop(sample.sample_id, None)
        # Otherwise samples of ended groups would stay for as long as something better waits.
        if sum(map(len, self._heaps.values())) > 2 * len(self._tickets) + _SPARE:
            for heap in self._heaps.values():
                heap[:] = [entry for entry in heap if self._is_live(entry)]
                heapq.heapify(heap)

    def first(self) -> Sample | None:
        """The sample that goes first; it stays in the queue."""
        key = self._best()
        return None if key is None else self._heaps[key][0][2]

    def _best(self) -> _Key | None:
        """The key of the heap with the sample that goes first on top."""
        for key, heap in list(self._heaps.items()):
            if not self._has_live(heap):
                del self._heaps[key]
        keys = (
            (urgency(heap[0][2]), self._virtual_time(key[0]), heap[0][:2], key) for key, heap in self._heaps.items()
        )
        best = min(keys, default=None)
        return None if best is None else best[-1]

    def take(
        self,
        fits: Callable[[Sample], bool],
        will_fit: Callable[[Sample], bool],
        is_left: Callable[[Sample], bool] = lambda _: False,
        *,
        cost: Callable[[Sample], float] = lambda _: 0.0,
    ) -> Sample | None:
        """Take the first sample that `fits`, among the best 64; the others keep their place.

        What `is_left` to other engines counts as absent. Nothing less urgent goes before one that `will_fit` once
        others have ended. Among equally urgent probes of a job, or equally urgent others, the one with the least `cost`
        goes first; the best 8 of each shape are compared.
        """
        examined: list[tuple[_Key, _Entry]] = []
        choices: list[_Entry] = []
        awaited: Rank | None = None
        while not choices and len(examined) < _MAX_EXAMINED and (key := self._best()) is not None:
            entry = heapq.heappop(self._heaps[key])
            examined.append((key, entry))
            if awaited is not None and urgency(entry[2]) > awaited:
                break
            if is_left(entry[2]):
                continue
            if fits(entry[2]):
                choices.append(entry)
            elif awaited is None and will_fit(entry[2]):
                awaited = urgency(entry[2])
        for key in [key for key in self._heaps if choices and key[0] == choices[0][2].job]:
            for _ in range(_MAX_EXAMINED_A_SHAPE):
                if not self._has_live(self._heaps[key]) or _kind(self._heaps[key][0][2]) != _kind(choices[0][2]):
                    break
                entry = heapq.heappop(self._heaps[key])
                examined.append((key, entry))
                choices += [entry] if fits(entry[2]) and not is_left(entry[2]) else []
        for key, entry in examined:
            heapq.heappush(self._heaps.setdefault(key, []), entry)
        if not choices:
            return None
        found = min(choices, key=lambda entry: (cost(entry[2]), entry))[2]
        self.discard(found)
        return found

    def _has_live(self, heap: list[_Entry]) -> bool:
        """Drop outdated entries from the top of a heap; returns whether another is left."""
        while heap and not self._is_live(heap[0]):
            heapq.heappop(heap)
        return bool(heap)

    def _is_live(self, entry: _Entry) -> bool:
        _, ticket, sample = entry
        return self._tickets.get(sample.sample_id) == ticket

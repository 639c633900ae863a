"""When the trainer may compute beside serving, within a budget of what that may cost serving.

While no engine works, always. While one does, in slices with rests between them:

    slowdown = Σ (time of a step − time of such a step alone) / Σ (time that the trainer computed during it)

over the steps of late, where "alone" are the steps during rests, with the same batch and number of tokens. After a
slice, where it is within the budget by its standard error, the next one doubles and the rest halves. Where it is over
the budget by two, the next slice is the shortest again and the rest doubles; else all stays, and more steps will say.
So where cores, caches and memory are enough for both, the trainer soon computes nearly all the time, and where they are
not, it touches one step in hundreds: too rare for the 99th percentile. It is slow start (RFC 5681) for what a
best-effort job may take from a latency-critical one, with the latter's own latency as the signal (Heracles, Lo et al.,
ISCA 2015). While requests queue there are no slices: what slows a step then delays all that wait behind it.

Nothing here reads a clock or talks to anybody.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field

from speculator.pulse import Serving

SHORTEST_SLICE_S, LONGEST_SLICE_S = 0.25, 10.0
"""The shortest is long enough for a conclusion."""
SHORTEST_REST_S, FIRST_REST_S, LONGEST_REST_S = 0.5, 20.0, 40.0
"""With the longest the shortest slice touches 7 steps of 35 ms in a thousand; slow ones more often, of 0.25 s 11."""
_REST_AFTER_HARM_S = 5.0
"""At least: what slows serving now was no slowdown a moment ago."""
LEAST_EVIDENCE_S = 0.2
"""Computing beside serving before anything is concluded from it."""
_MARGIN, _SURE = 1.0, 2.0
"""Standard errors below the budget to take more, and above it to take less: steps vary by more than the budget."""
_MEMORY_S = 2.0
"""Computing beside serving that the slowdown is about; it forgets by halves."""
_LEAST_ALONE = 5
"""Steps of a shape before its time alone is known."""
_MAX_ALONE = 50
_MAX_SHAPES = 10_000
_LONGEST_LOOK_S = 0.25
"""Most of a longer time between two questions was not spent computing: the trainer had nothing to do."""
_OUTLIER = 4.0
"""Times the expected: a step that took longer was held up by something else."""


@dataclass
class _Alone:
    """Mean time of a shape's steps while the trainer rested, and their variance."""

    seconds: float = 0.0
    variance: float = 0.0
    count: int = 0
    num_beside: int = 0
    """Steps of this slice that were set against the mean."""

    def set_against(self) -> float:
        """The variance that one more step of this slice adds to the sum of their differences from the mean: its own,
        and the mean's, which is off by the same for all of them, so n steps have σ² · (n + n² / count)."""
        self.num_beside += 1
        return self.variance * (1 + (2 * self.num_beside - 1) / min(self.count, _MAX_ALONE))

    def add(self, seconds: float) -> None:
        self.count += 1
        if self.count > _LEAST_ALONE:
            seconds = min(seconds, _OUTLIER * self.seconds)
        share, off = 1 / min(self.count, _MAX_ALONE), seconds - self.seconds
        self.seconds += share * off
        self.variance += share * (off * (seconds - self.seconds) - self.variance)


@dataclass
class Slowdown:
    """What the trainer's computing costs serving, as a share of the time that they compute side by side."""

    beside_s: float = 0.0
    excess_s: float = 0.0
    variance: float = 0.0
    """Of `excess_s`."""
    _alone: dict[Hashable, _Alone] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """0 while nothing is known."""
        return self.excess_s / self.beside_s if self.beside_s else 0.0

    @property
    def error(self) -> float:
        """Standard error of `ratio`."""
        return math.sqrt(self.variance) / self.beside_s if self.beside_s else 0.0

    def add(self, shape: Hashable, seconds: float, beside_s: float) -> None:
        """A step of an engine, during `beside_s` seconds of which the trainer computed."""
        if len(self._alone) >= _MAX_SHAPES:
            # Engines have come and gone, and their shapes with them.
            self._alone.clear()
        alone = self._alone.setdefault(shape, _Alone())
        if beside_s <= 0:
            alone.add(seconds)
        elif alone.count >= _LEAST_ALONE:
            self.beside_s += beside_s
            self.excess_s += min(seconds, _OUTLIER * alone.seconds) - alone.seconds
            self.variance += alone.set_against()

    def fade(self) -> None:
        """A slice begins: the rest before it has renewed what is known of steps alone."""
        for alone in self._alone.values():
            alone.num_beside = 0
        while self.beside_s > _MEMORY_S:
            self.beside_s, self.excess_s, self.variance = self.beside_s / 2, self.excess_s / 2, self.variance / 4

    def forget(self) -> None:
        self.beside_s = self.excess_s = self.variance = 0.0


class Sharing:
    """Asked again and again whether the trainer may compute now; told of every step of serving."""

    def __init__(self, *, budget: float) -> None:
        self.budget = budget
        """Relative slowdown of serving's steps that is all right."""
        self.slowdown = Slowdown()
        self.slice_s, self.rest_s = SHORTEST_SLICE_S, FIRST_REST_S
        self.found = 0.0
        """The slowdown that the last conclusion was drawn from."""
        self._in_slice = False
        self._spent_s = 0.0
        """Of the present slice or rest; only time in which serving was busy counts."""
        self._beside_before_s = 0.0
        self._asked_s: float | None = None
        """When it was asked last, if serving was busy then."""

    def observe(self, shape: Hashable, seconds: float, beside_s: float) -> None:
        """A step of serving has ended, during `beside_s` seconds of which the trainer computed."""
        self.slowdown.add(shape, seconds, beside_s)

    def may_compute(self, now_s: float, serving: Serving) -> bool:
        if not serving.is_busy:
            self._asked_s = None
            return True
        if self._asked_s is not None:
            self._spent_s += min(now_s - self._asked_s, _LONGEST_LOOK_S)
        self._asked_s = now_s
        if self._in_slice:
            if self._spent_s >= self.slice_s or self._hurts or serving.num_waiting:
                self._turn(in_slice=False)
        elif self._spent_s >= self.rest_s and not serving.num_waiting:
            self._adapt()
            self._turn(in_slice=True)
        return self._in_slice

    @property
    def _hurts(self) -> bool:
        learnt_s = self.slowdown.beside_s - self._beside_before_s
        return learnt_s >= LEAST_EVIDENCE_S and self._is_over_budget

    @property
    def _is_over_budget(self) -> bool:
        return self.slowdown.ratio - _SURE * self.slowdown.error > self.budget

    def _turn(self, *, in_slice: bool) -> None:
        self._in_slice, self._spent_s = in_slice, 0.0
        if in_slice:
            self.slowdown.fade()
            self._beside_before_s = self.slowdown.beside_s

    def _adapt(self) -> None:
        """By what the last slice has shown; where that is nothing, or not enough, as before."""
        known_s = self.slowdown.beside_s
        if known_s == self._beside_before_s or known_s < LEAST_EVIDENCE_S:
            return
        self.found = self.slowdown.ratio
        if self.found + _MARGIN * self.slowdown.error <= self.budget:
            self.slice_s = min(2 * self.slice_s, LONGEST_SLICE_S)
            self.rest_s = max(self.rest_s / 2, SHORTEST_REST_S)
        elif self._is_over_budget:
            self.slice_s = SHORTEST_SLICE_S
            self.rest_s = min(max(2 * self.rest_s, _REST_AFTER_HARM_S), LONGEST_REST_S)
            # The next conclusion is not to be drawn from the same steps, which may have been slow by chance.
            self.slowdown.forget()

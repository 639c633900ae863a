"""The share of an engine's slots that rollouts may hold while interactive requests keep their latency objectives.

Additive increase, multiplicative decrease (Chiu and Jain, 1989): a latency above an objective, where that is one more
than 1% of them allow, halves the share, down to nothing; while they keep it, the share rises in steps. After each
decrease the next step comes later, and not before as many latencies allow it as were too many, so that trying costs
interactive requests little however few they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

_TOLERATED = 0.01
"""An objective is on the 99th percentile."""
_MOST_SAVED, _MOST_OWED = 3.0, -3.0
"""Misses at a time that are taken for chance, and that are to be made up for: what others cause keeps rollouts neither
out nor in for long.
"""
_STEPS = 8
"""From nothing to the most."""
_FIRST_PAUSE_S = 2.0
_MAX_PAUSE_S = 60.0
_SETTLE_S = 1.0
"""So long after a decrease latencies may still be those of the share before."""


@dataclass
class _Objective:
    """One latency's objective, and what was observed since the last change."""

    p99_s: float | None
    allowance: float = 1.0
    """Of the latencies above it those that are still allowed: 1% of all, less those that there were. One from the
    beginning, as a single slow request says nothing about a percentile; below 0, what is to be made up for.
    """
    num: int = 0
    num_over: int = 0

    @property
    def is_missed(self) -> bool:
        return self.num_over > 0 and self.allowance < 0.0

    @property
    def allows_more(self) -> bool:
        """Where nothing was observed nobody is there to mind."""
        return self.num == 0 or self.allowance >= 0.0


class SlotsShare:
    """Owned by one event loop."""

    def __init__(
        self,
        most: float = 1.0,
        *,
        ttft_p99_s: float | None = None,
        itl_p99_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ttft_p99_s` is for the time to first token, `itl_p99_s` for the time between two chunks of an answer; with
        neither the share is always `most`.
        """
        self.most = most
        self.share = most
        """As last decided."""
        self._clock = clock
        self._first_token, self._between_chunks = _Objective(ttft_p99_s), _Objective(itl_p99_s)
        self._changed_s, self._settled_s, self._pause_s = clock(), clock(), _FIRST_PAUSE_S

    def observe_first_token(self, seconds: float) -> None:
        """Note an interactive request's time to first token."""
        self._observe(self._first_token, seconds)

    def observe_between_chunks(self, seconds: float) -> None:
        """Note the time between two chunks of an interactive request's answer."""
        self._observe(self._between_chunks, seconds)

    def update(self) -> float:
        """Decide anew; returns the share, from 0 to `most`."""
        if self._first_token.is_missed or self._between_chunks.is_missed:
            halved = self.share / 2
            self._change(halved if halved > self.most / (2 * _STEPS) else 0.0)
            self._settled_s = self._changed_s + _SETTLE_S
            self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
        elif self._can_rise():
            self._change(min(self.share + self.most / _STEPS, self.most))
            if self.share == self.most:
                self._pause_s = _FIRST_PAUSE_S
        return self.share

    def slots(self, num_slots: int) -> int:
        """Of so many slots those that rollouts may hold now: at least one, unless the share is 0."""
        share = self.update()
        return max(1, int(share * num_slots)) if share else 0

    def _observe(self, objective: _Objective, seconds: float) -> None:
        if objective.p99_s is not None and self._clock() >= self._settled_s:
            is_over = seconds > objective.p99_s
            objective.num += 1
            objective.num_over += is_over
            objective.allowance = max(_MOST_OWED, min(objective.allowance + _TOLERATED - is_over, _MOST_SAVED))

    def _can_rise(self) -> bool:
        paused_s = self._clock() - self._changed_s
        allows_more = self._first_token.allows_more and self._between_chunks.allows_more
        return self.share < self.most and paused_s > self._pause_s and allows_more

    def _change(self, share: float) -> None:
        self.share, self._changed_s = share, self._clock()
        for objective in (self._first_token, self._between_chunks):
            objective.num = objective.num_over = 0

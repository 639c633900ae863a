"""When more training is worth its compute: training pressure, and the learning curve that it follows.

**Training pressure** is a number from 0 to 1 that says how much more training is worth its compute:

    1 during a drift alarm, and until enough candidates were judged to say whether training still changes anything
    0 where the last WINDOW candidates were trained with the same acceptance and the same loss as the WINDOW before them
    in between by the size of the change; and 0 as soon as the replay was learnt from `pressure · max_passes` times

At 0 a new trace still gets its first step, together with old ones. A new trace is worth all passes anew. A repeated one
is worth `max_passes` of its own tokens.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

WINDOW = 8
"""Candidates on either side of the comparison: four minutes at the default interval."""
FULL_GAIN = 0.01
"""Relative change, beyond noise, that is worth all the passes."""
_NOISE = 2.0
"""Standard errors that a change must exceed."""


class LearningCurve:
    """Mean acceptance length and loss of the steps between two candidates; `points` survives a restart."""

    def __init__(self, points: Iterable[Sequence[float]] = ()) -> None:
        self._points = [tuple(point) for point in points]
        self._num_steps = 0
        self._sums = (0.0, 0.0)

    @property
    def points(self) -> list[tuple[float, ...]]:
        """(acceptance length, loss) by candidate, oldest first."""
        return self._points

    def observe(self, accept_length: float, loss: float) -> None:
        """Take one step."""
        self._num_steps += 1
        self._sums = (self._sums[0] + accept_length, self._sums[1] + loss)

    def mark(self) -> None:
        """A candidate was made of the steps since the last one."""
        if self._num_steps:
            point = tuple(total / self._num_steps for total in self._sums)
            self._points = [*self._points, point][-2 * WINDOW :]
        self._num_steps, self._sums = 0, (0.0, 0.0)

    @property
    def gain(self) -> float | None:
        """Relative change of acceptance or loss, whichever is larger, beyond noise; None while it is too early.

        A change for the worse counts too: the traces became harder, and there is something to learn again.
        """
        if len(self._points) < 2 * WINDOW:
            return None
        lengths, losses = ([point[column] for point in self._points] for column in (0, 1))
        return max(_excess(lengths), _excess(losses))


def training_pressure(*, alarm: bool, gain: float | None) -> float:
    """In [0, 1]; see above."""
    return 1.0 if alarm or gain is None else min(gain / FULL_GAIN, 1.0)


def tokens_owed(*, pressure: float, max_passes: float, replay_tokens: int, tokens_since_news: int) -> float:
    """Tokens of old traces to learn from before the trainer may sleep; 0 or less: nothing is to be gained."""
    return pressure * max_passes * replay_tokens - tokens_since_news


def _excess(values: Sequence[float]) -> float:
    older, newer = values[:WINDOW], values[WINDOW:]
    noise = _NOISE * math.sqrt((statistics.variance(older) + statistics.variance(newer)) / WINDOW)
    change = abs(statistics.fmean(newer) - statistics.fmean(older))
    return max(change - noise, 0.0) / max(abs(statistics.fmean(older)), 1e-6)

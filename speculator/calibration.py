"""Probabilities kept honest: what a proposer predicts of its proposals, corrected by what verification accepted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable

_PRIOR_WEIGHT = 8.0
_MOST_CERTAIN = 0.998


class Calibration:
    """Accepted over predicted proposals by kind, fading; a kind that nobody has seen is believed.

    `memory` is what an observed proposal still weighs after another of its kind.
    """

    def __init__(self, memory: float = 0.995) -> None:
        self._memory = memory
        self._predicted: defaultdict[Hashable, float] = defaultdict(lambda: _PRIOR_WEIGHT)
        self._accepted: defaultdict[Hashable, float] = defaultdict(lambda: _PRIOR_WEIGHT)

    def probability(self, kind: Hashable, predicted: float) -> float:
        """The prediction times what was accepted over what was predicted."""
        if kind not in self._predicted:
            return min(predicted, _MOST_CERTAIN)
        return min(predicted * self._accepted[kind] / self._predicted[kind], _MOST_CERTAIN)

    def add(self, kind: Hashable, predicted: float, *, accepted: bool) -> None:
        """A proposal that verification reached."""
        self._predicted[kind] = self._memory * self._predicted[kind] + predicted
        self._accepted[kind] = self._memory * self._accepted[kind] + accepted

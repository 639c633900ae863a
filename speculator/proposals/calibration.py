"""Probabilities kept honest: what a proposer predicts of its proposals, corrected by what verification accepted."""

from __future__ import annotations

from collections.abc import Hashable

_PRIOR_WEIGHT = 8.0
_MOST_CERTAIN = 0.998


class Calibration:
    """Accepted over predicted proposals by kind, fading; a kind that nobody has seen is believed.

    `memory` is what an observed proposal still weighs after another of its kind.
    """

    def __init__(self, memory: float = 0.995) -> None:
        self._memory = memory
        self._sums: dict[Hashable, tuple[float, float]] = {}
        """Predicted and accepted, by kind."""

    def probability(self, kind: Hashable, predicted: float) -> float:
        """The prediction times what was accepted over what was predicted."""
        sums = self._sums.get(kind)
        if sums is not None:
            predicted *= sums[1] / sums[0]
        return predicted if predicted < _MOST_CERTAIN else _MOST_CERTAIN

    def add(self, kind: Hashable, predicted: float, *, accepted: bool) -> None:
        """A proposal that verification reached."""
        all_predicted, all_accepted = self._sums.get(kind, (_PRIOR_WEIGHT, _PRIOR_WEIGHT))
        self._sums[kind] = self._memory * all_predicted + predicted, self._memory * all_accepted + accepted

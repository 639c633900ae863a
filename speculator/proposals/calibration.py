"""What verification accepted: shares by position, and corrections of what a proposer predicts of its proposals."""

from __future__ import annotations

from collections.abc import Hashable

_PRIOR_WEIGHT = 8.0
_MOST_CERTAIN = 0.998
_POSITION_MEMORY = 0.995
"""What an observation of a position still weighs after another: half after 140 verifications."""
_POSITION_PRIOR = 2.0
_FIRST_PRIOR = 0.6
"""A draft that nobody has seen yet is tried before it is judged."""


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


class PositionAcceptance:
    """α by position, with an exponentially fading memory. Position 1 is the first proposal of a chain."""

    def __init__(self, max_depth: int) -> None:
        self._reached = [0.0] * max_depth
        self._accepted = [0.0] * max_depth

    def add(self, num_proposals: int, num_accepted: int) -> None:
        """One verification: the proposals up to the first rejected one were reached."""
        for position in range(min(num_proposals, num_accepted + 1, len(self._reached))):
            self._reached[position] = _POSITION_MEMORY * self._reached[position] + 1
            self._accepted[position] = _POSITION_MEMORY * self._accepted[position] + (position < num_accepted)

    def fade(self, weight: float) -> None:
        self._reached = [weight * reached for reached in self._reached]
        self._accepted = [weight * accepted for accepted in self._accepted]

    def rate(self, position: int) -> float:
        """α of a position from 1; an unseen one is taken to be like the one before it."""
        prior = _FIRST_PRIOR
        for reached, accepted in zip(self._reached[:position], self._accepted[:position], strict=True):
            prior = (accepted + _POSITION_PRIOR * prior) / (reached + _POSITION_PRIOR)
        return prior

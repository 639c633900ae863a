"""Estimates for the planner, learned while serving: how many proposals are accepted, and how long a round takes.

**Acceptance** is counted by position of a chain (`PositionAcceptance`), or corrects a proposer's own probabilities
(`Calibration`).

**Time** of verification and of drafting is estimated in seconds, for any size. A verification of P proposals for each
of b requests puts r = b · (P + 1) rows through the target, and its attention reads the keys of all b contexts:

    T = θ₀ + θ₁ · r + θ₂ · (rows × keys that they attend to)

If requests have different numbers of proposals, P is the largest, and a round has fewer rows than r. Counting its true
rows instead made serving slower: such rounds were chosen where their proposals are overestimated
(benchmarks/results/serving.md).

The line is fitted to every round, older rounds fading. Every b, and every (b, P), has a correction factor, since a
GPU's times are not linear, and a CPU's first row is cheaper than its share. Batches above eight share factors by powers
of two. Drafting has a line of its own. A round that took far longer than expected was interrupted, and its time is
clipped. A further factor on all times follows the machine's current speed, since other processes share it.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence

import numpy as np

_PRIOR_WEIGHT = 8.0
MOST_CERTAIN = 0.998
"""Upper bound of a probability."""
_POSITION_MEMORY = 0.995
"""Decay of a position's counts per verification: half after 140."""
_POSITION_PRIOR = 2.0
_FIRST_PRIOR = 0.6
"""Assumed acceptance at position 1 before any verification: high, so that a new draft is tried."""


class Calibration:
    """Factor accepted over predicted proposals, by kind, with exponential decay; 1 for an unseen kind.

    `memory` is the decay per observed proposal of a kind.
    """

    def __init__(self, memory: float = 0.995) -> None:
        self._memory = memory
        self._sums: dict[Hashable, tuple[float, float]] = {}
        """(sum of predicted, sum of accepted) by kind."""

    def probability(self, kind: Hashable, predicted: float) -> float:
        """The prediction times the factor of its kind."""
        predicted *= self.factor(kind)
        return predicted if predicted < MOST_CERTAIN else MOST_CERTAIN

    def factor(self, kind: Hashable) -> float:
        """Accepted over predicted proposals of a kind."""
        sums = self._sums.get(kind)
        return 1.0 if sums is None else sums[1] / sums[0]

    def add(self, kind: Hashable, predicted: float, *, accepted: bool) -> None:
        """Count a proposal that verification reached."""
        all_predicted, all_accepted = self._sums.get(kind, (_PRIOR_WEIGHT, _PRIOR_WEIGHT))
        self._sums[kind] = self._memory * all_predicted + predicted, self._memory * all_accepted + accepted


class PositionAcceptance:
    """Acceptance rate α by position in a chain (from 1), with exponential decay."""

    def __init__(self, max_depth: int) -> None:
        self._reached = [0.0] * max_depth
        self._accepted = [0.0] * max_depth

    def add(self, num_proposals: int, num_accepted: int) -> None:
        """Count one verification, which reached the proposals up to the first rejected one."""
        for position in range(min(num_proposals, num_accepted + 1, len(self._reached))):
            self._reached[position] = _POSITION_MEMORY * self._reached[position] + 1
            self._accepted[position] = _POSITION_MEMORY * self._accepted[position] + (position < num_accepted)

    def decay(self, weight: float) -> None:
        self._reached = [weight * reached for reached in self._reached]
        self._accepted = [weight * accepted for accepted in self._accepted]

    def rate(self, position: int) -> float:
        """α of a position, from 1; for an unseen one that of the position before."""
        prior = _FIRST_PRIOR
        for reached, accepted in zip(self._reached[:position], self._accepted[:position], strict=True):
            prior = (accepted + _POSITION_PRIOR * prior) / (reached + _POSITION_PRIOR)
        return prior


_MEMORY = 0.997
"""Decay of a round's weight per round: half after 230."""
_CLIP = 1.5
"""A time is clipped to so many times the expected one; if the machine stays slow, the estimate follows in steps."""
_TRUSTED_AFTER = 8
_FIT_EVERY = 8
_PRIOR_ROUNDS = 0.05
"""Weight of the assumed slopes, in rounds: enough to plan while only plain steps were seen."""
_SIZE_MEMORY = 0.99
_SIZE_PRIOR = 4.0
"""Rounds of a size after which its own factor weighs as much as that of the coarser size, or the line."""

_PACE_MEMORY = 0.8
"""Decay of the machine's speed factor: half after three rounds. Faster than a size's own factor; otherwise sizes that
last ran in a slow minute would seem expensive until they run again.
"""
_KNOWN_AFTER = 4.0

Sizes = Sequence[Hashable]
"""Names of a measurement's size, from the coarsest to the finest."""


class FittedTime:
    """Fits seconds as a non-negative linear function of a few features, the first of which is 1.

    `slopes` are the assumed relative costs of the features, used until the data vary in them.
    """

    def __init__(self, slopes: Sequence[float]) -> None:
        self._slopes, self._size = slopes, len(slopes)
        self._moments = [[0.0] * self._size for _ in slopes]
        self._sums = [0.0] * self._size
        self._scale = [0.0] * self._size
        self._assumed = self._seconds = self._weight = 0.0
        self._weights = [0.0] * self._size
        self._factors: dict[Hashable, tuple[float, float]] = {}
        self._is_cold = True
        self.count = 0

    def add(self, features: Sequence[float], seconds: float, *, sizes: Sizes) -> None:
        """Add a measurement; updates the factors of its sizes. Ignores the very first, which includes warm-up."""
        if self._is_cold:
            self._is_cold = False
            return
        if self.count >= _TRUSTED_AFTER:
            seconds = min(seconds, _CLIP * self.seconds(features, sizes=sizes))
        for row, x in enumerate(features):
            moments = self._moments[row]
            for column, y in enumerate(features):
                moments[column] = _MEMORY * moments[column] + x * y
            self._sums[row] = _MEMORY * self._sums[row] + x * seconds
            self._scale[row] = max(self._scale[row], x)
        self._assumed = _MEMORY * self._assumed + self._dot(self._slopes, features)
        self._seconds = _MEMORY * self._seconds + seconds
        self._weight = _MEMORY * self._weight + 1
        self.count += 1
        if self.count < _TRUSTED_AFTER or self.count % _FIT_EVERY == 0:
            self._fit()
        ratio = seconds / max(self._dot(self._weights, features), 1e-9)
        for size in sizes:
            total, weight = self._factors.get(size, (0.0, 0.0))
            self._factors[size] = _SIZE_MEMORY * total + ratio, _SIZE_MEMORY * weight + 1

    def seconds(self, features: Sequence[float], *, sizes: Sizes = ()) -> float:
        """The expected time; 0 before the first measurement."""
        factor = 1.0
        for size in sizes:
            total, weight = self._factors.get(size, (0.0, 0.0))
            factor = (total + _SIZE_PRIOR * factor) / (weight + _SIZE_PRIOR)
        return factor * self._dot(self._weights, features)

    def sizes(self) -> list[Hashable]:
        """Sizes with a factor of their own; for any thread."""
        return list(self._factors)

    def weight(self, size: Hashable) -> float:
        """Decayed number of measurements of a size."""
        return self._factors.get(size, (0.0, 0.0))[1]

    def _fit(self) -> None:
        prior = np.array(self._slopes) * (self._seconds / self._assumed)
        # If measurements leave slopes undetermined, the assumed slopes keep their ratios.
        mean_s = self._seconds / self._weight
        ridge = np.diag(_PRIOR_ROUNDS * mean_s * np.maximum(self._scale, 1e-9) / prior)
        weights = _non_negative(np.array(self._moments) + ridge, np.array(self._sums) + ridge @ prior)
        self._weights = weights.tolist()

    @staticmethod
    def _dot(weights: Sequence[float], features: Sequence[float]) -> float:
        return float(sum(map(operator.mul, weights, features)))


def _non_negative(moments: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """Least-squares weights; features whose weight would be negative by noise get 0, since work never saves time."""
    free = np.ones(len(sums), bool)
    while True:
        weights = np.zeros(len(sums))
        weights[free] = np.linalg.solve(moments[np.ix_(free, free)], sums[free])
        if (weights >= 0).all():
            return weights
        free &= weights > 0


class RoundTimes:
    """Verification and drafting times of one engine; used by the thread that decodes."""

    def __init__(self) -> None:
        # Ratios assumed at first. Verification: a further row costs an eighth of the fixed part, 10,000 attended keys a
        # tenth. Drafting: a step costs five times as much as a pair that the draft reads.
        self._verify = FittedTime([1.0, 0.125, 1e-5])
        self._draft = FittedTime([0.02, 0.1, 0.02])
        self._pace = 1.0
        """The machine's speed factor: recent times over those expected for their sizes."""

    def verify_s(self, batch: int, num_proposals: int, num_keys: int) -> float:
        """Expected seconds of a round without drafting; `num_keys` is the sum of the context lengths."""
        features, sizes = _of_verification(batch, num_proposals, num_keys)
        return self._pace * self._verify.seconds(features, sizes=sizes)

    def draft_s(self, batch: int, num_steps: int, num_pairs: int) -> float:
        """Expected seconds for the draft head to read `num_pairs` and propose `num_steps` tokens for each request."""
        if self._draft.count == 0:
            # Nothing drafted yet: guess from the target's time.
            return self.verify_s(batch, 0, 0) * (0.05 + 0.08 * num_steps)
        features, sizes = _of_drafting(batch, num_steps, num_pairs)
        return self._pace * self._draft.seconds(features, sizes=sizes)

    def is_known(self, batch: int, num_proposals: int, *, after: float = _KNOWN_AFTER) -> bool:
        """Whether verifications of this size ran more than `after` times, so that their own time is known."""
        return self._verify.weight(_size(batch, num_proposals)) > after

    def verify_ms_by_size(self) -> dict[tuple[int, int], float]:
        """Expected milliseconds, for short contexts, of each measured (batch size, proposals)."""
        sizes = [size for size in self._verify.sizes() if isinstance(size, tuple)]
        return {(batch, proposals): 1000 * self.verify_s(batch, proposals, 0) for batch, proposals in sizes}

    def add_verification(self, batch: int, num_proposals: int, num_keys: int, seconds: float) -> None:
        features, sizes = _of_verification(batch, num_proposals, num_keys)
        if self._verify.count >= _TRUSTED_AFTER:
            pace = seconds / max(self._verify.seconds(features, sizes=sizes), 1e-9)
            self._pace = _PACE_MEMORY * self._pace + (1 - _PACE_MEMORY) * min(pace, _CLIP * self._pace)
        self._verify.add(features, seconds / self._pace, sizes=sizes)

    def add_drafting(self, batch: int, num_steps: int, num_pairs: int, seconds: float) -> None:
        features, sizes = _of_drafting(batch, num_steps, num_pairs)
        # After long pauses in drafting many pairs are unread: such times update the line, not the size's factor.
        is_usual = num_pairs <= 8 * batch
        self._draft.add(features, seconds / self._pace, sizes=sizes if is_usual else ())


def _of_verification(batch: int, num_proposals: int, num_keys: int) -> tuple[list[float], Sizes]:
    """(features, sizes) of a verification."""
    rows = num_proposals + 1
    size = _size(batch, num_proposals)
    return [1.0, batch * rows, rows * num_keys], (size[0], size)


def _of_drafting(batch: int, num_steps: int, num_pairs: int) -> tuple[list[float], Sizes]:
    size = _size(batch, num_steps)
    return [1.0, num_steps, num_steps * batch + num_pairs], (size[0], size)


def _size(batch: int, num_proposals: int) -> tuple[int, int]:
    """The size that shares a factor: batches up to eight exactly, larger ones as 9–16, 17–32, and so on."""
    return (batch if batch <= 8 else 1 << (batch - 1).bit_length()), num_proposals

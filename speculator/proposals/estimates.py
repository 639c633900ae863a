"""What the planner expects of a round, learnt while serving: how many proposals are accepted, and how long it takes.

**Acceptance** is counted by position of a chain (`PositionAcceptance`), or corrects what a proposer predicts of its
proposals (`Calibration`).

**Time** is that of a verification and of drafting, in seconds, for any size of either. A verification of P proposals
for each of b requests puts r = b · (P + 1) rows through the target, and its attention reads the keys of all b contexts:

    T = θ₀ + θ₁ · r + θ₂ · (rows × keys that they attend to)

Where each request is verified with as many as it has, P is the most, and a round has fewer rows than r. Priced by its
own rows it is chosen where its proposals are overestimated, and that was slower (benchmarks/results/serving.md).

The line is fitted to every round as it comes, older rounds fading, and every b, and every (b, P), keeps its own
factor on it as it is seen: a GPU's steps are no line, and a CPU's first row is cheaper than its share. Batches above
eight share factors by powers of two. Drafting has a line of its own. A round that took far longer than expected was
interrupted, and counts as a little too long only. How fast the machine is at the moment is a factor of its own, on
all of it: others have a share of it.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence

import numpy as np

_PRIOR_WEIGHT = 8.0
MOST_CERTAIN = 0.998
"""That a probability counts as."""
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
        """The prediction times the factor of its kind."""
        predicted *= self.factor(kind)
        return predicted if predicted < MOST_CERTAIN else MOST_CERTAIN

    def factor(self, kind: Hashable) -> float:
        """What was accepted over what was predicted."""
        sums = self._sums.get(kind)
        return 1.0 if sums is None else sums[1] / sums[0]

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


_MEMORY = 0.997
"""What a round still weighs after another: half after 230."""
_CLIP = 1.5
"""A time counts at most as this many times what was expected; if the machine has slowed down, the next ones add up."""
_TRUSTED_AFTER = 8
_FIT_EVERY = 8
_PRIOR_ROUNDS = 0.05
"""Weight of the assumed slopes, in rounds: enough to decide before anything else than plain steps was seen."""
_SIZE_MEMORY = 0.99
_SIZE_PRIOR = 4.0
"""Rounds of a size after which its own factor counts as much as that of the coarser size, or the line."""

_PACE_MEMORY = 0.8
"""Of how fast the machine is, half after three rounds: sooner than a size's own factor, or the sizes that were last run
in a slow minute would be dear for as long as nobody runs them.
"""
_KNOWN_AFTER = 4.0

Sizes = Sequence[Hashable]
"""Names of a measurement's size, from the coarsest to the finest."""


class FittedTime:
    """Seconds as a linear function of a few non-negative features, the first of which is 1; no less than zero.

    `slopes` are what the features are assumed to cost in relation to each other, until they were seen to vary.
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
        """A measurement; each of its sizes gets a factor of its own. The first of all pays for warming up."""
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
        """Those that have a factor of their own; for any thread."""
        return list(self._factors)

    def weight(self, size: Hashable) -> float:
        """Of what was measured of a size: about the number of its rounds."""
        return self._factors.get(size, (0.0, 0.0))[1]

    def _fit(self) -> None:
        prior = np.array(self._slopes) * (self._seconds / self._assumed)
        # Where the measurements leave slopes open, all of them give way in proportion to what is assumed of each.
        mean_s = self._seconds / self._weight
        ridge = np.diag(_PRIOR_ROUNDS * mean_s * np.maximum(self._scale, 1e-9) / prior)
        weights = _non_negative(np.array(self._moments) + ridge, np.array(self._sums) + ridge @ prior)
        self._weights = weights.tolist()

    @staticmethod
    def _dot(weights: Sequence[float], features: Sequence[float]) -> float:
        return float(sum(map(operator.mul, weights, features)))


def _non_negative(moments: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """The least-squares weights; more work never takes less time, so what noise makes negative is left out."""
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
        # Before it is known: a further row costs an eighth of a step, 10,000 attended keys a tenth of it; a draft step
        # and a pair that the draft reads an eighth each.
        self._verify = FittedTime([1.0, 0.125, 1e-5])
        self._draft = FittedTime([0.02, 0.1, 0.02])
        self._pace = 1.0
        """What verifications lately took of what their sizes take."""

    def verify_s(self, batch: int, num_proposals: int, num_keys: int) -> float:
        """Seconds of a round apart from drafting; `num_keys` is the sum of the context lengths."""
        features, sizes = _of_verification(batch, num_proposals, num_keys)
        return self._pace * self._verify.seconds(features, sizes=sizes)

    def draft_s(self, batch: int, num_steps: int, num_pairs: int) -> float:
        """Seconds in which the learned draft reads `num_pairs` and proposes `num_steps` tokens for each request."""
        if self._draft.count == 0:
            # Nothing drafted yet: a guess from the target's own time, to have something to compare with.
            return self.verify_s(batch, 0, 0) * (0.05 + 0.08 * num_steps)
        features, sizes = _of_drafting(batch, num_steps, num_pairs)
        return self._pace * self._draft.seconds(features, sizes=sizes)

    def is_known(self, batch: int, num_proposals: int, *, after: float = _KNOWN_AFTER) -> bool:
        """Whether a verification of this size was run often enough, `after` times, to be judged by its own time."""
        return self._verify.weight(_size(batch, num_proposals)) > after

    def verify_ms_by_size(self) -> dict[tuple[int, int], float]:
        """Milliseconds of each (batch size, proposals) that was measured, of short contexts."""
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
        # A long time without drafting leaves many pairs: what they take is the line's business, not the size's.
        is_usual = num_pairs <= 8 * batch
        self._draft.add(features, seconds / self._pace, sizes=sizes if is_usual else ())


def _of_verification(batch: int, num_proposals: int, num_keys: int) -> tuple[list[float], Sizes]:
    """Features and sizes."""
    rows = num_proposals + 1
    size = _size(batch, num_proposals)
    return [1.0, batch * rows, rows * num_keys], (size[0], size)


def _of_drafting(batch: int, num_steps: int, num_pairs: int) -> tuple[list[float], Sizes]:
    size = _size(batch, num_steps)
    return [1.0, num_steps, num_steps * batch + num_pairs], (size[0], size)


def _size(batch: int, num_proposals: int) -> tuple[int, int]:
    """What shares a factor: up to eight requests each number, of more 9–16, 17–32, and so on."""
    return (batch if batch <= 8 else 1 << (batch - 1).bit_length()), num_proposals

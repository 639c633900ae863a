"""Whether a series of samples grows: the Theil–Sen slope, and an interval that knows that neighbours are alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NUM_RESAMPLES = 1000
_MOST_SAMPLES = 300
"""Longer series are thinned: all pairs of them are compared, once for each resample."""


@dataclass(frozen=True, kw_only=True)
class Slope:
    """Change an hour, with its 95% interval, and the median of the series."""

    per_hour: float
    lower: float
    upper: float
    level: float

    def to_dict(self) -> dict[str, float]:
        return {
            name: round(value, 4)
            for name, value in (
                ("level", self.level),
                ("per_hour", self.per_hour),
                ("lower", self.lower),
                ("upper", self.upper),
            )
        }


def slope(at_s: Sequence[float], values: Sequence[float], *, block_s: float, seed: int = 0) -> Slope:
    """The median slope between all pairs of samples (Theil and Sen), which outliers do not move.

    The interval is that of a moving-block bootstrap of the residuals: memory and latency come in stretches, and samples
    that repeat their neighbour would make an interval from independent ones far too narrow. `block_s` is the length of
    the blocks. Raises ValueError for fewer than 8 samples, or less time than four blocks.
    """
    every = -(-len(at_s) // _MOST_SAMPLES)
    t, y = np.asarray(at_s, float)[::every], np.asarray(values, float)[::every]
    if len(t) < 8 or t[-1] - t[0] < 4 * block_s:
        raise ValueError(f"{len(t)} samples are too few for a slope: measure for longer")
    first, second = np.triu_indices(len(t), k=1)
    apart = t[second] - t[first]

    def theil_sen(series: np.ndarray) -> float:
        return float(np.median((series[second] - series[first]) / apart))

    found = theil_sen(y)
    residuals = y - found * t
    residuals -= residuals.mean()
    length = max(2, round(block_s / float(np.median(np.diff(t)))))
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, len(t) - length + 1, (NUM_RESAMPLES, -(-len(t) // length)))
    rows = (starts[:, :, None] + np.arange(length)).reshape(NUM_RESAMPLES, -1)[:, : len(t)]
    spread = np.array([theil_sen(residuals[row]) for row in rows])
    lower, upper = map(float, np.quantile(found + spread, (0.025, 0.975)))
    return Slope(per_hour=3600 * found, lower=3600 * lower, upper=3600 * upper, level=float(np.median(y)))

"""Test whether a series of samples grows: slope of a line through the medians of six stretches, with an interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_NUM_STRETCHES = 6
_T = 4.604
"""Student's t for a 99% interval with two degrees of freedom fewer than there are stretches."""


@dataclass(frozen=True, kw_only=True)
class Slope:
    """Change an hour, with its 99% interval, and the median of the series."""

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


def slope(at_s: Sequence[float], values: Sequence[float]) -> Slope:
    """The least-squares line through the medians of six stretches of time; outliers do not move those.

    The noise is the distance of the medians from the line. Samples are autocorrelated, so that an interval from all of
    them would be far too narrow; stretches of ten times the correlation time are nearly independent. At 99% a flat
    series then counts as growing in 1 of 200 runs, and in 3 of 100 where a stretch is only as long as the correlation
    time; a soak judges a dozen series. Samples must be equally spaced. Raises ValueError for fewer than six.
    """
    if len(at_s) < _NUM_STRETCHES:
        raise ValueError(f"{len(at_s)} samples are too few for a slope: measure for longer")
    stretches = np.array_split(np.arange(len(at_s)), _NUM_STRETCHES)
    t, y = np.asarray(at_s, float), np.asarray(values, float)
    middle = np.array([t[stretch].mean() for stretch in stretches])
    medians = np.array([np.median(y[stretch]) for stretch in stretches])
    apart, change = middle - middle.mean(), medians - medians.mean()
    spread = float(apart @ apart)
    found = float(apart @ change) / spread
    residuals = change - found * apart
    error = float(np.sqrt(residuals @ residuals / (_NUM_STRETCHES - 2) / spread))
    return Slope(
        per_hour=3600 * found,
        lower=3600 * (found - _T * error),
        upper=3600 * (found + _T * error),
        level=float(np.median(y)),
    )

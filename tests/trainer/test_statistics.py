"""Bounds over all looks together: how often they are wrong, in simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from trainer.statistics import anytime_quantile, student_t_quantile

LOOKS = 100


def ever_outside(samples: np.ndarray, *, alpha: float) -> float:
    """Share of the rows whose mean is at some time further below its true value, 0, than the bound allows."""
    counts = np.arange(1, LOOKS + 1)
    sums, squares = samples.cumsum(1), (samples**2).cumsum(1)
    means = sums / counts
    errors = np.sqrt(np.maximum(squares - counts * means**2, 0) / np.maximum(counts * (counts - 1), 1))
    widths = np.array([anytime_quantile(int(count), alpha=alpha) for count in counts])
    known = np.isfinite(widths)
    return float((means[:, known] + widths[known] * errors[:, known] < 0).any(1).mean())


@pytest.mark.parametrize("alpha", [0.01, 0.05])
def test_normal_observations_are_judged_wrong_as_seldom_as_promised(alpha: float) -> None:
    samples = np.random.default_rng(0).normal(size=(20_000, LOOKS))
    for spread in (0.01, 1.0, 100.0):
        assert 0.2 * alpha < ever_outside(spread * samples, alpha=alpha) <= alpha


@pytest.mark.parametrize("shape", [2.0, 4.0])
def test_skewed_observations_are_judged_wrong_somewhat_more_often(shape: float) -> None:
    """Few of them with a heavy tail: it is the side of the short tail that is wrong up to five times as often."""
    samples = np.random.default_rng(1).gamma(shape, size=(20_000, LOOKS)) - shape
    assert max(ever_outside(side * samples, alpha=0.01) for side in (1, -1)) < 0.05


def test_many_looks_cost_width_and_few_observations_bound_nothing() -> None:
    widths = [anytime_quantile(count, alpha=0.01) for count in range(1, LOOKS)]
    assert widths[:4] == 4 * [math.inf]
    finite = [width for width in widths if math.isfinite(width)]
    assert all(wide > narrow for wide, narrow in itertools.pairwise(finite[:40]))
    for count in (10, 30, 90):
        assert student_t_quantile(0.99, count - 1) < anytime_quantile(count, alpha=0.01) < 5

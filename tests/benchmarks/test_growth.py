"""The soak's verdict: noise is no growth, however it is shaped, and a leak is seen in it."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.common.growth import slope

AT_S = np.arange(0.0, 480.0, 4.0)
NUM_RUNS = 500


def noise(rng: np.random.Generator, alike_s: float) -> np.ndarray:
    """A level of 300 with a deviation of 1, that forgets where it was within about `alike_s`."""
    kept = np.exp(-4 / alike_s) if alike_s else 0.0
    steps = rng.normal(0, 1, len(AT_S))
    found = steps.copy()
    for index in range(1, len(AT_S)):
        found[index] = kept * found[index - 1] + np.sqrt(1 - kept**2) * steps[index]
    return 300 + found


@pytest.mark.parametrize(("alike_s", "at_most"), [(0, 0.02), (8, 0.02), (48, 0.04)])
def test_noise_is_seldom_growth(alike_s: float, at_most: float) -> None:
    rng = np.random.default_rng(0)
    found = [slope(AT_S, noise(rng, alike_s)) for _ in range(NUM_RUNS)]
    assert sum(one.lower > 0 for one in found) <= at_most * NUM_RUNS
    assert all(one.lower < one.per_hour < one.upper for one in found)
    assert all(one.level == pytest.approx(300, abs=3) for one in found)


def test_a_leak_is_growth_and_its_rate_is_right() -> None:
    rng, leak = np.random.default_rng(1), AT_S * 60 / 3600
    found = [slope(AT_S, noise(rng, 8) + leak) for _ in range(NUM_RUNS)]
    assert sum(one.lower > 0 for one in found) >= 0.98 * NUM_RUNS
    assert sum(one.lower < 60 < one.upper for one in found) >= 0.97 * NUM_RUNS


def test_a_cache_that_is_full_is_flat_and_one_that_fills_is_not() -> None:
    rng = np.random.default_rng(2)
    fills = 20 * np.minimum(AT_S / 480, 1)
    assert slope(AT_S, noise(rng, 8) + fills).lower > 0
    assert slope(AT_S, noise(rng, 8) + 20).lower <= 0


def test_outliers_make_no_growth_and_hide_none() -> None:
    spikes = np.where(np.arange(len(AT_S)) % 20 == 19, 500.0, 0.0)
    assert slope(AT_S, 300 + spikes).lower <= 0
    assert slope(AT_S, 300 + spikes + AT_S / 60).per_hour == pytest.approx(60)


def test_what_never_changes_is_flat_and_what_falls_is_no_leak() -> None:
    for level in (0, 7, 16):
        still = slope(1.1 * AT_S + 0.37, [level] * len(AT_S))
        assert (still.lower, still.per_hour, still.upper) == (0, 0, 0)
    assert slope(AT_S, 300 - AT_S).upper < 0


def test_a_series_that_is_too_short_is_refused() -> None:
    assert slope(range(6), range(6)).per_hour == pytest.approx(3600)
    with pytest.raises(ValueError, match="measure for longer"):
        slope([0, 1, 2, 3, 4], [1, 1, 1, 1, 1])

"""The soak's verdict: noise is no growth, however it is shaped, and a leak is seen in it."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.slopes import slope

AT_S = np.arange(0.0, 480.0, 4.0)


def noise(seed: int) -> np.ndarray:
    """A level of 300 with stretches above and below it, as allocators make them."""
    rng = np.random.default_rng(seed)
    stretches = np.repeat(rng.normal(0, 1, 1 + len(AT_S) // 5), 5)[: len(AT_S)]
    return 300 + stretches + rng.normal(0, 0.3, len(AT_S))


def test_noise_is_seldom_growth() -> None:
    found = [slope(AT_S, noise(seed), block_s=48.0) for seed in range(10)]
    assert sum(one.lower <= 0 for one in found) >= 9
    assert all(one.lower < one.per_hour < one.upper for one in found)
    assert all(one.level == pytest.approx(300, abs=2) for one in found)


def test_a_leak_is_growth_and_its_rate_is_right() -> None:
    for seed in range(5):
        found = slope(AT_S, noise(seed) + AT_S * 60 / 3600, block_s=48.0)
        assert 0.3 < found.lower < 60 < found.upper


def test_what_never_changes_is_flat_and_what_falls_is_no_leak() -> None:
    assert slope(AT_S, [7.0] * len(AT_S), block_s=48.0).lower <= 0
    assert slope(AT_S, 300 - AT_S, block_s=48.0).upper < 0


def test_a_series_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="measure for longer"):
        slope([0, 1, 2], [1, 1, 1], block_s=1)
    with pytest.raises(ValueError, match="measure for longer"):
        slope(AT_S, noise(0), block_s=300)

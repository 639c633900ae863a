"""Every correction against its formula, written out one proposal at a time."""

from __future__ import annotations

import math

import pytest
import torch

from speculator.errors import ConfigError
from trainer.learning.losses import Correction

RATIOS = [0.01, 0.5, 0.9, 1.0, 1.1, 3.0, 50.0]


def by_hand(name: str, ratio: float, positive: bool, low: float, high: float) -> float:
    if name == "none":
        return 1.0
    if name == "tis":
        return max(min(ratio, high), low)  # no lower bound unless one is set, as for cispo
    if name == "cispo":
        return max(min(ratio, high), low)
    weight = 1.0 if positive else max(min(ratio, high), low)
    if name == "weighted_topr":
        weight *= 1.5 if positive else 0.25
    return weight


@pytest.mark.parametrize("name", ["none", "tis", "cispo", "topr", "weighted_topr"])
@pytest.mark.parametrize("clips", [(None, None), (0.25, 4.0)])
def test_weights_are_the_formulas_ones(name: str, clips: tuple[float | None, float | None]) -> None:
    correction = Correction(name=name, low=clips[0], high=clips[1], positive=1.5, negative=0.25)
    low, high = correction.clip
    for positive in (True, False):
        log_ratio = torch.tensor(RATIOS).log().requires_grad_()
        weights = correction.weights(log_ratio, torch.full((len(RATIOS),), positive))
        assert not weights.requires_grad
        for ratio, weight in zip(RATIOS, weights.tolist(), strict=True):
            assert weight == pytest.approx(by_hand(name, ratio, positive, low, high), rel=1e-5)


@pytest.mark.parametrize("name", ["tis", "cispo", "topr", "weighted_topr"])
def test_no_weight_is_above_its_cap_or_above_the_ratio_of_what_the_draft_dropped(name: str) -> None:
    log_ratio = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 20
    correction = Correction(name=name)
    for positive in (True, False):
        weights = correction.weights(log_ratio, torch.full((1000,), positive))
        assert weights.max() <= max(correction.clip[1], 1.0)
        if not positive or name in ("tis", "cispo"):
            assert bool((weights <= log_ratio.exp() * (1 + 1e-5)).all())


def test_extreme_ratios_stay_finite_where_a_bound_holds() -> None:
    log_ratio = torch.tensor([-math.inf, -1e4, 1e4])
    for name in ("none", "tis", "cispo", "topr", "weighted_topr"):
        assert torch.isfinite(Correction(name=name).weights(log_ratio, torch.zeros(3, dtype=torch.bool))).all()


def test_values_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="none, tis, cispo, topr, weighted_topr"):
        Correction(name="ppo")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="low"):
        Correction(name="cispo", low=2.0, high=1.0)
    with pytest.raises(ConfigError, match="low"):
        Correction(name="tis", high=math.nan)

"""Predictions of acceptance, corrected by what became of them."""

from __future__ import annotations

import random

import pytest

from speculator.proposals.estimates import Calibration, PositionAcceptance


@pytest.mark.parametrize("true_rate", [0.15, 0.6, 0.95])
def test_estimates_come_to_what_verification_says(true_rate: float) -> None:
    """Whatever is predicted first: after some hundred verdicts of a kind the estimate is its acceptance."""
    calibration, chance = Calibration(), random.Random(1)
    for _ in range(800):
        calibration.add("seen", 0.4, accepted=chance.random() < true_rate)
    assert calibration.probability("seen", 0.4) == pytest.approx(true_rate, abs=0.08)
    assert calibration.probability("other", 0.4) == 0.4


def test_nothing_is_certain() -> None:
    calibration = Calibration()
    for _ in range(100):
        calibration.add("seen", 0.2, accepted=True)
    assert calibration.probability("seen", 0.9) < 1
    assert calibration.probability("other", 1.0) < 1


def test_old_verdicts_fade() -> None:
    calibration = Calibration()
    for accepted in (True, False):
        for _ in range(1000):
            calibration.add("seen", 0.5, accepted=accepted)
    assert calibration.probability("seen", 0.5) < 0.02


def test_only_proposals_that_were_reached_count() -> None:
    acceptance = PositionAcceptance(3)
    for _ in range(500):
        acceptance.add(3, 1)
    assert [acceptance.rate(position) for position in (1, 2)] == pytest.approx([1, 0], abs=0.02)

"""When training is worth its compute, and when a draft is not fit to be published."""

from __future__ import annotations

import random

import pytest
import torch

from trainer.learning.optimizer_step import BAD_STEPS, GOOD_STEPS, Guard, all_finite
from trainer.schedule import WINDOW, LearningCurve, tokens_owed, training_pressure


def curve_of(lengths: list[float], losses: list[float] | None = None) -> LearningCurve:
    curve = LearningCurve()
    for number, length in enumerate(lengths):
        curve.observe(length, losses[number] if losses else 2.0)
        curve.mark()
    return curve


def test_training_goes_on_until_it_is_known_to_be_flat() -> None:
    curve = curve_of([1.5] * (2 * WINDOW - 1))
    assert curve.gain is None
    assert training_pressure(alarm=False, gain=None) == 1.0
    assert curve_of([1.5] * 2 * WINDOW).gain == 0.0
    assert training_pressure(alarm=False, gain=0.0) == 0.0
    assert training_pressure(alarm=True, gain=0.0) == 1.0
    assert training_pressure(alarm=False, gain=0.005) == pytest.approx(0.5)
    assert training_pressure(alarm=False, gain=0.5) == 1.0


def test_noise_is_no_gain_and_learning_is() -> None:
    rng = random.Random(0)
    flat = [
        training_pressure(alarm=False, gain=curve_of([rng.gauss(1.5, 0.02) for _ in range(16)]).gain) for _ in range(50)
    ]
    assert sum(flat) / 50 < 0.05
    rising = [curve_of([1.4 + 0.01 * n + rng.gauss(0, 0.01) for n in range(16)]).gain for _ in range(50)]
    assert all(training_pressure(alarm=False, gain=gain) == 1.0 for gain in rising)


def test_a_falling_loss_and_harder_traces_are_something_to_learn_too() -> None:
    early = curve_of([1.0] * 16, [8.0 - 0.1 * n for n in range(16)]).gain
    harder = curve_of([1.6] * 8 + [1.4] * 8).gain
    assert early is not None
    assert harder is not None
    assert min(early, harder) > 0.05


def test_a_curve_survives_a_restart_and_needs_steps_for_a_point() -> None:
    curve = curve_of([1.0 + n for n in range(30)])
    curve.mark()
    assert len(curve.points) == 2 * WINDOW
    assert LearningCurve(curve.points).gain == curve.gain


def test_what_is_owed_to_old_traces() -> None:
    assert tokens_owed(pressure=1.0, max_passes=10, replay_tokens=100, tokens_since_news=0) == 1000
    assert tokens_owed(pressure=0.1, max_passes=10, replay_tokens=100, tokens_since_news=100) == 0
    assert tokens_owed(pressure=0.0, max_passes=10, replay_tokens=100, tokens_since_news=1) < 0


def test_one_bad_step_stops_publishing_until_enough_good_ones() -> None:
    guard = Guard()
    assert guard.healthy
    guard.observe(finite=False)
    assert not guard.healthy
    for _ in range(GOOD_STEPS - 1):
        guard.observe(finite=True)
        assert not guard.healthy
    guard.observe(finite=True)
    assert guard.healthy
    assert not guard.must_restore


def test_bad_steps_in_a_row_call_for_the_last_good_weights() -> None:
    guard = Guard()
    for _ in range(BAD_STEPS - 1):
        guard.observe(finite=False)
    guard.observe(finite=True)
    assert not guard.must_restore
    for _ in range(BAD_STEPS):
        guard.observe(finite=False)
    assert guard.must_restore
    guard.restored()
    assert not guard.must_restore
    assert not guard.healthy
    assert guard.blames_traces, "as long as nothing was good since"
    guard.observe(finite=True)
    assert not guard.blames_traces


def test_all_finite() -> None:
    state = {"weight": torch.ones(3), "step": torch.tensor(1)}
    assert all_finite(state)
    assert not all_finite(state | {"moment": torch.tensor([0.0, float("inf")])})

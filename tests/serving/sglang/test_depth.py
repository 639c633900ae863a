"""What SGLang is told about depth, and how steps, times and acceptance find each other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from serving.sglang.clock import StepClock
from serving.sglang.depth import DepthControl
from serving.sglang.dormancy import _LOOK_EVERY_STEPS, _SLEEP_AFTER_STEPS, Dormancy
from serving.speedup import SpeedupMeter
from speculator.depth import DepthPolicy


def make_control(*, is_fresh: bool = False, control_share: float = 0.0) -> DepthControl:
    policy = DepthPolicy([0, 1, 3], control_share=control_share, probe_share=0.0)
    clock = StepClock(torch.device("cpu"))
    return DepthControl(policy, clock, SpeedupMeter(), dormancy=Dormancy(is_fresh=is_fresh))


def requests(count: int) -> list[Any]:
    return [SimpleNamespace() for _ in range(count)]


def step(control: DepthControl, batch: list[Any], *, accepts: bool = False) -> int:
    depth = control.steps_for(len(batch))
    control.started()
    control.launched(batch, depth)
    control.verified([depth if accepts else 0] * len(batch))
    return depth


def test_a_fresh_draft_is_never_run_until_there_is_another_version() -> None:
    control, batch = make_control(is_fresh=True), requests(2)
    assert {step(control, batch) for _ in range(2 * _LOOK_EVERY_STEPS)} == {0}
    assert control.is_asleep
    control.renewed()
    assert not control.is_asleep
    assert {step(control, requests(2)) for _ in range(30)} == {0, 1, 3}


def test_a_useless_draft_falls_asleep_and_is_looked_at_again() -> None:
    control, batch = make_control(), requests(1)
    steps = 0
    while not control.is_asleep:
        step(control, batch)
        steps += 1
        assert steps < 4 * _SLEEP_AFTER_STEPS
    for _ in range(_LOOK_EVERY_STEPS):
        step(control, batch)
    assert not control.is_asleep


def test_requests_that_went_cold_say_nothing_about_the_draft() -> None:
    control, cold = make_control(is_fresh=True), requests(1)
    step(control, cold)
    control.renewed()
    for _ in range(200):
        step(control, [*cold, *requests(1)][:1])
    rate = float(control.explanation()["acceptance"].split(",")[0])
    assert rate == 0.6, "the prior: nothing was learnt"
    for _ in range(200):
        step(control, requests(1), accepts=True)
    assert float(control.explanation()["acceptance"].split(",")[0]) > 0.8


def test_results_that_come_a_step_late_meet_their_step() -> None:
    """Overlap scheduling launches the next step before the result of the last one is processed."""
    control, batch = make_control(control_share=0.5), requests(2)
    depths = []
    for turn in range(400):
        depths.append(control.steps_for(2))
        control.started()
        control.launched(batch, depths[-1])
        if turn > 0:
            control.verified([depths[-2]] * 2)
    control.verified([depths[-1]] * 2)
    assert control.num_verified_tokens == sum(2 + 2 * depth for depth in depths if depth)
    assert control.num_verifications == 2 * sum(depth > 0 for depth in depths)
    measured = control._meter.measure()
    assert measured.baseline_rounds + measured.speculative_rounds == 400
    assert 150 < measured.baseline_rounds < 250


def test_a_fixed_depth_is_measured_too() -> None:
    control = DepthControl(None, StepClock(torch.device("cpu")), SpeedupMeter(), dormancy=Dormancy(is_fresh=True))
    control.started()
    control.launched(requests(1), 3)
    control.verified([2])
    assert (control.depth, control.num_verified_tokens, control.is_asleep) == (3, 3, False)
    assert control.explanation() == {}

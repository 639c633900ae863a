"""When the trainer may compute beside serving: the policy alone, on a clock of its own."""

from __future__ import annotations

import math
import random

import pytest

from speculator.pulse import Serving
from trainer.sharing import FIRST_REST_S, LONGEST_REST_S, LONGEST_SLICE_S, SHORTEST_SLICE_S, Sharing, Slowdown

BUSY, IDLE, QUEUED = Serving(1, True, 0), Serving(1, False, 0), Serving(1, True, 2)
STEP_S, LOOKS = 0.02, 4


class Machine:
    """An engine that is always busy, and a trainer that computes whenever it may."""

    def __init__(self, slowdown: float, *, noise: float = 0.0, seed: int = 0) -> None:
        self.slowdown, self.noise, self.now_s = slowdown, noise, 0.0
        self.sharing = Sharing(budget=0.03)
        self._rng = random.Random(seed)

    def run(self, num_steps: int, serving: Serving = BUSY) -> float:
        """The share of the steps' time in which the trainer computed."""
        began_s, computed_s = self.now_s, 0.0
        for _ in range(num_steps):
            beside_s, took_s = 0.0, STEP_S * self._rng.gauss(1.0, self.noise)
            for _ in range(LOOKS):
                if self.sharing.may_compute(self.now_s, serving):
                    beside_s += took_s / LOOKS
                self.now_s += took_s / LOOKS
            slowed_s = self.slowdown * beside_s
            self.now_s += slowed_s
            self.sharing.observe(1, took_s + slowed_s, beside_s)
            computed_s += beside_s
        return computed_s / (self.now_s - began_s)


def test_idle_time_is_the_trainers_at_once() -> None:
    sharing = Sharing(budget=0.03)
    assert not sharing.may_compute(0.0, BUSY)
    assert sharing.may_compute(0.001, IDLE)
    assert not sharing.may_compute(0.002, BUSY)


def test_idle_time_is_no_rest() -> None:
    sharing = Sharing(budget=0.03)
    for second in range(20):
        sharing.may_compute(float(second), BUSY)
        sharing.may_compute(second + 0.01, BUSY)
        sharing.may_compute(second + 0.02, IDLE)
    assert not sharing.may_compute(20.0, BUSY), "busy for 0.2 s in all"


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_where_there_is_room_for_both_both_run(noise: float) -> None:
    machine = Machine(0.005, noise=noise)
    assert machine.run(int(0.9 * FIRST_REST_S / STEP_S)) == 0.0, "first it learns what serving is alone"
    machine.run(5_000)
    assert machine.run(50_000) > 0.8, "nor does chance, which slows some steps, end it for long"


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_where_serving_is_slowed_less_than_one_step_in_a_hundred_is_touched(noise: float) -> None:
    machine = Machine(0.4, noise=noise)
    assert machine.run(2_000) < 0.01
    assert machine.run(20_000) < 0.01
    assert machine.sharing.slice_s == SHORTEST_SLICE_S
    assert machine.sharing.rest_s == LONGEST_REST_S
    assert machine.sharing.found == pytest.approx(0.4, abs=0.2)


@pytest.mark.parametrize(("slowdown", "least", "most"), [(0.015, 0.7, 1.0), (0.06, 0.0, 0.03)])
def test_chance_hides_neither_side_of_the_budget(slowdown: float, least: float, most: float) -> None:
    """Steps vary by 10%, three times as much as the budget."""
    for seed in range(3):
        machine = Machine(slowdown, noise=0.1, seed=seed)
        machine.run(14_500)
        assert least <= machine.run(20_000) <= most


def test_what_may_be_chance_changes_nothing_yet() -> None:
    sharing = Sharing(budget=0.03)
    for took_s in (0.9, 1.1) * 10:
        sharing.observe(1, took_s, 0.0)
    slice_s = sharing.slice_s
    now_s = 0.0
    while not sharing.may_compute(now_s, BUSY):
        now_s += 0.1
    sharing.observe(1, 1.08, 1.0)
    assert sharing.slowdown.ratio > sharing.budget
    assert sharing.slowdown.error == pytest.approx(0.1, rel=0.1)
    assert sharing.may_compute(now_s + 0.1, BUSY), "one step, and no slower than some alone"
    while sharing.may_compute(now_s, BUSY):
        now_s += 0.1
    while not sharing.may_compute(now_s, BUSY):
        now_s += 0.1
    assert (sharing.slice_s, sharing.rest_s) == (slice_s, FIRST_REST_S)
    for _ in range(100):
        sharing.observe(1, 1.08, 1.0)
    assert not sharing.may_compute(now_s + 0.1, BUSY), "a hundred such steps are no chance"


def test_what_steps_take_alone_is_known_from_so_many_only() -> None:
    """However many are set against it, what it is off by is the same for all of them; until it is known anew."""
    slowdown = Slowdown()
    for took_s in (0.9, 1.1) * 5:
        slowdown.add(1, took_s, 0.0)
    for _ in range(100):
        slowdown.add(1, 1.0, 0.01)
    assert slowdown.error * 0.01 == pytest.approx(0.1 * math.sqrt(1 / 100 + 1 / 10), rel=0.05)
    once = slowdown.variance
    slowdown.fade()
    for _ in range(100):
        slowdown.add(1, 1.0, 0.01)
    assert slowdown.variance == pytest.approx(2 * once)


def test_a_slice_that_begins_to_hurt_is_cut_short() -> None:
    machine = Machine(0.0)
    machine.run(20_000)
    assert machine.run(1_000) > 0.8
    assert machine.sharing.slice_s == LONGEST_SLICE_S
    machine.slowdown = 0.5
    assert machine.run(1_000) * 1_000 * STEP_S < 2.5, "seconds of 20"
    assert machine.sharing.slice_s == SHORTEST_SLICE_S


def test_there_are_no_slices_while_requests_queue() -> None:
    machine = Machine(0.0)
    assert machine.run(10_000, QUEUED) == 0.0
    assert machine.run(2) > 0.0, "the rest was over long ago"
    machine.run(20_000)
    assert machine.run(1_000) > 0.8
    assert machine.run(1_000, QUEUED) < 0.001, "nor does one go on"


def test_a_budget_of_nothing_still_gives_way() -> None:
    machine = Machine(0.001)
    machine.sharing.budget = 0.0
    machine.run(2_000)
    assert machine.run(20_000) < 0.01


def test_shapes_that_were_never_seen_alone_say_nothing() -> None:
    sharing = Sharing(budget=0.03)
    sharing.observe(1, 5.0, 5.0)
    assert sharing.slowdown.ratio == 0.0
    for _ in range(5):
        sharing.observe(1, 1.0, 0.0)
    sharing.observe(2, 9.0, 9.0)
    assert sharing.slowdown.ratio == 0.0
    sharing.observe(1, 1.5, 1.0)
    assert sharing.slowdown.ratio == pytest.approx(0.5)
    sharing.observe(1, 1000.0, 1.0)
    assert sharing.slowdown.ratio < 2.0, "held up by something else"

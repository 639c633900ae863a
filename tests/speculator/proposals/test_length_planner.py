"""One chain length for a whole round: a useless draft is stopped, a good one used, a better one noticed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from speculator.proposals.length_planner import LengthPlan, LengthPlanner

DEPTHS = [0, 1, 2, 3, 4]


@dataclass
class Machine:
    """An engine whose round takes `1 + slope · depth` seconds and whose proposals are accepted with chance α."""

    alpha: float
    slope: float
    planner: LengthPlanner = field(default_factory=lambda: LengthPlanner(max_depth=DEPTHS[-1]))
    depths: list[int] = field(default_factory=list)
    plans: list[LengthPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(0)

    def run(self, rounds: int, batch: int = 1, depths: list[int] = DEPTHS) -> None:
        for _ in range(rounds):
            plan = self.planner.plan(batch, depths, head_lengths=depths)
            self.plans.append(plan)
            self.depths.append(plan.num_proposals)
            self.planner.observe(batch, plan.num_proposals, self.seconds(plan.num_proposals), uses_head=plan.uses_head)
            for accepted in self.accepted(batch, plan.num_proposals) if plan.num_proposals else ():
                self.planner.positions.add(plan.num_proposals, accepted)

    def seconds(self, depth: int) -> float:
        return (1.0 + self.slope * depth) * self.random.uniform(0.95, 1.05)

    def accepted(self, batch: int, depth: int) -> list[int]:
        counts = []
        for _ in range(batch):
            count = 0
            while count < depth and self.random.random() < self.alpha:
                count += 1
            counts.append(count)
        return counts

    def rate(self, depths: list[int]) -> float:
        """Tokens a second of a request that are expected of rounds at these depths."""
        tokens = sum(sum(self.alpha**count for count in range(depth + 1)) for depth in depths)
        return tokens / sum(1 + self.slope * depth for depth in depths)

    def best(self) -> float:
        return max(self.rate([depth]) for depth in DEPTHS)


@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("slope", [0.02, 0.1, 0.25, 0.6])
@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.4, 0.6, 0.8, 0.95])
def test_as_fast_as_the_best_fixed_depth(alpha: float, slope: float, batch: int) -> None:
    machine = Machine(alpha, slope)
    machine.run(1500, batch)
    assert machine.rate(machine.depths) > 0.91 * machine.best()
    assert machine.rate(machine.depths) > 0.98, "plain decoding"


def test_a_useless_draft_is_hardly_ever_run() -> None:
    machine = Machine(alpha=0.0, slope=0.15)
    machine.run(2000)
    assert machine.rate(machine.depths) > 0.99
    assert sum(depth > 0 for depth in machine.depths[500:]) < 70
    probes = [plan for plan in machine.plans if plan.is_probe]
    assert len(probes) > 20
    assert {plan.num_proposals for plan in probes[10:]} == {1}


def test_a_good_draft_is_run_deep() -> None:
    machine = Machine(alpha=0.8, slope=0.1)
    machine.run(1000)
    assert machine.depths[500:].count(4) > 450


def test_a_better_version_is_noticed_within_a_few_rounds() -> None:
    machine = Machine(alpha=0.0, slope=0.1)
    machine.run(500)
    machine.alpha = 0.8
    machine.planner.renew()
    machine.run(60)
    assert machine.depths[-20:].count(0) <= 2


def test_an_improvement_without_a_swap_is_noticed_too() -> None:
    """Traffic may turn to what the draft knows."""
    machine = Machine(alpha=0.0, slope=0.1)
    machine.run(500)
    machine.alpha = 0.8
    machine.run(3000)
    assert machine.depths[-100:].count(0) < 10


def test_only_the_given_depths_are_planned() -> None:
    machine = Machine(alpha=0.9, slope=0.1)
    for depths in ([0], [0, 1], [0, 1, 3]):
        machine.run(200, depths=depths)
        assert set(machine.depths[-200:]) <= set(depths)


def test_batch_sizes_have_costs_of_their_own() -> None:
    planner = LengthPlanner(max_depth=4)
    cheap, dear = (Machine(0.7, slope, planner=planner) for slope in (0.05, 1.5))
    for _ in range(200):
        cheap.run(1, batch=1)
        dear.run(1, batch=8)
    assert sum(depth >= 3 for depth in cheap.depths[-50:]) > 40
    assert dear.depths[-50:].count(0) > 40


def test_engines_that_are_told_the_same_plan_the_same() -> None:
    first, second = Machine(0.6, 0.2), Machine(0.6, 0.2)
    first.run(500)
    second.run(500)
    assert first.plans == second.plans


def test_a_machine_that_was_busy_at_first_is_not_so_for_ever() -> None:
    machine = Machine(alpha=0.8, slope=3.0)
    machine.run(200)
    assert machine.depths[-50:].count(0) > 40
    machine.slope = 0.1
    machine.run(2000)
    assert machine.depths[-100:].count(4) > 90


def warm(planner: LengthPlanner, *, slope: float, text_slope: float) -> None:
    """What rounds of one and of four requests take."""
    for _ in range(30):
        for batch in (1, 4):
            planner.observe(batch, 0, 1.0, uses_head=False)
            for length in DEPTHS[1:]:
                planner.observe(batch, length, 1 + slope * length, uses_head=True)
            for length in (4, 8):
                planner.observe(batch, length, 1 + text_slope * length, uses_head=False)


LENGTHS = [*DEPTHS, 8]


def gains(*rows: float) -> np.ndarray:
    """Of texts whose every proposal is accepted, up to so many."""
    return np.array([[min(float(length), most) for length in LENGTHS] for most in rows])


def test_text_goes_further_than_the_head_and_needs_none_of_its_passes() -> None:
    planner = LengthPlanner(max_depth=4)
    warm(planner, slope=0.2, text_slope=0.05)
    for _ in range(200):
        planner.positions.add(4, 2)
    plan = planner.plan(1, LENGTHS, head_lengths=DEPTHS, text_gains_BL=gains(8.0))
    assert (plan.num_proposals, plan.uses_head, plan.from_text) == (8, False, (True,))
    plan = planner.plan(1, LENGTHS, head_lengths=DEPTHS, text_gains_BL=gains(0.3))
    assert plan.uses_head
    assert plan.from_text == (False,)


def test_each_request_has_the_better_of_its_two_chains() -> None:
    planner = LengthPlanner(max_depth=4)
    warm(planner, slope=0.1, text_slope=0.3)
    for _ in range(200):
        planner.positions.add(4, 2)
    plan = planner.plan(4, LENGTHS, head_lengths=DEPTHS, text_gains_BL=gains(4.0, 0.0, 0.0, 0.0))
    assert plan.uses_head
    assert plan.from_text == (True, False, False, False)
    assert plan.rate > 1 / plan.headless_s
    alone = planner.plan(4, LENGTHS, head_lengths=[0], text_gains_BL=gains(4.0, 0.0, 0.0, 0.0))
    assert not alone.uses_head


def test_text_that_is_hardly_accepted_is_not_proposed() -> None:
    planner = LengthPlanner(max_depth=4)
    warm(planner, slope=0.2, text_slope=0.2)
    plan = planner.plan(4, LENGTHS, head_lengths=[0], text_gains_BL=gains(0.2, 0.1, 0.0, 0.0))
    assert (plan.num_proposals, plan.rate) == (0, 4 / plan.plain_s)


def test_a_head_is_looked_at_in_rounds_without_text() -> None:
    planner = LengthPlanner(max_depth=4)
    warm(planner, slope=0.5, text_slope=0.02)
    for _ in range(200):
        planner.positions.add(4, 0)
    planner.renew()
    with_text = [planner.plan(1, LENGTHS, head_lengths=DEPTHS, text_gains_BL=gains(8.0)) for _ in range(50)]
    assert not any(plan.uses_head for plan in with_text)
    assert planner.plan(1, LENGTHS, head_lengths=DEPTHS).is_probe

"""The depth policy: it stops a useless draft, uses a good one, notices a better one, and measures its baseline."""

from __future__ import annotations

import random

import pytest

from speculator.proposals.depth import DepthPolicy, PositionAcceptance, RoundCosts

CANDIDATES = [0, 1, 2, 3, 4]


class Machine:
    """An engine whose round takes `base + slope · depth` seconds and whose proposals are accepted with chance α."""

    def __init__(self, policy: DepthPolicy, *, alpha: float, slope: float, seed: int = 0) -> None:
        self.policy, self.alpha, self.slope = policy, alpha, slope
        self._random = random.Random(seed)
        self.depths: list[int] = []
        self.committed = 0
        self.seconds = 0.0

    def run(self, rounds: int, batch: int = 1) -> None:
        for _ in range(rounds):
            depth = self.policy.choose(batch)
            accepted = [self._accept(depth) for _ in range(batch)]
            seconds = (1.0 + self.slope * depth) * self._random.uniform(0.95, 1.05)
            self.policy.costs.add(batch, depth, seconds)
            self.policy.observe(depth, accepted)
            self.depths.append(depth)
            self.committed += batch + sum(accepted)
            self.seconds += seconds

    def _accept(self, depth: int) -> int:
        count = 0
        while count < depth and self._random.random() < self.alpha:
            count += 1
        return count


def test_a_useless_draft_is_hardly_ever_run() -> None:
    machine = Machine(DepthPolicy(CANDIDATES), alpha=0.0, slope=0.15)
    machine.run(2000)
    assert machine.committed / machine.seconds > 0.98
    assert sum(depth > 0 for depth in machine.depths[500:]) < 70


def test_a_good_draft_is_run_deep() -> None:
    machine = Machine(DepthPolicy(CANDIDATES), alpha=0.8, slope=0.1)
    machine.run(1000)
    late = machine.depths[500:]
    assert late.count(4) > 0.9 * len(late)


def test_the_depth_that_pays_most_is_found() -> None:
    # E[L]/T at α = 0.5, slope 0.25: 1, 1.2, 1.167, 1.071, 0.969.
    machine = Machine(DepthPolicy(CANDIDATES), alpha=0.5, slope=0.25)
    machine.run(2000)
    late = machine.depths[1000:]
    assert late.count(1) + late.count(2) > 0.9 * len(late)


def test_a_better_version_is_noticed_within_a_few_rounds() -> None:
    machine = Machine(DepthPolicy(CANDIDATES), alpha=0.0, slope=0.1)
    machine.run(500)
    machine.alpha = 0.8
    machine.policy.renew()
    machine.run(60)
    assert machine.depths[-20:].count(0) <= 2


def test_an_improvement_without_a_swap_is_noticed_too() -> None:
    """Traffic may turn to what the draft knows."""
    machine = Machine(DepthPolicy(CANDIDATES), alpha=0.0, slope=0.1)
    machine.run(500)
    machine.alpha = 0.8
    machine.run(3000)
    assert machine.depths[-100:].count(0) < 10


def test_a_limit_holds_for_every_round() -> None:
    policy = DepthPolicy(CANDIDATES)
    for limit in (0, 1, 2):
        for _ in range(200):
            depth = policy.choose(1, limit)
            assert depth <= limit
            policy.costs.add(1, depth, 1.0)
            policy.observe(depth, [depth])


def test_batch_sizes_have_costs_of_their_own() -> None:
    policy = DepthPolicy(CANDIDATES, probe_share=0.0)
    cheap, dear = Machine(policy, alpha=0.7, slope=0.05), Machine(policy, alpha=0.7, slope=1.5)
    for _ in range(200):
        cheap.run(1, batch=1)
        dear.run(1, batch=8)
    assert cheap.depths[-50:].count(4) > 40
    assert dear.depths[-50:].count(0) > 40


def test_ranks_with_equal_observations_choose_alike() -> None:
    first, second = (Machine(DepthPolicy(CANDIDATES), alpha=0.6, slope=0.2) for _ in range(2))
    first.run(500)
    second.run(500)
    assert first.depths == second.depths


def test_depth_0_must_be_possible() -> None:
    with pytest.raises(ValueError, match="depth 0"):
        DepthPolicy([1, 3])


def test_one_slow_round_does_not_count() -> None:
    costs = RoundCosts()
    for seconds in (99.0, 1.0, 1.1, 50.0, 0.9, 1.0):  # the first of a kind does not count
        costs.add(3, 2, seconds)
    assert costs.seconds(4, 2) == 1.0  # batches of 3 and 4 are one class
    assert costs.seconds(5, 2) is None


def test_costs_can_be_handed_over() -> None:
    costs, other = RoundCosts(), RoundCosts()
    for _ in range(2):
        costs.add(1, 0, 2.0)
        other.add(1, 3, 9.0)
    other.adopt(costs.table())
    assert (other.seconds(1, 0), other.seconds(1, 3)) == (2.0, None)


def test_only_proposals_that_were_reached_count() -> None:
    acceptance = PositionAcceptance(3)
    for _ in range(500):
        acceptance.add(3, 1)
    assert acceptance.rate(1) == pytest.approx(1, abs=0.02)
    assert acceptance.rate(2) == pytest.approx(0, abs=0.02)
    assert acceptance.length(3) == pytest.approx(2, abs=0.03)

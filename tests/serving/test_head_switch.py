"""The A/B of the learned head beside remembered text: its stretches, and what it finds in a world that is known."""

from __future__ import annotations

import itertools
import random

import pytest

from serving.speedup import HeadSwitch, Speedup, Sums, measure
from tests.speculator.proposals.test_planner import DEPTH, World


def test_one_stretch_of_every_cycle_goes_without_the_head_at_a_random_place() -> None:
    switch = HeadSwitch(0.25)
    arms = [switch.next_arm() for _ in range(192 * 50)]
    starts = []
    for first in range(0, len(arms), 192):
        cycle = [arm.may_ask for arm in arms[first : first + 192]]
        assert cycle.count(False) == 48
        starts.append(cycle.index(False))
        assert not any(cycle[starts[-1] : starts[-1] + 48])
    assert len(set(starts)) > 20


def test_the_first_rounds_after_a_change_count_for_neither_side() -> None:
    switch = HeadSwitch(0.5)
    arms = [switch.next_arm() for _ in range(96 * 50)]
    stretches = [[arm.counts for arm in group] for _, group in itertools.groupby(arms, lambda arm: arm.may_ask)]
    assert len(stretches) > 90
    for stretch in stretches[1:]:
        assert stretch.index(True) == 8 if len(stretch) > 8 else not any(stretch)
        assert all(stretch[8:])


def test_without_an_ab_the_head_may_always_be_asked_and_nothing_counts() -> None:
    switch = HeadSwitch(0.0)
    assert {switch.next_arm() for _ in range(1000)} == {(True, False)}


def _ab(world: World, *, rounds: int, busy: float = 1.0) -> Speedup:
    """What an A/B of so many rounds finds, on a machine that is slower by up to `busy` for some time now and then."""
    switch, rng = HeadSwitch(0.25, seed=world.seed), random.Random(world.seed)
    blocks = [Sums() for _ in range(20)]
    for number in range(rounds):
        if rng.random() < 0.005:
            world.scale = 1 + rng.random() * (busy - 1)
        arm, clock_s, tokens = switch.next_arm(), world.clock_s, world.tokens
        world.run(1, head_depth=DEPTH if arm.may_ask else 0)
        if arm.counts:
            block = blocks[20 * number // rounds]
            block.add(world.batch, arm.may_ask, world.clock_s - clock_s, world.tokens - tokens)
    return measure(blocks)


def _gain(alpha: float) -> float:
    """Of a head that may always be asked over one that never may."""
    rates = []
    for head_depth in (DEPTH, 0):
        world = World(alpha, seed=1000)
        world.run(8_000, head_depth=head_depth)
        rates.append(world.rate)
    return rates[0] / rates[1]


@pytest.mark.parametrize(("alpha", "least", "most"), [(0.0, 0.97, 1.0), (0.8, 1.15, 2.0)])
def test_the_interval_holds_what_the_head_adds_on_a_machine_that_is_busy_at_times(
    alpha: float, least: float, most: float
) -> None:
    truth = _gain(alpha)
    assert least < truth <= most
    held, widths, found = 0, [], []
    for seed in range(12):
        measured = _ab(World(alpha, seed=seed), rounds=3000, busy=1.5)
        assert measured.ratio is not None
        assert measured.lower is not None
        assert measured.upper is not None
        held += measured.lower < truth < measured.upper
        widths.append(measured.upper - measured.lower)
        found.append(measured.ratio)
    assert held >= 10
    assert sum(widths) / len(widths) < 0.25
    assert sum(found) / len(found) == pytest.approx(truth, abs=0.03)

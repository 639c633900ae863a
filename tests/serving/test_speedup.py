"""The measured speedup and its interval, the control share, the estimate beside them, and what the head adds."""

from __future__ import annotations

import itertools
import random

import pytest

from serving.speedup import (
    AbSchedule,
    AbSpeedup,
    ControlShare,
    EstimatedSpeedup,
    Speedup,
    SpeedupMeter,
    Sums,
    measure,
)
from tests.speculator.proposals.test_planner import DEPTH, World


class Meter(SpeedupMeter):
    """With a clock that a test sets."""

    def __init__(self, window_s: float = 120.0) -> None:
        self.now_s = 0.0
        super().__init__(window_s, clock=lambda: self.now_s)


def test_the_ratio_compares_equal_batch_sizes() -> None:
    meter = SpeedupMeter()
    # Batch 1: plainly 10 ms a token; drafting commits 8 tokens in 40 ms, so they would have taken 80 ms.
    meter.add(batch=1, drafted=False, seconds=0.010, committed=1)
    meter.add(batch=1, drafted=True, seconds=0.040, committed=8)
    # Batch 2: plainly 6 ms a token; drafting commits 10 tokens in 60 ms: no gain.
    meter.add(batch=2, drafted=False, seconds=0.012, committed=2)
    meter.add(batch=2, drafted=True, seconds=0.060, committed=10)
    # Batch 3 has no baseline and does not count.
    meter.add(batch=3, drafted=True, seconds=1.0, committed=1)
    measured = meter.measure()
    assert measured.ratio == pytest.approx((0.080 + 0.060) / (0.040 + 0.060))
    assert measured.baseline_ms_per_token == pytest.approx(140 / 18)
    assert (measured.baseline_rounds, measured.speculative_rounds) == (2, 3)
    assert (measured.lower, measured.upper) == (None, None), "one stretch of time says nothing about its spread"


def test_time_that_all_tokens_need_counts_for_those_that_are_compared() -> None:
    sums = Sums()
    sums.add(1, False, 10.0, 100)
    sums.add(1, True, 15.0, 300)
    sums.add_shared(8.0)
    # 300 of 400 tokens need 6 s of it; plainly they would have taken 30 s.
    assert sums.speedup().ratio == pytest.approx((30 + 6) / (15 + 6))


@pytest.mark.parametrize("where_drafted", [range(20), range(1)])
def test_control_rounds_of_a_single_stretch_give_no_interval(where_drafted: range) -> None:
    stretches = [Sums() for _ in range(20)]
    stretches[7].add(1, False, 1.0, 100)
    for number in where_drafted:
        stretches[number].add(1, True, 0.5, 100)
    measured = measure(stretches)
    assert measured.ratio == pytest.approx(2.0)
    assert (measured.lower, measured.upper) == (None, None)


def test_without_a_baseline_there_is_no_ratio() -> None:
    sums = Sums()
    sums.add(1, True, 1.0, 5)
    assert measure([sums]) == Speedup(None, None, baseline_rounds=0, speculative_rounds=1)


def test_rounds_leave_the_window() -> None:
    meter = Meter(window_s=10)
    meter.add(batch=1, drafted=False, seconds=1, committed=1)
    meter.now_s = 11
    meter.add(batch=1, drafted=True, seconds=1, committed=1)
    assert meter.measure().baseline_rounds == 0


def _simulate(meter: Meter, rng: random.Random, *, busy: float) -> None:
    """Two minutes in which the machine is slower by a factor of up to `busy` for seconds on end; the truth is 1.5."""
    control, slow = ControlShare(0.05, seed=rng.randrange(1000)), 1.0
    while meter.now_s < 120:
        if rng.random() < 0.02:
            slow = 1 + rng.random() * (busy - 1)
        batch = rng.choice((1, 2))
        if control.is_control(batch):
            seconds, drafted, committed = 0.03 * slow * rng.uniform(0.9, 1.1), False, batch
        else:
            accepted = [1 + (rng.random() < 0.8) for _ in range(batch)]
            seconds, drafted, committed = 0.036 * slow * rng.uniform(0.9, 1.1), True, sum(accepted)
        meter.add(batch=batch, drafted=drafted, seconds=seconds, committed=committed)
        meter.now_s += seconds


def _known(measured: Speedup) -> tuple[float, float, float]:
    assert measured.ratio is not None
    assert measured.lower is not None
    assert measured.upper is not None
    return measured.ratio, measured.lower, measured.upper


def test_the_interval_holds_the_truth_on_a_machine_that_is_busy_at_times() -> None:
    held, widths = 0, []
    for seed in range(60):
        meter = Meter()
        _simulate(meter, random.Random(seed), busy=1.5)
        _, lower, upper = _known(meter.measure())
        held += lower < 1.5 < upper
        widths.append(upper - lower)
    assert held >= 52
    assert sum(widths) / len(widths) < 0.2


def test_each_group_is_compared_with_the_baseline_of_its_batch_sizes() -> None:
    meter = Meter()
    code, chat, rare = ("t", "code"), ("t", "chat"), ("u", "code")
    for turn in range(400):
        meter.now_s = turn / 10
        meter.add(batch=2, drafted=False, seconds=0.02, committed=2, earned=[(code, 1), (chat, 1)])
        meter.add(batch=2, drafted=True, seconds=0.04, committed=5, earned=[(code, 3), (chat, 2)])
    meter.add(batch=2, drafted=True, seconds=0.04, committed=4, earned=[(rare, 2), (rare, 2)])
    groups = meter.measure_groups()
    # Plainly 10 ms a token: code earns 30 ms worth in its half of 40 ms, chat 20.
    assert groups[code].ratio == pytest.approx(1.5)
    assert groups[chat].ratio == pytest.approx(1.0)
    assert rare not in groups, "four tokens are no volume"
    assert groups[code].lower == pytest.approx(1.5)


def test_the_number_of_groups_is_bounded() -> None:
    meter = SpeedupMeter()
    for index in range(100):
        meter.add(batch=1, drafted=False, seconds=0.01, committed=1)
        meter.add(batch=1, drafted=True, seconds=0.01, committed=600, earned=[(("t", f"domain {index}"), 600)])
    groups = meter.measure_groups()
    assert len(groups) == 33, "half of 64, and the rest"
    assert groups["other", "other"].speculative_rounds == 68
    for tenant in range(100):
        meter.add(batch=1, drafted=True, seconds=0.01, committed=600, earned=[((f"t{tenant}", "mine"), 600)])
    groups = meter.measure_groups()
    assert len(groups) == 65
    assert ("t31", "mine") in groups, "others find room"


@pytest.mark.parametrize(("share", "low", "high"), [(0.0, 0, 0), (0.02, 190, 210), (1.0, 10_000, 10_000)])
def test_the_control_share_is_kept(share: float, low: int, high: int) -> None:
    control = ControlShare(share)
    rng = random.Random(0)
    assert low <= sum(control.is_control(rng.choice((1, 2, 3))) for _ in range(10_000)) <= high


def test_a_rare_batch_size_has_its_share_of_control_rounds() -> None:
    counts = []
    for seed in range(50):
        control = ControlShare(0.1, seed)
        common, rare = 0, 0
        for turn in range(1000):
            common += control.is_control(1)
            rare += turn % 50 == 0 and control.is_control(8)
        assert 99 <= common <= 101
        counts.append(rare)
    assert set(counts) == {2}, "a tenth of its twenty rounds, always"


def test_what_is_due_is_known_before_the_round() -> None:
    control, rng = ControlShare(0.3), random.Random(0)
    for _ in range(200):
        batch = rng.choice((1, 2))
        assert control.is_due(batch) == control.is_due(batch) == control.is_control(batch)


def test_short_visits_to_a_batch_size_have_control_rounds_too() -> None:
    visits = [ControlShare(0.02, seed) for seed in range(1000)]
    assert 70 <= sum(control.is_control(3) for control in visits for _ in range(5)) <= 130


def test_the_estimate_is_what_tokens_cost_plainly_over_what_rounds_should_take() -> None:
    estimate = EstimatedSpeedup()
    assert estimate.ratio() is None
    estimate.add(batch=1, committed=3, expected_s=0.040, plain_s=0.030)
    estimate.add(batch=2, committed=2, expected_s=0.032, plain_s=0.032)
    assert estimate.ratio() == pytest.approx((3 * 0.030 + 2 * 0.016) / (0.040 + 0.032))


# -- the A/B of the draft head -------------------------------------------------------------------------------------


def test_one_stretch_of_every_cycle_goes_without_the_head_at_a_random_place() -> None:
    switch = AbSchedule(0.25)
    arms = [switch.next_arm() for _ in range(192 * 50)]
    starts = []
    for first in range(0, len(arms), 192):
        cycle = [arm.is_on for arm in arms[first : first + 192]]
        assert cycle.count(False) == 48
        starts.append(cycle.index(False))
        assert not any(cycle[starts[-1] : starts[-1] + 48])
    assert len(set(starts)) > 20


def test_the_first_rounds_after_a_change_count_for_neither_side() -> None:
    switch = AbSchedule(0.5)
    arms = [switch.next_arm() for _ in range(96 * 50)]
    stretches = [[arm.counts for arm in group] for _, group in itertools.groupby(arms, lambda arm: arm.is_on)]
    assert len(stretches) > 90
    for stretch in stretches[1:]:
        assert stretch.index(True) == 8 if len(stretch) > 8 else not any(stretch)
        assert all(stretch[8:])


def test_without_an_ab_the_head_may_always_be_asked_and_nothing_counts() -> None:
    switch = AbSchedule(0.0)
    assert {switch.next_arm() for _ in range(1000)} == {(True, False)}


def _ab(world: World, *, rounds: int, busy: float = 1.0) -> Speedup:
    """What an A/B of so many rounds finds, on a machine that is slower by up to `busy` for some time now and then."""
    switch, rng = AbSchedule(0.25, seed=world.seed), random.Random(world.seed)
    blocks = [Sums() for _ in range(20)]
    for number in range(rounds):
        if rng.random() < 0.005:
            world.scale = 1 + rng.random() * (busy - 1)
        arm, clock_s, tokens = switch.next_arm(), world.clock_s, world.tokens
        world.run(1, head_depth=DEPTH if arm.is_on else 0)
        if arm.counts:
            block = blocks[20 * number // rounds]
            block.add(world.batch, arm.is_on, world.clock_s - clock_s, world.tokens - tokens)
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
        ratio, lower, upper = _known(_ab(World(alpha, seed=seed), rounds=3000, busy=1.5))
        held += lower < truth < upper
        widths.append(upper - lower)
        found.append(ratio)
    assert held >= 10
    assert sum(widths) / len(widths) < 0.25
    assert sum(found) / len(found) == pytest.approx(truth, abs=0.03)


# -- end to end ----------------------------------------------------------------------------------------------------

PROMPT_S, PLAIN_S, DRAFTED_S, PER_PROMPT = 0.1, 0.010, 0.005, 40


def _served(rng: random.Random, *, cycles: int, share: float = 0.05, busy: float = 1.0) -> AbSpeedup:
    """Rounds of one token, on a machine that is slower by up to `busy` for some time; prompts are read now and then."""
    end_to_end, slow = AbSpeedup(share), 1.0
    for _ in range(round(cycles * 48 / share)):
        if rng.random() < 0.01:
            slow = 1 + rng.random() * (busy - 1)
        arm = end_to_end.next_arm()
        batch, prompts_s = rng.choice((1, 4)), slow * PROMPT_S if rng.random() < 1 / PER_PROMPT else 0.0
        seconds = slow * batch * (DRAFTED_S if arm.is_on else PLAIN_S)
        end_to_end.add(arm, batch=batch, seconds=seconds, committed=batch, prompts_s=batch * prompts_s)
    return end_to_end


def test_what_requests_see_is_less_than_what_rounds_gain() -> None:
    """Half of a drafted token's time goes into prompts."""
    truth = (PROMPT_S / PER_PROMPT + PLAIN_S) / (PROMPT_S / PER_PROMPT + DRAFTED_S)
    hits = 0
    for seed in range(40):
        found = _served(random.Random(seed), cycles=12, busy=2.0).measure()
        assert found.lower is not None
        assert found.upper is not None
        assert found.upper < PLAIN_S / DRAFTED_S
        hits += found.lower <= truth <= found.upper
    assert truth == pytest.approx(5 / 3)
    assert hits >= 36, "19 of 20 intervals hold the truth"


def test_the_interval_needs_five_plain_stretches_and_old_ones_are_forgotten() -> None:
    short, rng = _served(random.Random(0), cycles=4).measure(), random.Random(1)
    assert short.ratio is not None
    assert (short.lower, short.upper) == (None, None)
    end_to_end = _served(rng, cycles=3)
    for _ in range(20 * 960):
        end_to_end.add(end_to_end.next_arm(), batch=1, seconds=1.0, committed=1, prompts_s=0.0)
    assert end_to_end.measure().ratio == pytest.approx(1.0)


def test_without_a_share_nobody_is_served_plainly_and_nothing_is_measured() -> None:
    end_to_end = AbSpeedup(0.0)
    for _ in range(1000):
        arm = end_to_end.next_arm()
        assert arm.is_on
        end_to_end.add(arm, batch=1, seconds=1.0, committed=1, prompts_s=0.0)
    assert end_to_end.measure() == Speedup(None, None, 0, 0)

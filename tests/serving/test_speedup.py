"""The measured speedup and its interval, the control share, and the estimate beside them."""

from __future__ import annotations

import random

import pytest

from serving.speedup import ControlShare, PlannedSpeedup, SpeedupMeter, speedup


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that a test sets."""
    clock = [0.0]
    monkeypatch.setattr("serving.speedup.time.monotonic", lambda: clock[0])
    return clock


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


def test_without_a_baseline_there_is_no_ratio() -> None:
    assert speedup({(1, True): 1.0}, {(1, True): 5}, baseline_rounds=0, speculative_rounds=1).ratio is None


def test_rounds_leave_the_window(now: list[float]) -> None:
    meter = SpeedupMeter(window_s=10)
    meter.add(batch=1, drafted=False, seconds=1, committed=1)
    now[0] = 11
    meter.add(batch=1, drafted=True, seconds=1, committed=1)
    assert meter.measure().baseline_rounds == 0


def _simulate(meter: SpeedupMeter, now: list[float], rng: random.Random, *, busy: float) -> None:
    """Two minutes in which the machine is slower by a factor of up to `busy` for seconds on end; the truth is 1.5."""
    control, slow = ControlShare(0.05, seed=rng.randrange(1000)), 1.0
    while now[0] < 120:
        if rng.random() < 0.02:
            slow = 1 + rng.random() * (busy - 1)
        batch = rng.choice((1, 2))
        if control.is_control(batch):
            seconds, drafted, committed = 0.03 * slow * rng.uniform(0.9, 1.1), False, batch
        else:
            accepted = [1 + (rng.random() < 0.8) for _ in range(batch)]
            seconds, drafted, committed = 0.036 * slow * rng.uniform(0.9, 1.1), True, sum(accepted)
        meter.add(batch=batch, drafted=drafted, seconds=seconds, committed=committed)
        now[0] += seconds


def test_the_interval_holds_the_truth_on_a_machine_that_is_busy_at_times(now: list[float]) -> None:
    held, widths = 0, []
    for seed in range(60):
        now[0] = 0.0
        meter = SpeedupMeter()
        _simulate(meter, now, random.Random(seed), busy=1.5)
        measured = meter.measure()
        assert measured.ratio is not None
        assert measured.lower is not None
        assert measured.upper is not None
        held += measured.lower < 1.5 < measured.upper
        widths.append(measured.upper - measured.lower)
    assert held >= 52
    assert sum(widths) / len(widths) < 0.2


def test_each_group_is_compared_with_the_baseline_of_its_batch_sizes(now: list[float]) -> None:
    meter = SpeedupMeter()
    code, chat, rare = ("t", "code"), ("t", "chat"), ("u", "code")
    for turn in range(400):
        now[0] = turn / 10
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


def test_the_estimate_of_planned_rounds_is_their_tokens_at_the_plain_price_over_their_time() -> None:
    estimate = PlannedSpeedup()
    assert estimate.ratio() is None
    estimate.add(batch=1, committed=3, expected_s=0.040, plain_s=0.030)
    estimate.add(batch=2, committed=2, expected_s=0.032, plain_s=0.032)
    assert estimate.ratio() == pytest.approx((3 * 0.030 + 2 * 0.016) / (0.040 + 0.032))

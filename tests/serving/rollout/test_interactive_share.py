"""Rollouts give slots up where interactive requests miss their objective, and take them back as soon as that costs
nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from serving.rollout.interactive_share import SlotsShare
from tests.serving.rollout.test_driver import Clock

SLOTS = 64


def observe(
    share: SlotsShare, clock: Clock, latency: Callable[[int], float], seconds: float, *, per_second: float = 50
) -> tuple[float, float]:
    """Observe latencies as the slots in use make them; returns the part over 30 ms and the mean slots."""
    over, slots, num = 0, 0, int(per_second * seconds)
    for _ in range(num):
        clock.now_s += 1 / per_second
        held = share.slots(SLOTS)
        seen = latency(held)
        share.observe_between_chunks(seen)
        over, slots = over + (seen > 0.03), slots + held
    return over / num, slots / num


def test_without_an_objective_nothing_changes() -> None:
    clock = Clock()
    share = SlotsShare(0.75, clock=clock)
    for _ in range(1000):
        clock.now_s += 1.0
        share.observe_first_token(1000.0)
        share.observe_between_chunks(1000.0)
    assert share.update() == 0.75
    assert [share.slots(num) for num in (1, 2, 8)] == [1, 1, 6]


@pytest.mark.parametrize("room", [40, 20, 6])
def test_it_finds_the_slots_that_keep_the_objective(room: int) -> None:
    """Beside what is late for other reasons."""
    noise, clock = random.Random(room), Clock()
    share = SlotsShare(0.75, itl_p99_s=0.03, clock=clock)

    def latency(held: int) -> float:
        is_late = held > room or noise.random() < 0.003
        return 0.02 * noise.uniform(0.9, 1.1) + (0.02 if is_late else 0.0)

    observe(share, clock, latency, 60.0)
    over, slots = observe(share, clock, latency, 3600.0)
    assert over < 0.01
    assert slots > 0.4 * room


@pytest.mark.parametrize("per_second", [50, 1, 0.1])
def test_where_any_slot_misses_it_nearly_all_the_time_is_without(per_second: float) -> None:
    clock = Clock()
    share = SlotsShare(0.75, itl_p99_s=0.03, clock=clock)
    observe(share, clock, lambda held: 0.05 if held else 0.02, 600.0, per_second=per_second)
    over, _ = observe(share, clock, lambda held: 0.05 if held else 0.02, 1e6 / per_second, per_second=per_second)
    assert over <= 0.01


def test_all_slots_come_back_once_requests_are_gone() -> None:
    clock = Clock()
    share = SlotsShare(0.75, ttft_p99_s=0.1, clock=clock)
    for _ in range(100):
        clock.now_s += 1.0
        share.observe_first_token(0.2)
        share.update()
    assert share.slots(SLOTS) <= SLOTS // 8
    for _ in range(600):
        clock.now_s += 1.0
        share.update()
    assert share.update() == 0.75


def test_once_all_slots_are_back_a_miss_costs_as_little_as_the_first() -> None:
    clock = Clock()
    share = SlotsShare(0.8, ttft_p99_s=0.1, clock=clock)
    for _ in range(8):
        clock.now_s += 10.0
        share.observe_first_token(1.0)
        share.update()
    for _ in range(1000):
        clock.now_s += 1.0
        share.update()
    share.observe_first_token(1.0)
    assert share.update() == 0.4
    clock.now_s += 5.0
    assert share.update() == pytest.approx(0.5)


def test_one_slow_request_of_few_says_nothing_of_a_percentile() -> None:
    clock = Clock()
    share = SlotsShare(0.75, ttft_p99_s=0.1, clock=clock)
    for seconds in (0.05, 5.0, 0.05):
        share.observe_first_token(seconds)
    assert share.update() == 0.75
    share.observe_first_token(5.0)
    assert share.update() == 0.375


def test_latencies_of_the_share_before_do_not_count_again() -> None:
    clock = Clock()
    share = SlotsShare(0.8, itl_p99_s=0.1, clock=clock)
    for _ in range(20):
        share.observe_between_chunks(1.0)
        assert share.update() in {0.8, 0.4}
    clock.now_s += 1.0
    for _ in range(20):
        share.observe_between_chunks(0.05)
    assert share.update() == 0.4

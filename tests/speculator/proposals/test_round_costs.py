"""The measured times of rounds: lines, sizes that are no line, interruptions, a machine that changes."""

from __future__ import annotations

import random

import pytest

from speculator.proposals.estimates import FittedTime, RoundTimes


def true_s(batch: int, proposals: int, keys: int) -> float:
    rows = batch * (proposals + 1)
    return 0.014 + 0.0025 * rows + 2e-7 * keys * (proposals + 1)


def fed(rng: random.Random, rounds: int, *, noise: float = 0.1, slower: float = 1.0) -> RoundTimes:
    times = RoundTimes()
    feed(times, rng, rounds, noise=noise, slower=slower)
    return times


def feed(times: RoundTimes, rng: random.Random, rounds: int, *, noise: float = 0.1, slower: float = 1.0) -> None:
    for _ in range(rounds):
        batch, proposals, keys = rng.choice((1, 2, 4)), rng.choice((0, 1, 2, 4)), rng.randrange(50, 4000)
        seconds = slower * true_s(batch, proposals, keys) * (1 + rng.uniform(-noise, noise))
        times.add_verification(batch, proposals, keys, seconds)


def test_sizes_that_were_never_run_lie_on_the_line() -> None:
    times = fed(random.Random(0), 200)
    for batch, proposals, keys in ((8, 0, 1000), (3, 3, 500), (8, 4, 4000), (1, 16, 300)):
        assert times.verify_s(batch, proposals, keys) == pytest.approx(true_s(batch, proposals, keys), rel=0.12)


def test_a_size_that_is_off_the_line_keeps_its_own_time() -> None:
    """As on a GPU, where a step costs the same up to some number of rows."""
    times, rng = RoundTimes(), random.Random(0)
    for _ in range(300):
        proposals = rng.choice((0, 1, 2, 3, 4, 5))
        times.add_verification(1, proposals, 100, 0.010 if proposals < 4 else 0.016)
    for proposals in range(6):
        assert times.verify_s(1, proposals, 100) == pytest.approx(0.010 if proposals < 4 else 0.016, rel=0.07)


def test_plain_steps_alone_are_enough_to_guess_the_rest() -> None:
    times = RoundTimes()
    for _ in range(20):
        times.add_verification(1, 0, 100, 0.02)
    assert times.verify_s(1, 0, 100) == pytest.approx(0.02, rel=0.02)
    assert 0.02 < times.verify_s(1, 4, 100) < 0.04
    assert 0 < times.draft_s(1, 2, 2) < 0.02


def test_a_slow_first_round_is_no_measure_of_what_was_never_run() -> None:
    times = RoundTimes()
    for seconds in (0.2, *[0.02] * 40):
        times.add_verification(1, 0, 100, seconds)
    assert 0.021 < times.verify_s(1, 1, 100) < 0.03


def test_an_interruption_hardly_counts() -> None:
    times = fed(random.Random(0), 100)
    before = times.verify_s(1, 0, 500)
    times.add_verification(1, 0, 500, 50 * before)
    assert times.verify_s(1, 0, 500) < 1.15 * before


def test_a_machine_that_slows_down_is_followed() -> None:
    rng = random.Random(0)
    times = fed(rng, 200)
    feed(times, rng, 200, slower=2.0)
    for batch, proposals in ((1, 0), (1, 4), (4, 2)):
        assert times.verify_s(batch, proposals, 1000) == pytest.approx(2 * true_s(batch, proposals, 1000), rel=0.15)


def test_more_work_never_takes_less_time() -> None:
    rng = random.Random(1)
    fitted = FittedTime([1.0, 0.1, 0.1])
    for _ in range(50):
        first, second = rng.random(), rng.random()
        fitted.add([1.0, first, second], max(0.001, 0.1 - 0.05 * first + 0.2 * rng.random()), sizes=())
    assert fitted.seconds([1.0, 1.0, 0.5]) >= fitted.seconds([1.0, 0.0, 0.5]) - 1e-12
    assert fitted.seconds([1.0, 0.5, 1.0]) >= fitted.seconds([1.0, 0.5, 0.0]) - 1e-12


def test_catching_up_after_a_long_sleep_is_no_measure_of_a_usual_drafting() -> None:
    times = RoundTimes()
    for _ in range(30):
        times.add_drafting(1, 2, 2, 0.005)
    times.add_drafting(1, 2, 500, 0.060)
    assert times.draft_s(1, 2, 2) == pytest.approx(0.005, rel=0.1)


@pytest.mark.parametrize("slower", [1.5, 1.7, 2.0])
@pytest.mark.parametrize("rounds", [30, 400])
def test_what_was_last_run_in_a_slow_minute_is_not_dear_for_ever(slower: float, rounds: int) -> None:
    """Where chains do not pay in it, as beside another process, they would not be run again."""
    times, rng = RoundTimes(), random.Random(0)

    def run(rounds: int, shares: list[int], slower: float = 1.0) -> None:
        for proposals in rng.choices((0, 1, 2, 3), shares, k=rounds):
            seconds = slower * true_s(2, proposals, 600) * rng.uniform(0.95, 1.1)
            times.add_verification(2, proposals, 600, seconds)
            times.add_drafting(2, 2, 4, slower * 0.003)

    run(800, [2, 3, 4, 1])
    run(rounds, [2, 2, 5, 1], slower)
    for _ in range(3):
        run(40, [1, 0, 0, 0])
        for proposals in (1, 2, 3):
            ratio = times.verify_s(2, proposals, 600) / times.verify_s(2, 0, 600)
            assert ratio < 1.12 * true_s(2, proposals, 600) / true_s(2, 0, 600)
        assert times.draft_s(2, 2, 4) == pytest.approx(0.003, rel=0.12)

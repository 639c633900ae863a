"""How busy an engine is: what it reports, and what a trainer on its machine reads."""

from __future__ import annotations

import pytest

from speculator.engine_load import LINGER_S, EngineLoad, busiest_here, machine_id


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_the_share_of_time_in_steps_since_the_last_report() -> None:
    clock = Clock()
    load = EngineLoad(clock)
    clock.now_s += 1.0
    with load.stepping():
        clock.now_s += 3.0
    assert load.report() == {"machine": machine_id(), "busy": 0.75}
    clock.now_s += 2.0
    assert load.report()["busy"] == 0.0


def test_a_step_that_goes_on_counts_so_far_and_only_once() -> None:
    clock = Clock()
    load = EngineLoad(clock)
    clock.now_s += 5.0
    with load.stepping():
        clock.now_s += 5.0
        assert load.report()["busy"] == 0.5
        clock.now_s += 1.0
    clock.now_s += 1.0
    assert load.report()["busy"] == 0.5


def test_a_pause_between_steps_is_busy_only_where_it_is_short() -> None:
    """A GPU still computes what the last step launched."""
    clock = Clock()
    load = EngineLoad(clock)
    for pause_s in (0.9 * LINGER_S, 2 * LINGER_S):
        load.report()
        for _ in range(10):
            with load.stepping():
                clock.now_s += LINGER_S
            clock.now_s += pause_s
        busy = load.report()["busy"]
        assert busy == pytest.approx(0.95 if pause_s < LINGER_S else 1 / 3, abs=0.05)


def test_a_step_that_fails_ends() -> None:
    clock = Clock()
    load = EngineLoad(clock)
    with pytest.raises(RuntimeError), load.stepping():
        raise RuntimeError("the engine has failed")
    clock.now_s += 10.0
    assert load.report()["busy"] == 0.0


def test_two_reports_at_once_are_no_error() -> None:
    load = EngineLoad(Clock())
    assert load.report()["busy"] == load.report()["busy"] == 0.0


def test_the_busiest_engine_of_this_machine() -> None:
    here, elsewhere = machine_id(), "another"
    reports = {
        "a": {"machine": here, "busy": "0.25"},
        "b": {"machine": here, "busy": "0.5"},
        "c": {"machine": elsewhere, "busy": "1.0"},
        "d": {"version": "7"},
        "e": {"machine": here},
        "f": {"machine": here, "busy": "nan"},
        "g": {"machine": here, "busy": "very"},
        "h": {"machine": here, "busy": "17"},
    }
    assert busiest_here(reports) == 0.5
    assert busiest_here({}) == 0.0

"""The trainer rests beside busy engines of its machine, and the kernel runs it last."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import cast

import pytest
import redis
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from speculator.errors import StreamError
from speculator.redis.control_plane import DraftPointer, machine_id
from speculator.redis.trace_stream import TraceStream
from speculator.trace import Trace, encode_trace
from tests.fixtures.waiting import wait_until
from tests.trainer.examples import config_for
from trainer.loop import Trainer, train_until
from trainer.metrics import TrainerMetrics
from trainer.process import use_idle_scheduler
from trainer.ranks import Ranks
from trainer.throttle import ASLEEP_S, LONGEST_CARD_REST_S, LONGEST_REST_S, POLL_S, RESTING_SHARE, Throttle

Reports = dict[str, dict[str, str]]

MACHINE = machine_id()
CARD_SHARE = 0.01


class Engines:
    """Their reports, one look after the other and then the last again. The clock moves in rests and turns alone."""

    def __init__(
        self,
        *looks: Reports,
        busy_share: float = 1.0,
        gpu: str = "",
        stop: bool = False,
        may_gain: bool = True,
    ) -> None:
        self.told: list[bool] = []
        self.looks, self.num_asked, self.rested_s, self.now_s = list(looks), 0, 0.0, 1000.0
        self.is_stopped, self.is_away, self.is_refused, self.hangs_s = stop, False, False, 0.0
        self.registry = CollectorRegistry()
        self.throttle = Throttle(
            self.read,
            Ranks(),
            TrainerMetrics(self.registry),
            busy_share=busy_share,
            card_share=CARD_SHARE,
            gpu=gpu,
            may_gain=lambda: may_gain,
            set_trainer_resting=self.told.append,
            is_refused=lambda: self.is_refused,
            clock=lambda: self.now_s,
        )

    def read(self) -> Reports:
        self.num_asked += 1
        self.now_s += self.hangs_s
        if self.is_away:
            raise StreamError("away")
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    def wait(self, timeout: float) -> None:
        """Of the event that stops the trainer."""
        if not self.is_stopped:
            self.rested_s += timeout
            self.now_s += timeout

    def rest_after(self, worked_s: float) -> float:
        self.now_s, self.rested_s = self.now_s + worked_s, 0.0
        self.throttle.rest(worked_s, cast(threading.Event, self))
        return self.rested_s

    def metric(self, name: str) -> float | None:
        return self.registry.get_sample_value(f"slipstream_trainer_{name}")


def busy(share: str, machine: str = MACHINE) -> Reports:
    return {"engine": {"version": "1", "machine": machine, "busy": share}}


@pytest.mark.parametrize(
    ("load", "busy_share", "share"), [("1.0", 0.25, 0.25), ("0.5", 0.25, 0.625), ("0", 0.25, 1.0), ("1.0", 0.5, 0.5)]
)
def test_the_trainers_share_falls_as_the_load_rises(load: str, busy_share: float, share: float) -> None:
    engines = Engines(busy(load), busy_share=busy_share)
    rests_s = [engines.rest_after(0.5) for _ in range(20)]
    assert rests_s == pytest.approx([0.5 * (1 / share - 1)] * 20, abs=0.002)
    assert engines.metric("time_share_ratio") == pytest.approx(share)
    assert engines.metric("yielded_seconds_total") == pytest.approx(sum(rests_s))


def test_by_default_a_busy_engine_makes_no_trainer_rest() -> None:
    engines = Engines(busy("1.0"), busy_share=1.0)
    assert engines.rest_after(1.0) == 0


def asleep(*flags: str) -> Reports:
    return {f"engine-{number}": {"version": "1", "asleep": flag} for number, flag in enumerate(flags)}


def test_the_trainer_rests_where_no_engine_asks_its_draft_and_says_so() -> None:
    engines = Engines(asleep("1", "1"), may_gain=False)
    assert engines.rest_after(1.0) == 0, "they may only have paused"
    assert engines.told == []
    engines.now_s += ASLEEP_S
    assert engines.rest_after(1.0) == pytest.approx(1 / RESTING_SHARE - 1, abs=0.01)
    assert engines.told[-1] is True
    assert (engines.metric("resting"), engines.metric("time_share_ratio")) == (1, RESTING_SHARE)
    engines.looks = [asleep("1", "0")]
    assert engines.rest_after(1.0) < 2 * POLL_S, "it goes on once an engine asks"
    assert engines.told[-1] is False
    assert engines.metric("resting") == 0


@pytest.mark.parametrize(
    ("reports", "may_gain"),
    [(asleep("1", "0"), False), (asleep("1"), True), ({}, False), ({"of another release": {"version": "1"}}, False)],
)
def test_the_trainer_goes_on_where_an_engine_asks_or_it_may_gain(reports: Reports, may_gain: bool) -> None:
    engines = Engines(reports, may_gain=may_gain)
    engines.rest_after(1.0)
    engines.now_s += 2 * ASLEEP_S
    assert engines.rest_after(1.0) == 0
    assert engines.told == []


def on_card(share: str, gpu: str = "GPU-1") -> Reports:
    return {"engine": {"version": "1", "machine": "another container's", "busy": share, "card": gpu}}


def test_on_the_engines_own_gpu_few_tokens_wait_for_the_trainer() -> None:
    """However little the engine has to do: its requests are what waits."""
    engines = Engines(on_card("0.05"), gpu="GPU-1")
    assert engines.rest_after(0.15) == pytest.approx(0.15 * (1 / CARD_SHARE - 1), abs=0.02)
    assert engines.metric("time_share_ratio") == CARD_SHARE
    assert engines.rest_after(2.0) == pytest.approx(2.0 * (1 / CARD_SHARE - 1), abs=0.02), "a gate's decision, too"
    assert engines.rest_after(60.0) == pytest.approx(LONGEST_CARD_REST_S, abs=0.02)


@pytest.mark.parametrize(
    ("reports", "gpu"), [(on_card("0.0"), "GPU-1"), (on_card("1.0"), "GPU-2"), (on_card("1.0", ""), "")]
)
def test_on_a_gpu_where_nothing_runs_or_of_its_own_the_trainer_does_not_rest(reports: Reports, gpu: str) -> None:
    assert Engines(reports, gpu=gpu).rest_after(1.0) == 0


def test_a_rest_on_the_engines_gpu_ends_with_its_last_request() -> None:
    engines = Engines(on_card("0.5"), on_card("0.5"), on_card("0.0"), gpu="GPU-1")
    assert engines.rest_after(1.0) == pytest.approx(2.0), "of 99 seconds"


def test_an_engine_of_another_machine_holds_nobody_up() -> None:
    assert Engines(busy("1.0", machine="another"), busy_share=0.1).rest_after(1.0) == 0


def test_the_busiest_engine_counts() -> None:
    reports = busy("0.2") | {"two": busy("1.0")["engine"], "three": busy("0.5")["engine"]}
    assert Engines(reports, busy_share=0.5).rest_after(1.0) == pytest.approx(1.0)


def test_a_rest_ends_once_the_engines_are_idle() -> None:
    engines = Engines(busy("1.0"), busy("1.0"), busy("0.0"), busy_share=0.1)
    assert engines.rest_after(2.0) == pytest.approx(2.0), "of 18 seconds"


def test_after_a_long_turn_the_rest_is_bounded() -> None:
    assert Engines(busy("1.0"), busy_share=0.01).rest_after(60.0) == pytest.approx(LONGEST_REST_S)


def test_a_redis_that_hangs_makes_no_rest_longer_than_its_bound() -> None:
    engines = Engines(busy("1.0"), busy_share=0.01)
    engines.rest_after(1.0)
    engines.is_away, engines.hangs_s, engines.now_s = True, 5.0, 2000.0
    engines.rest_after(60.0)
    assert engines.now_s - 2060.0 <= LONGEST_REST_S + engines.hangs_s


def test_nobody_rests_at_the_stop() -> None:
    assert Engines(busy("1.0"), busy_share=0.01, stop=True).rest_after(60.0) == 0


def test_redis_is_asked_now_and_then_and_without_it_the_last_load_counts() -> None:
    engines = Engines(busy("1.0"), busy_share=0.5)
    for _ in range(20):
        engines.rest_after(0.05)
    assert engines.num_asked <= 3, "in two seconds"
    engines.is_away = True
    assert engines.rest_after(2.0) == pytest.approx(2.0)
    fresh = Engines(busy("1.0"), busy_share=0.5)
    fresh.is_away = True
    assert fresh.rest_after(2.0) == 0, "no engine is known"


def test_while_redis_refuses_writes_reports_that_expire_count_on() -> None:
    reports = busy("1.0") | {"idle": busy("0.0")["engine"]}
    engines = Engines(reports, busy_share=0.5)
    engines.rest_after(1.0)
    engines.is_refused, engines.looks = True, [{"idle": reports["idle"]}, {}]
    for _ in range(3):
        assert engines.rest_after(2.0) == pytest.approx(2.0)
    engines.looks = [busy("0.0")]
    assert engines.rest_after(2.0) == 0, "one that does arrive counts"
    engines.looks, engines.is_refused = [{}], False
    assert engines.rest_after(2.0) == 0


def test_the_whole_loop_rests_while_an_engine_is_busy(
    model_dir: Path, tmp_path: Path, traces: list[Trace], redis_url: str, redis_client: redis.Redis
) -> None:
    config = config_for(model_dir, tmp_path, redis_url=redis_url, max_passes=1e6, busy_share=0.01)
    registry, stop = CollectorRegistry(), threading.Event()
    trainer, pointer = Trainer(config, registry), DraftPointer(redis_client, "toy")

    def metric(name: str, **labels: str) -> float:
        return registry.get_sample_value(f"slipstream_trainer_{name}", labels) or 0.0

    stream = TraceStream(redis_client, "toy", max_bytes=10**8)
    for trace in traces:
        stream.append(encode_trace(trace), trace_id=trace.header.trace_id)
    thread = threading.Thread(target=train_until, args=(stop, trainer))
    thread.start()
    try:
        wait_until(lambda: metric("steps_total", outcome="applied") >= 3)
        pointer.report_engine("engine", busy("1.0")["engine"])
        wait_until(lambda: metric("time_share_ratio") < 1)
        pointer.report_engine("engine", busy("0.0")["engine"])
        wait_until(lambda: metric("time_share_ratio") == 1)
        num_steps = metric("steps_total", outcome="applied")
        wait_until(lambda: metric("steps_total", outcome="applied") > num_steps)
        pointer.report_engine("engine", busy("1.0")["engine"])
        wait_until(lambda: metric("time_share_ratio") < 1)
    finally:
        stop.set()
        thread.join(10)
    assert not thread.is_alive(), "a stop is not held up"
    assert metric("yielded_seconds_total") > 0


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="scheduling classes are Linux's")
@pytest.mark.parametrize(("nice", "num_ranks", "is_idle"), [(19, 1, True), (5, 1, False), (19, 2, False)])
def test_a_single_process_at_the_lowest_niceness_gets_the_lowest_class(
    nice: int, num_ranks: int, is_idle: bool
) -> None:
    found: list[int] = []

    def give_way() -> None:
        use_idle_scheduler(nice, num_ranks)
        found.append(os.sched_getscheduler(0))

    # A thread of its own, as it is for good.
    thread = threading.Thread(target=give_way)
    thread.start()
    thread.join()
    assert found == [os.SCHED_IDLE if is_idle else os.SCHED_OTHER]


def test_a_system_without_that_class_is_no_reason_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "sched_setscheduler", refuse, raising=False)
    with capture_logs() as told:
        use_idle_scheduler(19, 1)
    assert [(line["log_level"], line["error"]) for line in told] == [("warning", "not here")]


GIVE_WAY = (
    "import sys, pathlib, trainer.process as p; p.set_session_niceness(int(sys.argv[1]), pathlib.Path(sys.argv[2]))"
)


@pytest.mark.parametrize(
    ("leads", "nice", "said", "share"),
    [(True, 19, "", "19"), (True, 0, "", "0"), (False, 19, "setsid", "0"), (True, 5, "cannot lower", None)],
)
def test_a_session_of_its_own_is_made_as_nice(
    tmp_path: Path, leads: bool, nice: int, said: str, share: str | None
) -> None:
    """No share: it cannot be written."""
    autogroup = tmp_path / "autogroup"
    autogroup.write_text("0") if share else autogroup.mkdir()
    command = [sys.executable, "-c", GIVE_WAY, str(nice), str(autogroup)]
    done = subprocess.run(command, start_new_session=leads, capture_output=True, text=True, check=True)
    assert said in done.stdout
    assert bool(said) == bool(done.stdout)
    assert not share or autogroup.read_text() == share

"""The trainer rests beside busy engines of its machine, and the kernel runs it last."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import redis
import torch
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from speculator.errors import StreamError
from speculator.redis.control_plane import DraftPointer, machine_id
from speculator.redis.trace_stream import TraceStream
from speculator.trace import Trace, encode_trace
from tests.fixtures.waiting import wait_until
from tests.trainer.examples import config_for
from trainer import process
from trainer.loop import Trainer, train_until
from trainer.metrics import TrainerMetrics
from trainer.process import give_way_as_a_session, give_way_in_the_kernel
from trainer.ranks import Ranks
from trainer.schedule import LONGEST_REST_S, Throttle

Reports = dict[str, dict[str, str]]

MACHINE = machine_id()


class Engines:
    """Their reports, one look after the other and then the last again. The clock moves in rests and turns alone."""

    def __init__(self, *looks: Reports, busy_share: float, stop: bool = False) -> None:
        self.looks, self.num_asked, self.rested_s, self.now_s = list(looks), 0, 0.0, 1000.0
        self.is_stopped, self.is_away, self.hangs_s = stop, False, 0.0
        self.registry = CollectorRegistry()
        self.throttle = Throttle(
            self.read, Ranks(), TrainerMetrics(self.registry), busy_share=busy_share, clock=lambda: self.now_s
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


def test_by_default_the_trainer_never_rests_and_asks_nobody() -> None:
    engines = Engines(busy("1.0"), busy_share=1.0)
    assert engines.rest_after(1.0) == engines.num_asked == 0


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
def test_who_gave_way_has_the_lowest_class() -> None:
    found: list[int] = []

    def give_way() -> None:
        give_way_in_the_kernel()
        found.append(os.sched_getscheduler(0))

    # A thread of its own, as it is for good.
    thread = threading.Thread(target=give_way)
    thread.start()
    thread.join()
    assert found == [os.SCHED_IDLE]


def test_a_system_without_that_class_is_no_reason_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "sched_setscheduler", refuse, raising=False)
    with capture_logs() as told:
        give_way_in_the_kernel()
    assert [(line["log_level"], line["error"]) for line in told] == [("warning", "not here")]


@pytest.fixture
def autogroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of this process, on a system that has them."""
    own, enabled = tmp_path / "autogroup", tmp_path / "enabled"
    monkeypatch.setattr("trainer.process._CGROUPS", tmp_path / "none")
    own.write_text("/autogroup-1 nice 0\n")
    enabled.write_text("1\n")
    monkeypatch.setattr("trainer.process._AUTOGROUP", own)
    monkeypatch.setattr("trainer.process._AUTOGROUPS_ENABLED", enabled)
    return own


def test_a_session_of_its_own_is_made_as_nice(autogroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getsid", lambda _: os.getpid())
    give_way_as_a_session(19)
    assert autogroup.read_text() == "19"


@pytest.mark.parametrize("nice", [0, -5])
def test_who_is_not_nice_leaves_the_session(autogroup: Path, monkeypatch: pytest.MonkeyPatch, nice: int) -> None:
    monkeypatch.setattr(os, "getsid", lambda _: os.getpid())
    before = autogroup.read_text()
    give_way_as_a_session(nice)
    assert autogroup.read_text() == before


def test_a_session_that_others_are_in_stays(autogroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getsid", lambda _: os.getppid())
    before = autogroup.read_text()
    with capture_logs() as told:
        give_way_as_a_session(19)
    assert autogroup.read_text() == before
    assert len(told) == 1
    assert "setsid" in told[0]["event"]


@pytest.mark.parametrize(
    ("groups", "weighed", "is_alone"),
    [
        ("0::/\n", ".", True),  # a container that sees its own group as the root
        ("0::/system.slice/trainer.service\n", "system.slice/trainer.service", True),
        ("0::/user.slice/user-1000.slice/session-2.scope\n", "user.slice", True),
        ("4:cpu,cpuacct:/docker/0123\n3:memory:/docker/0123\n0::/\n", None, True),
        ("0::/\n", None, False),
        ("0::/user.slice/session-2.scope\n", None, False),
        ("3:memory:/system.slice\n2:cpuacct:/a\n1:cpu:/\n0::/\n", None, False),
    ],
)
def test_in_a_container_or_a_service_its_share_decides(
    autogroup: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, weighed: str | None, is_alone: bool
) -> None:
    """`setsid` would change nothing there."""
    (tmp_path / "cgroup").write_text(groups)
    monkeypatch.setattr("trainer.process._CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr("trainer.process._CGROUP_ROOT", tmp_path / "cgroups")
    if weighed is not None:
        (tmp_path / "cgroups" / weighed).mkdir(parents=True)
        (tmp_path / "cgroups" / weighed / "cpu.weight").write_text("100\n")
    monkeypatch.setattr(os, "getsid", lambda _: os.getppid())
    with capture_logs() as told:
        give_way_as_a_session(19)
    assert len(told) == 1
    assert ("setsid" in told[0]["event"]) is not is_alone
    assert ("cpu_shares" in told[0]["event"]) is is_alone


@pytest.mark.parametrize("enabled", ["0\n", None])
def test_without_shares_of_sessions_nothing_is_done(
    autogroup: Path, monkeypatch: pytest.MonkeyPatch, enabled: str | None
) -> None:
    monkeypatch.setattr(os, "getsid", lambda _: os.getpid())
    file, before = autogroup.with_name("enabled"), autogroup.read_text()
    file.unlink() if enabled is None else file.write_text(enabled)
    with capture_logs() as told:
        give_way_as_a_session(19)
    assert (autogroup.read_text(), told) == (before, [])


def test_a_share_that_the_system_keeps_is_told(autogroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getsid", lambda _: os.getpid())
    autogroup.unlink()
    autogroup.mkdir()
    with capture_logs() as told:
        give_way_as_a_session(19)
    assert [line["log_level"] for line in told] == ["warning"]


@pytest.mark.parametrize(("num_ranks", "nice", "num_calls"), [(1, 19, 1), (1, 5, 0), (2, 19, 0)])
def test_one_process_takes_the_lowest_class_where_it_is_to_give_way(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int, nice: int, num_calls: int
) -> None:
    """Of several one might not get on for minutes under SCHED_IDLE, and the others would give it up."""
    called: list[bool] = []
    trainer = SimpleNamespace(metrics=TrainerMetrics(CollectorRegistry()), learner=SimpleNamespace(num_steps=0))
    monkeypatch.setattr(process, "Trainer", lambda *_, **__: trainer)
    monkeypatch.setattr(process, "train_until", lambda *_: None)
    monkeypatch.setattr(process, "give_way_in_the_kernel", lambda: called.append(True))
    config = config_for(model_dir, tmp_path, nice=nice)
    process._train(config, Ranks(0, num_ranks), torch.device("cpu"), threading.Event())
    assert len(called) == num_calls

"""The trainer's modules give way to an engine: in the middle of a step, and without changing what is learnt."""

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
from torch import nn

from speculator.codec import encode_trace
from speculator.fresh import fresh_draft
from speculator.pulse import EngineStep, Pulse, PulseBoard, Serving
from speculator.store import DraftStore
from speculator.stream import TraceStream
from speculator.trace import Trace
from tests.trainer.examples import batch_of, config_for, promote
from tests.waiting import wait_until
from trainer import run
from trainer.distributed import Ranks
from trainer.loop import train_until
from trainer.metrics import TrainerMetrics
from trainer.service import Trainer
from trainer.sharing import Sharing
from trainer.step import Learner
from trainer.yielding import Yielding, give_way_as_a_session, give_way_in_the_kernel, yielding

BUSY, IDLE = Serving(1, True, 0), Serving(1, False, 0)


def work() -> None:
    nn.Identity()(torch.ones(3))


class Scene:
    """A board, clocks and a stop of our own: each module takes 1 ms, and each poll of a waiting trainer."""

    def __init__(self) -> None:
        self.now_ns = 10**12
        self.asleep_ns = 0
        self.serving = IDLE
        self.looks: list[Serving] = []
        self.steps_: list[EngineStep] = []
        self.num_drained = self.num_polls = 0
        self.polls_until_idle = 3
        self.is_stopped = False
        self.registry = CollectorRegistry()
        self.sharing = Sharing(budget=0.03)
        self.mode = Yielding(
            cast(PulseBoard, self),
            self.sharing,
            TrainerMetrics(self.registry),
            num_threads=1,
            idle_threads=2,
            drain=self._drain,
            stop=cast(threading.Event, self),
            clock=self._clock,
            cpu_clock=lambda: self.now_ns - self.asleep_ns,
        )

    def look(self) -> Serving:
        self.looks.append(self.serving)
        return self.serving

    def steps(self) -> list[EngineStep]:
        steps, self.steps_ = self.steps_, []
        return steps

    def is_set(self) -> bool:
        return self.is_stopped

    def wait(self, timeout: float) -> None:
        self.num_polls += 1
        if self.num_polls % self.polls_until_idle == 0:
            self.serving = IDLE

    def _drain(self) -> None:
        self.num_drained += 1

    def _clock(self) -> int:
        self.now_ns += 1_000_000
        return self.now_ns

    def metric(self, name: str) -> float | None:
        return self.registry.get_sample_value(f"slipstream_trainer_{name}")


def test_every_module_asks_in_the_backward_pass_too() -> None:
    scene, layer = Scene(), nn.Linear(3, 3)
    with scene.mode:
        loss = layer(torch.ones(3)).sum()
        assert len(scene.looks) == 1
        loss.backward()
        assert len(scene.looks) == 2
        torch.optim.SGD(layer.parameters(), lr=0.1).step()
        assert len(scene.looks) == 3
        with torch.no_grad():
            layer(torch.ones(3))
        assert len(scene.looks) == 4
        other = threading.Thread(target=lambda: (work(), torch.optim.SGD(layer.parameters(), lr=0.1).step()))
        other.start()
        other.join()
        assert len(scene.looks) == 4, "an engine in this process does not give way to itself"
    work()
    assert len(scene.looks) == 4, "outside, nobody is asked"


def test_a_module_waits_until_serving_is_idle() -> None:
    scene = Scene()
    scene.serving = BUSY
    with scene.mode:
        work()
        assert scene.num_polls == 3
        assert scene.looks == [BUSY, BUSY, BUSY, IDLE]
        work()
        assert scene.num_polls == 3, "idle: at once"
    assert scene.metric("yielded_seconds_total") == pytest.approx(0.003)


def test_nobody_waits_at_the_stop() -> None:
    scene = Scene()
    scene.serving, scene.is_stopped = BUSY, True
    with scene.mode:
        work()
    assert scene.num_polls == 0


def test_threads_follow_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    scene = Scene()
    with scene.mode:
        work()
        assert scene.metric("threads") == 2
        work()
        scene.serving, scene.is_stopped = BUSY, True
        work()
        scene.serving = Serving(0, False, 0)
        work()
        assert scene.metric("threads") == 1, "without an engine that says so, nobody knows that it rests"
    assert asked == [1, 2, 1]


def test_beside_a_busy_engine_each_module_ends_before_the_next() -> None:
    scene = Scene()
    scene.is_stopped = True
    with scene.mode:
        work()
        assert scene.num_drained == 0
        scene.serving = BUSY
        for _ in range(3):
            work()
    assert scene.num_drained == 2


def test_steps_are_set_against_what_was_computed_during_them() -> None:
    scene = Scene()
    told: list[tuple[tuple[str, int], float, float]] = []
    scene.sharing.observe = lambda *one: told.append(one)  # type: ignore[method-assign]
    with scene.mode:
        work()
        work()
        idle_ns = scene.now_ns
        scene.serving, scene.is_stopped = BUSY, True
        work()
        busy_ns = scene.now_ns
        work()
        beside_ns = scene.now_ns
        scene.now_ns += 50_000_000
        scene.asleep_ns += 50_000_000
        scene.steps_ = [
            EngineStep("e", idle_ns - 500_000, beside_ns, 1),
            EngineStep("e", busy_ns - 200_000, beside_ns + 1_500_000, 2),
            EngineStep("e", beside_ns + 10_000_000, beside_ns + 20_000_000, 3),
        ]
        work()
    assert [shape for shape, *_ in told] == [("e", 2), ("e", 3)], (
        "a module that serving came into says nothing about slices"
    )
    assert [beside_s for *_, beside_s in told] == pytest.approx([0.001, 0.0])
    assert told[0][1] == pytest.approx(0.0037)


def test_what_was_concluded_is_visible() -> None:
    scene = Scene()
    scene.is_stopped = True
    with scene.mode:
        for found in (0.4, 0.01):

            def conclude(now_s: float, serving: Serving, found: float = found) -> bool:
                scene.sharing.found = found
                return True

            scene.sharing.may_compute = conclude  # type: ignore[method-assign]
            work()
            assert scene.metric("serving_slowdown_ratio") == found, "a first conclusion changes no slice"


def test_what_is_learnt_stays_the_same(model_dir: Path, tmp_path: Path, traces: list[Trace]) -> None:
    def learn(config_changes: dict[str, object]) -> dict[str, torch.Tensor]:
        config = config_for(model_dir, tmp_path, **config_changes)
        learner = Learner(fresh_draft(model_dir, draft_vocab_size=40, seed=0), config)
        metrics = TrainerMetrics(CollectorRegistry())
        with yielding(config, metrics, torch.device("cpu"), threading.Event()):
            for _ in range(3):
                learner.step(batch_of(traces[:3], learner.draft))
        return learner.state()

    plain = learn({})
    shared = learn({"pulse_dir": tmp_path / "pulse"})
    assert plain.keys() == shared.keys()
    assert all(torch.equal(plain[name], shared[name]) for name in plain)


def test_the_whole_loop_stands_still_while_an_engine_computes(
    model_dir: Path,
    tmp_path: Path,
    traces: list[Trace],
    redis_url: str,
    redis_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.shadow.decide", promote)
    config = config_for(
        model_dir,
        tmp_path,
        redis_url=redis_url,
        pulse_dir=tmp_path / "pulse",
        max_passes=1e6,
        publish_interval_s=0.0,
        publish_min_tokens=200,
        checkpoint_interval_s=0.0,
    )
    engine, registry, stop = Pulse(tmp_path / "pulse"), CollectorRegistry(), threading.Event()
    trainer, store = Trainer(config, registry), DraftStore(config.store_dir)

    def metric(name: str, **labels: str) -> float:
        return registry.get_sample_value(f"slipstream_trainer_{name}", labels) or 0.0

    def train() -> None:
        with yielding(config, trainer.metrics, torch.device("cpu"), stop):
            train_until(stop, trainer)

    thread = threading.Thread(target=train)
    thread.start()
    stream = TraceStream(redis_client, "toy", max_bytes=10**8)
    for trace in traces:
        stream.append(encode_trace(trace), trace_id=trace.header.trace_id)
    try:
        wait_until(lambda: (store.latest() or 0) >= 3)
        # With a request in its queue it leaves no slice to anybody.
        engine.beat(num_waiting=1)
        wait_until(lambda: metric("threads") == 0)
        num_steps, waited_s = metric("steps_total", outcome="applied"), metric("yielded_seconds_total")
        wait_until(lambda: metric("yielded_seconds_total") > waited_s + 0.3)
        assert metric("steps_total", outcome="applied") == num_steps
        engine.rest()
        wait_until(lambda: metric("steps_total", outcome="applied") > num_steps)
        engine.beat(num_waiting=1)
        wait_until(lambda: metric("threads") == 0)
    finally:
        stop.set()
        thread.join(10)
    assert not thread.is_alive(), "a stop is not held up"
    engine.close()


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
    monkeypatch.setattr("trainer.yielding._CGROUPS", tmp_path / "none")
    own.write_text("/autogroup-1 nice 0\n")
    enabled.write_text("1\n")
    monkeypatch.setattr("trainer.yielding._AUTOGROUP", own)
    monkeypatch.setattr("trainer.yielding._AUTOGROUPS_ENABLED", enabled)
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
    monkeypatch.setattr("trainer.yielding._CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr("trainer.yielding._CGROUP_ROOT", tmp_path / "cgroups")
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


@pytest.mark.parametrize(
    ("num_ranks", "nice", "has_pulse", "num_calls"),
    [(1, 19, False, 1), (1, 5, False, 0), (1, 5, True, 1), (2, 19, False, 0), (2, 19, True, 0)],
)
def test_one_process_takes_the_lowest_class_where_it_is_to_give_way(
    tmp_path: Path,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_ranks: int,
    nice: int,
    has_pulse: bool,
    num_calls: int,
) -> None:
    """Of several one might not get on for minutes under SCHED_IDLE, and the others would give it up."""
    called: list[bool] = []
    trainer = SimpleNamespace(metrics=TrainerMetrics(CollectorRegistry()), learner=SimpleNamespace(num_steps=0))
    monkeypatch.setattr(run, "Trainer", lambda *_, **__: trainer)
    monkeypatch.setattr(run, "train_until", lambda *_: None)
    monkeypatch.setattr(run, "give_way_in_the_kernel", lambda: called.append(True))
    config = config_for(model_dir, tmp_path, nice=nice, pulse_dir=tmp_path if has_pulse else None)
    run._train(config, Ranks(0, num_ranks), torch.device("cpu"), threading.Event())
    assert len(called) == num_calls


class FirstPause(threading.Event):
    """A stop that comes with the first pause."""

    def wait(self, timeout: float | None = None) -> bool:
        self.set()
        return True


@pytest.mark.parametrize(("num_ranks", "pauses"), [(1, True), (2, False)])
def test_processes_that_train_together_do_not_pause(
    tmp_path: Path, model_dir: Path, num_ranks: int, pauses: bool
) -> None:
    config, engine = config_for(model_dir, tmp_path, pulse_dir=tmp_path), Pulse(tmp_path)
    # With a request in its queue it leaves no slice to anybody.
    engine.beat(num_waiting=1)
    stop, metrics = FirstPause(), TrainerMetrics(CollectorRegistry())
    with yielding(config, metrics, torch.device("cpu"), stop, num_ranks=num_ranks):
        nn.Identity()(torch.ones(3))
    engine.close()
    assert stop.is_set() is pauses

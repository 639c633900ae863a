"""The whole trainer: learning from a stream, publishing, and being killed at the worst moments."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
import torch
from prometheus_client import CollectorRegistry

from speculator.codec import encode_trace
from speculator.errors import ConfigError, DraftMismatchError, StoreError
from speculator.store import DraftStore
from speculator.stream import DraftPointer, TraceStream
from speculator.trace import Trace
from tests.trainer.examples import config_for
from tests.waiting import wait_until
from trainer.config import TrainerConfig, load_config
from trainer.guard import BAD_STEPS, GOOD_STEPS, all_finite
from trainer.loop import train_until
from trainer.pressure import LearningCurve
from trainer.service import Trainer

MakeTrainer = Callable[..., Trainer]


@pytest.fixture
def stream(redis_client: redis.Redis) -> TraceStream:
    return TraceStream(redis_client, "toy", max_bytes=10**8)


@pytest.fixture
def settings(model_dir: Path, tmp_path: Path, redis_url: str) -> Callable[..., TrainerConfig]:
    return lambda **changes: config_for(model_dir, tmp_path, redis_url=redis_url, **changes)


@pytest.fixture
def start(settings: Callable[..., TrainerConfig], stream: TraceStream) -> MakeTrainer:
    return lambda **changes: Trainer(settings(**changes), CollectorRegistry())


def send(stream: TraceStream, traces: list[Trace]) -> None:
    for trace in traces:
        stream.append(encode_trace(trace), trace_id=trace.header.trace_id)


def learn(trainer: Trainer, num_steps: int) -> None:
    trainer.read(block_ms=0)
    for _ in range(num_steps):
        trainer.step()


def waiting(trainer: Trainer) -> int:
    return trainer._replay.num_waiting


def members(trainer: Trainer) -> set[str]:
    return set(trainer._replay.members)


def metric(trainer: Trainer, name: str, **labels: str) -> float | None:
    return trainer.metrics._registry.get_sample_value(f"slipstream_trainer_{name}", labels)


def same_weights(first: Trainer, second: Trainer) -> bool:
    return all(torch.equal(a, second.learner.state()[name]) for name, a in first.learner.state().items())


def test_a_first_start_writes_the_version_that_engines_start_with(
    start: MakeTrainer, redis_client: redis.Redis, tmp_path: Path
) -> None:
    start().close()
    assert DraftStore(tmp_path / "store").versions() == [1]
    assert DraftPointer(redis_client, "toy").desired() is None
    again = start()
    assert DraftStore(tmp_path / "store").versions() == [1]
    again.close()


def test_killed_after_the_checkpoint_and_before_the_ack(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace]
) -> None:
    send(stream, traces[:3])
    trainer = start()
    learn(trainer, 3)
    trainer.checkpoint()
    trainer.close()

    resumed = start()
    assert same_weights(trainer, resumed)
    resumed.read(block_ms=0)
    assert waiting(resumed) == 0, "all three traces were used, by a step that is durable"
    assert members(resumed) == {"trace-0", "trace-1", "trace-2"}, "and are kept for more"
    resumed.ack()
    assert (stream.lag().acked, stream.lag().pending) == (3, 0)
    resumed.close()


def test_killed_before_the_checkpoint(start: MakeTrainer, stream: TraceStream, traces: list[Trace]) -> None:
    send(stream, traces[:2])
    first = start()
    learn(first, 2)
    first.checkpoint()
    first.ack()
    send(stream, traces[2:5])
    learn(first, 3)
    first.close()

    resumed = start()
    assert resumed.learner.num_steps == 2
    assert stream.lag().pending == 3
    learn(resumed, 3)
    resumed.checkpoint()
    resumed.ack()
    assert (stream.lag().acked, stream.lag().pending, stream.lag().undelivered) == (5, 0, 0)
    resumed.close()


def test_the_replay_is_filled_again_after_a_restart(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace]
) -> None:
    send(stream, traces[:4])
    first = start()
    learn(first, 4)
    first.checkpoint()
    first.ack()
    first.close()
    resumed = start()
    assert resumed.has_work
    resumed.step()
    assert resumed.learner.num_steps == 5
    resumed.close()


def test_it_sleeps_when_there_is_nothing_new(start: MakeTrainer, stream: TraceStream, traces: list[Trace]) -> None:
    trainer = start(max_passes=3.0)
    assert not trainer.has_work
    send(stream, traces[:2])
    trainer.read(block_ms=0)
    num_steps = 0
    while trainer.has_work:
        trainer.step()
        num_steps += 1
    # Two traces of 38 bases, 64 tokens a batch: the first steps take one trace, later ones both.
    assert 3 <= num_steps <= 6
    send(stream, traces[2:3])
    trainer.read(block_ms=0)
    assert trainer.has_work
    trainer.close()


def test_the_loop_learns_publishes_and_leaves_nothing_pending(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace], redis_client: redis.Redis, tmp_path: Path
) -> None:
    trainer = start(publish_interval_s=0.0, publish_min_tokens=200, checkpoint_interval_s=0.0, keep_versions=3)
    stop = threading.Event()
    thread = threading.Thread(target=train_until, args=(stop, trainer))
    thread.start()
    send(stream, traces)
    store = DraftStore(tmp_path / "store")
    wait_until(lambda: (store.latest() or 0) >= 5)
    wait_until(lambda: stream.lag().acked == len(traces))
    stop.set()
    thread.join(10)
    assert not thread.is_alive()
    assert stream.lag().pending == 0
    assert len(store.versions()) == 3
    latest = store.latest()
    assert latest is not None
    assert DraftPointer(redis_client, "toy").desired() == latest
    manifest = store.manifest(latest)
    assert (manifest.parent, manifest.info["num_traces"]) == (latest - 1, len(traces))
    assert set(store.load(latest)) >= {"fc.weight", "lm_head.weight", "d2t", "t2d"}


def test_the_memory_and_what_is_known_of_it_survive_a_restart(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace]
) -> None:
    labelled = [renamed(trace, trace.header.trace_id, domain="ab"[n % 2]) for n, trace in enumerate(traces)]
    send(stream, [*labelled, *(renamed(traces[0], f"again-{n}") for n in range(3))])
    small = {"max_passes": 2.0, "replay_max_bytes": 1 << 20, "replay_recent_share": 0.1}
    first = start(**small)
    learn(first, 8)
    first.read(block_ms=0)
    while first.has_work:
        first.step()
    for number in range(300):
        first.intake.watch("a", 20 + number % 5, 60)
    first.checkpoint()
    first.ack()
    first.close()
    send(stream, [renamed(traces[1], "late")])

    resumed = start(**small)
    assert resumed._replay.members == first._replay.members
    assert resumed._replay.num_bytes_by_domain() == first._replay.num_bytes_by_domain()
    assert set(resumed._replay.num_bytes_by_domain()) == {"a", "b"}
    assert resumed.intake.num_repeated == first.intake.num_repeated == 3
    assert resumed.intake.drift.states == first.intake.drift.states
    assert not resumed.has_work, "it has learnt from them often enough"
    resumed.read(block_ms=0)
    assert resumed.intake.num_repeated == 4
    assert resumed.has_work, "and a little more for the text that came again"
    resumed.step()
    assert not resumed.has_work
    resumed.close()


def test_the_memory_survives_a_restart_without_the_stream(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace], redis_client: redis.Redis, tmp_path: Path
) -> None:
    send(stream, traces)
    small = {"replay_max_bytes": 1 << 20, "replay_recent_share": 0.5}
    first = start(**small)
    learn(first, len(traces) + 2)
    first.checkpoint()
    first.ack()
    first.close()
    [folder] = (path for path in tmp_path.rglob("replay") if path.is_dir())
    assert len(list(folder.iterdir())) == len(members(first))
    (folder / "left-over.trace").write_bytes(b"of a process that was killed")

    redis_client.flushall()
    resumed = start(**small)
    assert resumed._replay.members == first._replay.members
    assert not (folder / "left-over.trace").exists()
    resumed.step()
    resumed.close()


def renamed(trace: Trace, trace_id: str, **header: str) -> Trace:
    return dataclasses.replace(trace, header=msgspec.structs.replace(trace.header, trace_id=trace_id, **header))


def test_an_idle_trainer_costs_nothing(start: MakeTrainer, stream: TraceStream, traces: list[Trace]) -> None:
    trainer = start(max_passes=1.0, checkpoint_interval_s=0.0)
    stop = threading.Event()
    thread = threading.Thread(target=train_until, args=(stop, trainer))
    thread.start()
    send(stream, traces[:2])
    wait_until(lambda: stream.lag().acked == 2)
    wait_until(lambda: metric(trainer, "pressure") == 0.0)
    num_steps, cpu_s = trainer.learner.num_steps, time.process_time()
    time.sleep(2.5)
    assert trainer.learner.num_steps == num_steps
    assert time.process_time() - cpu_s < 0.1
    send(stream, traces[2:3])
    wait_until(lambda: trainer.learner.num_steps > num_steps)
    stop.set()
    thread.join(10)
    assert stream.lag().acked == 3


def test_flat_learning_ends_the_passes_and_an_alarm_brings_them_back(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace]
) -> None:
    trainer = start()
    send(stream, traces[:4])
    learn(trainer, 1)
    trainer._curve = LearningCurve([(1.5, 2.0)] * 16)
    assert trainer.pressure == 0.0
    assert trainer.has_work, "new traces still get their first step"
    for _ in range(3):
        trainer.step()
    assert waiting(trainer) == 0
    assert not trainer.has_work
    for accepted in [30] * 400 + [15] * 128:
        trainer.intake.watch("math", accepted, 60)
    trainer.read(block_ms=0)
    assert trainer.has_work
    assert metric(trainer, "pressure") == 1.0
    for name in ("math", "all"):
        assert metric(trainer, "drift_alarm", domain=name) == 1.0
        assert metric(trainer, "drift_alarms_total", domain=name) == 1.0
    assert metric(trainer, "acceptance", domain="math", window="long") == pytest.approx(0.5)
    trainer.close()


def test_a_repeated_text_takes_one_place_and_holds_nothing_up(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace]
) -> None:
    send(stream, traces[:1])
    for number in range(400):
        send(stream, [renamed(traces[1], f"poison-{number}", tenant="poisoner")])
    send(stream, traces[2:4])
    trainer = start(max_passes=1.0)
    while waiting(trainer) or stream.lag().undelivered:
        learn(trainer, waiting(trainer))
    assert members(trainer) == {"trace-0", "poison-399", "trace-2", "trace-3"}
    assert metric(trainer, "replay_admissions_total", outcome="repeated") == 399
    assert trainer.learner.num_steps < 20
    trainer.checkpoint()
    trainer.ack()
    assert (stream.lag().acked, stream.lag().pending, stream.lag().dead_lettered) == (403, 0, 0)
    trainer.close()


def spoil(trainer: Trainer) -> None:
    """What no check on the way in finds: the newest trace gives a loss that is not a number."""
    trainer._replay._waiting[-1].stored.example.aux.fill_(float("nan"))


def test_a_trace_that_spoils_a_step_is_thrown_out_alone(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace]
) -> None:
    trainer = start(publish_interval_s=0.0, publish_min_tokens=1, batch_tokens=200)
    send(stream, traces[:3])
    learn(trainer, 3)
    assert trainer.publish_due
    send(stream, [renamed(traces[4], "bad")])
    trainer.read(block_ms=0)
    spoil(trainer)
    trainer.step()
    assert members(trainer) == {"trace-0", "trace-1", "trace-2"}
    assert not trainer.publish_due
    assert metric(trainer, "healthy") == 0.0
    assert metric(trainer, "steps_total", outcome="skipped") == 1.0
    send(stream, [renamed(traces[4], "bad-too")])
    learn(trainer, GOOD_STEPS)
    assert metric(trainer, "replay_admissions_total", outcome="refused") == 1.0
    assert metric(trainer, "healthy") == 1.0
    assert trainer.publish_due
    assert metric(trainer, "restored_total") == 0.0
    trainer.checkpoint()
    trainer.ack()
    assert stream.lag().acked == 5
    trainer.close()


@pytest.mark.parametrize("checkpointed", [True, False])
def test_broken_weights_are_taken_back_and_cost_no_trace(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace], checkpointed: bool
) -> None:
    trainer = start(publish_interval_s=0.0, publish_min_tokens=1)
    send(stream, traces[:4])
    learn(trainer, 4)
    if checkpointed:
        trainer.checkpoint()
    good = {name: tensor.clone() for name, tensor in trainer.learner.state().items()}
    trainer.learner.draft.fc.weight.data[0, 0] = float("nan")
    trainer.step()
    assert metric(trainer, "restored_total") == 1.0
    assert len(members(trainer)) == 4
    assert not trainer.publish_due
    if checkpointed:
        assert all(torch.equal(good[name], tensor) for name, tensor in trainer.learner.state().items())
    for _ in range(GOOD_STEPS):
        trainer.step()
    assert trainer.publish_due
    trainer.publish()
    assert metric(trainer, "published_version") == 2.0
    trainer.close()


def test_weights_that_only_overflow_are_taken_back_after_a_few_steps(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace]
) -> None:
    trainer = start()
    send(stream, traces[:4])
    learn(trainer, 4)
    trainer.checkpoint()
    trainer.learner.draft.fc.weight.data.fill_(3e38)
    for _ in range(BAD_STEPS):
        trainer.step()
    assert metric(trainer, "restored_total") == 1.0
    assert len(members(trainer)) == 4
    assert trainer.learner.num_steps > 4
    trainer.close()


def test_traces_that_no_weights_can_learn_from_are_thrown_out_in_the_end(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace]
) -> None:
    trainer = start(batch_tokens=1)
    send(stream, traces[:1])
    trainer.read(block_ms=0)
    spoil(trainer)
    for _ in range(BAD_STEPS):
        trainer.step()
    assert metric(trainer, "restored_total") == 1.0
    trainer.step()
    assert members(trainer) == set()
    assert metric(trainer, "restored_total") == 1.0
    assert not trainer.has_work
    send(stream, traces[1:2])
    learn(trainer, GOOD_STEPS)
    assert metric(trainer, "healthy") == 1.0
    trainer.close()


def test_a_flood_from_one_tenant_is_counted_and_read_to_the_end(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace]
) -> None:
    others = [renamed(trace, f"other-{n}", tenant="other") for n, trace in enumerate(traces[:2])]
    flood = [different(traces[2], n) for n in range(40)]
    send(stream, [*others, *flood])
    trainer = start(max_waiting_traces=4, max_tenant_share=0.5, batch_tokens=80)
    while waiting(trainer) or stream.lag().undelivered:
        learn(trainer, 1)
    assert trainer.learner.num_steps < 40
    passed_over = metric(trainer, "replay_admissions_total", outcome="passed_over")
    assert passed_over is not None
    assert 10 < passed_over < 40
    trainer.checkpoint()
    trainer.ack()
    assert stream.lag().acked == 42
    trainer.close()


def different(trace: Trace, number: int) -> Trace:
    """The same answer to another prompt."""
    token_ids = trace.token_ids.copy()
    token_ids[0] = number
    return dataclasses.replace(renamed(trace, f"flood-{number}", tenant="flood"), token_ids=token_ids)


def test_a_checkpoint_never_holds_broken_weights(start: MakeTrainer, stream: TraceStream, traces: list[Trace]) -> None:
    trainer = start()
    send(stream, traces[:2])
    learn(trainer, 2)
    trainer.checkpoint()
    trainer.learner.averaged.fc.weight.data[0, 0] = float("inf")
    trainer.checkpoint()
    trainer.close()
    resumed = start()
    assert all_finite(resumed.learner.state())
    assert resumed.learner.num_steps == 2
    resumed.close()


def test_a_draft_that_is_not_finite_is_not_published(start: MakeTrainer, tmp_path: Path) -> None:
    trainer = start()
    trainer.learner.averaged.fc.weight.data[0, 0] = float("inf")
    trainer.publish()
    assert DraftStore(tmp_path / "store").versions() == [1]
    trainer.close()


def test_a_checkpoint_of_another_lineage_is_refused(start: MakeTrainer, tmp_path: Path) -> None:
    trainer = start()
    trainer.checkpoint()
    trainer.close()
    with pytest.raises(DraftMismatchError, match="STATE_DIR"):
        start(store_dir=tmp_path / "other", draft_vocab_size=20)


def test_a_damaged_checkpoint_is_refused(start: MakeTrainer, tmp_path: Path) -> None:
    trainer = start()
    trainer.checkpoint()
    trainer.close()
    path = tmp_path / "state" / "trainer.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(StoreError, match="remove it"):
        start()


def test_a_checkpoint_that_cannot_be_written_stops_the_trainer(start: MakeTrainer, tmp_path: Path) -> None:
    trainer = start()
    (tmp_path / "state").write_text("in the way")
    with pytest.raises(StoreError, match="free some space"):
        trainer.checkpoint()
    trainer.close()


def test_a_wrong_setting_names_its_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLIPSTREAM_TRAINER_TTT_STEPS", "0")
    with pytest.raises(ConfigError, match="SLIPSTREAM_TRAINER_TTT_STEPS"):
        load_config(model_dir=tmp_path, redis_url="x", model_key="x", store_dir=tmp_path, state_dir=tmp_path)
    monkeypatch.delenv("SLIPSTREAM_TRAINER_TTT_STEPS")
    with pytest.raises(ConfigError, match="SLIPSTREAM_TRAINER_MODEL_KEY"):
        load_config(model_dir=tmp_path, redis_url="x", store_dir=tmp_path, state_dir=tmp_path)


def spawn(config: TrainerConfig) -> subprocess.Popen[bytes]:
    values: dict[str, Any] = config.model_dump(mode="json", exclude_none=True)
    environment = {f"SLIPSTREAM_TRAINER_{name.upper()}": str(value) for name, value in values.items()}
    environment |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    code = "from trainer.config import load_config; from trainer.run import run_trainer; run_trainer(load_config())"
    return subprocess.Popen([sys.executable, "-W", "error", "-c", code], env=os.environ | environment)


def test_a_process_survives_sigkill_and_obeys_sigterm(
    settings: Callable[..., TrainerConfig], stream: TraceStream, traces: list[Trace], start: MakeTrainer
) -> None:
    config = settings(checkpoint_interval_s=0.2, max_passes=1000.0)
    send(stream, traces[:4])
    with spawn(config) as process:
        wait_until(lambda: stream.lag().acked >= 1, timeout_s=60)
        send(stream, traces[4:6])
        process.kill()
    acked = stream.lag().acked
    with spawn(config) as process:
        wait_until(lambda: stream.lag().acked == 6, timeout_s=60)
        send(stream, traces[6:])
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert acked <= 6
    assert stream.lag().dead_lettered == 0
    resumed = start()
    assert resumed.learner.num_steps > 0
    resumed.close()

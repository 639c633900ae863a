"""The whole trainer: learning from a stream, publishing, and being killed at the worst moments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from trainer.loop import train_until
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
    assert not resumed.has_work, "all three traces were used, by a step that is durable"
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

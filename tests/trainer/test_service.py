"""The whole trainer: learning from a stream, sleeping, remembering, and being killed at the worst moments."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from speculator.errors import ConfigError
from speculator.redis.control_plane import DraftPointer
from speculator.redis.trace_stream import TraceStream
from speculator.trace import Trace
from speculator.versions.store import DraftStore
from tests.fixtures.traces import send, with_header
from tests.fixtures.waiting import PATIENCE_S, wait_until
from tests.trainer.answers import PROMPT_TOKENS, by_text, different, renamed
from tests.trainer.examples import metric, promote
from tests.trainer.learning.test_batch import with_trees
from tests.trainer.trainers import MakeTrainer, learn, members, same_weights, waiting
from trainer.checkpoint import Progress, load_checkpoint, save_checkpoint
from trainer.config import MOST_KNOWN_TRACES, TrainerConfig, load_config
from trainer.drift import LearningCurve
from trainer.learning.batch import Batch
from trainer.learning.optimizer_step import StepReport
from trainer.loop import train_until
from trainer.process import lock_state


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


def test_what_was_in_hand_when_it_was_killed_is_counted_once(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace]
) -> None:
    send(stream, traces[:5])
    first = start()
    first.read(block_ms=0)
    first.step()
    assert (first.admission.num_traces, waiting(first)) == (5, 4)
    first.checkpoint()
    first.ack()
    first.close()

    resumed = start()
    assert resumed.admission.num_traces == 1
    learn(resumed, 4)
    assert resumed.admission.num_traces == 5
    assert resumed.admission.new_tokens == first.admission.new_tokens
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
    num_steps = 0
    while trainer.has_work:
        trainer.step()
        num_steps += 1
    assert 4 <= num_steps <= 6, "as many passes over all three"
    trainer.close()


def test_a_trace_that_needs_no_step_is_settled_by_a_checkpoint_of_its_own(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace]
) -> None:
    trainer = start(golden_traces=4, max_tenant_share=1.0, holdout_share=1e-3, checkpoint_interval_s=0.0)
    assert not trainer.checkpoint_due
    send(stream, traces[:1])
    trainer.read(block_ms=0)
    assert not trainer.has_work
    assert trainer.checkpoint_due
    trainer.checkpoint()
    trainer.ack()
    assert (stream.lag().acked, stream.lag().pending) == (1, 0)
    assert not trainer.checkpoint_due
    trainer.close()


def test_the_loop_learns_publishes_and_leaves_nothing_pending(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace], redis_client: redis.Redis, tmp_path: Path
) -> None:
    trainer = start(
        decide=promote, publish_interval_s=0.0, publish_min_tokens=200, checkpoint_interval_s=0.0, keep_versions=3
    )
    pointer = DraftPointer(redis_client, "toy")
    pointer.pin(2)
    stop = threading.Event()
    thread = threading.Thread(target=train_until, args=(stop, trainer))
    thread.start()
    send(stream, traces)
    store = DraftStore(tmp_path / "store")
    wait_until(lambda: (store.latest() or 0) >= 6)
    wait_until(lambda: stream.lag().acked == len(traces))
    stop.set()
    thread.join(10)
    assert not thread.is_alive()
    assert stream.lag().pending == 0
    latest = store.latest()
    assert latest is not None
    assert store.versions() == [1, 2, latest - 2, latest - 1, latest], "the last good one and the pinned one stay"
    assert pointer.published() == latest
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
        first.admission.observe_acceptance("a", 20 + number % 5, 60)
    first.replay.prioritise(first.replay.draw(1).batch[0], 1.5)
    first.training.curve.mark()
    first.checkpoint()
    first.ack()
    first.close()
    send(stream, [renamed(traces[1], "late")])

    resumed = start(**small)
    assert resumed.replay.members == first.replay.members
    assert resumed.replay.num_bytes_by_domain() == first.replay.num_bytes_by_domain()
    assert set(resumed.replay.num_bytes_by_domain()) == {"a", "b"}
    assert resumed.admission.num_repeated == first.admission.num_repeated == 3
    assert resumed.admission.drift.series == first.admission.drift.series
    assert resumed.training.curve.points == first.training.curve.points
    assert not resumed.has_work, "it has learnt from them often enough"
    resumed.read(block_ms=0)
    assert resumed.admission.num_repeated == 4
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
    assert resumed.replay.members == first.replay.members
    assert not (folder / "left-over.trace").exists()
    resumed.step()
    resumed.close()


def test_a_trace_that_waits_while_a_checkpoint_is_written_survives_without_the_stream(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace], redis_client: redis.Redis
) -> None:
    send(stream, traces[:2])
    first = start()
    first.read(block_ms=0)
    for num_waiting in (1, 0):
        first.step()
        assert waiting(first) == num_waiting
        first.checkpoint()
        first.ack()
    first.close()
    redis_client.flushall()
    resumed = start()
    assert members(resumed) == {"trace-0", "trace-1"}
    resumed.close()


def test_a_trace_beyond_the_drafts_window_is_set_aside(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace]
) -> None:
    trainer = start()
    window = trainer.learner.draft.config.max_position_embeddings
    for name, end in (("fits", window), ("too-long", window + 1)):
        first = end - len(traces[0].token_ids)
        positions = {"first_position": first, "num_prompt_tokens": first + PROMPT_TOKENS}
        send(stream, [with_header(traces[0], trace_id=name, **positions)])
    trainer.read(block_ms=0)
    assert trainer.replay.waiting_trace_ids == ["fits"]
    assert stream.lag().dead_lettered == 1
    trainer.close()


def test_verdicts_on_a_version_of_long_ago_are_not_learnt_from(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = start(max_draft_lag=3)
    send(stream, [with_trees(traces[0], seed=1)])
    trainer.read(block_ms=0)
    batches = list[Batch]()

    def step(batch: Batch) -> StepReport:
        batches.append(batch)
        return StepReport()

    monkeypatch.setattr(trainer.learner, "step", step)
    for version in (1, 4, 7):
        trainer.training.version = version
        trainer.step()
    trainer.close()
    fresh, at_the_limit, stale = (len(batch.verdicts) for batch in batches)
    assert fresh == at_the_limit > 0
    assert stale == 0


def test_an_idle_trainer_costs_nothing(start: MakeTrainer, stream: TraceStream, traces: list[Trace]) -> None:
    trainer = start(max_passes=1.0, checkpoint_interval_s=0.0)
    stop = threading.Event()
    thread = threading.Thread(target=train_until, args=(stop, trainer))
    thread.start()
    send(stream, traces[:2])
    wait_until(lambda: stream.lag().acked == 2)
    wait_until(lambda: metric(trainer, "pressure_ratio") == 0.0)
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
    trainer.training.curve = LearningCurve([(1.5, 2.0)] * 16)
    assert trainer.pressure == 0.0
    assert trainer.has_work, "new traces still get their first step"
    for _ in range(3):
        trainer.step()
    assert waiting(trainer) == 0
    assert not trainer.has_work
    for accepted in [30] * 400 + [15] * 128:
        trainer.admission.observe_acceptance("math", accepted, 60)
    trainer.read(block_ms=0)
    assert trainer.has_work
    assert metric(trainer, "pressure_ratio") == 1.0
    for name in ("math", "all"):
        assert metric(trainer, "drift_alarm", domain=name) == 1.0
        assert metric(trainer, "drift_alarms_total", domain=name) == 1.0
    assert metric(trainer, "acceptance_ratio", domain="math", window="long") == pytest.approx(0.5)
    trainer.close()


def test_the_alarm_hears_of_the_draft_in_training_and_not_of_what_was_proposed_in_service(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace]
) -> None:
    """Earlier text wrote one answer, nobody proposed anything in the others: a fresh draft would do badly in all."""
    trainer = start()
    send(stream, [by_text(traces[0]), *traces[1:4]])
    learn(trainer, 4)
    for name in ("default", "all"):
        recent = trainer.admission.drift.series[name].recent
        assert len(recent) == 4
        assert max(recent) < 0.5
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


def test_a_wrong_setting_names_its_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLIPSTREAM_TRAINER_TTT_STEPS", "0")
    with pytest.raises(ConfigError, match="SLIPSTREAM_TRAINER_TTT_STEPS"):
        load_config(model_dir=tmp_path, redis_url="x", model_key="x", store_dir=tmp_path, state_dir=tmp_path)
    monkeypatch.delenv("SLIPSTREAM_TRAINER_TTT_STEPS")
    with pytest.raises(ConfigError, match="SLIPSTREAM_TRAINER_MODEL_KEY"):
        load_config(model_dir=tmp_path, redis_url="x", store_dir=tmp_path, state_dir=tmp_path)


@pytest.mark.parametrize("name", ["max_passes", "trace_ttl_hours", "publish_interval_s"])
def test_a_setting_that_is_not_finite_is_refused(tmp_path: Path, name: str) -> None:
    folders: dict[str, Any] = {"model_dir": tmp_path, "store_dir": tmp_path, "state_dir": tmp_path}
    for value in ("inf", "nan"):
        with pytest.raises(ConfigError, match=f"SLIPSTREAM_TRAINER_{name.upper()}"):
            load_config(redis_url="x", model_key="x", **{name: value}, **folders)


def test_no_more_trace_ids_are_remembered_than_a_checkpoint_holds(tmp_path: Path) -> None:
    folders: dict[str, Any] = {"model_dir": tmp_path, "store_dir": tmp_path, "state_dir": tmp_path}
    with pytest.raises(ConfigError, match="SLIPSTREAM_TRAINER_MAX_KNOWN_TRACES"):
        load_config(redis_url="x", model_key="x", max_known_traces=3_000_000, **folders)
    most = load_config(redis_url="x", model_key="x", max_known_traces=MOST_KNOWN_TRACES, **folders).max_known_traces
    progress = Progress(
        target_fingerprint="f", learnt_tokens=0, new_tokens=0, num_traces=0,
        used_trace_ids=[f"{number:032x}" for number in range(most)],
    )  # fmt: skip
    save_checkpoint(tmp_path, {}, progress)
    assert load_checkpoint(tmp_path) == ({}, progress)


@contextlib.contextmanager
def spawn(config: TrainerConfig) -> Iterator[subprocess.Popen[bytes]]:
    """A trainer as a process; killed where the test leaves it running, or it would take other tests' traces."""
    values: dict[str, Any] = config.model_dump(mode="json", exclude_none=True)
    environment = {f"SLIPSTREAM_TRAINER_{name.upper()}": str(value) for name, value in values.items()}
    environment |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    code = "from trainer.config import load_config; from trainer.process import run_trainer; run_trainer(load_config())"
    with subprocess.Popen([sys.executable, "-W", "error", "-c", code], env=os.environ | environment) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_state_belongs_to_one_trainer(tmp_path: Path) -> None:
    """Two would overwrite each other's checkpoint: two `serve --learn` of a model have one folder by default."""
    held = lock_state(tmp_path / "state")
    with pytest.raises(ConfigError, match="another trainer uses"):
        lock_state(tmp_path / "state")
    os.close(held)
    os.close(lock_state(tmp_path / "state"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write to"):
        lock_state(tmp_path / "file" / "state")


def test_a_process_survives_sigkill_and_obeys_sigterm(
    settings: Callable[..., TrainerConfig], stream: TraceStream, traces: list[Trace], start: MakeTrainer
) -> None:
    config = settings(checkpoint_interval_s=0.2, max_passes=1000.0)
    send(stream, traces[:4])
    with spawn(config) as process:
        wait_until(lambda: stream.lag().acked >= 1)
        send(stream, traces[4:6])
        process.kill()
    acked = stream.lag().acked
    with spawn(config) as process:
        wait_until(lambda: stream.lag().acked == 6)
        with spawn(config) as second:
            assert second.wait(PATIENCE_S) != 0, "the first has the state"
        send(stream, traces[6:])
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    assert acked <= 6
    assert stream.lag().dead_lettered == 0
    resumed = start()
    assert resumed.learner.num_steps > 0
    resumed.close()

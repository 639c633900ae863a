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

import numpy as np
import pytest
import redis
import torch
from prometheus_client import CollectorRegistry

from speculator.errors import ConfigError, DraftMismatchError, StoreError, StreamError
from speculator.lifecycle import State
from speculator.pointer import DraftPointer
from speculator.store import DraftStore
from speculator.stream import TraceStream
from speculator.trace import Trace, VerifyRounds
from tests.traces import send
from tests.trainer.answers import answer_traces, renamed
from tests.trainer.examples import config_for, metric, promote, record
from tests.waiting import wait_until
from trainer.checkpoint import load_checkpoint
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


@pytest.fixture
def open_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.shadow.decide", promote)


def learn(trainer: Trainer, num_steps: int) -> None:
    trainer.read(block_ms=0)
    for _ in range(num_steps):
        trainer.step()


def waiting(trainer: Trainer) -> int:
    return trainer._replay.num_waiting


def members(trainer: Trainer) -> set[str]:
    return set(trainer._replay.members)


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


def test_what_was_in_hand_when_it_was_killed_is_counted_once(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace]
) -> None:
    send(stream, traces[:5])
    first = start()
    first.read(block_ms=0)
    first.step()
    assert (first.intake.num_traces, waiting(first)) == (5, 4)
    first.checkpoint()
    first.ack()
    first.close()

    resumed = start()
    assert resumed.intake.num_traces == 1
    learn(resumed, 4)
    assert resumed.intake.num_traces == 5
    assert resumed.intake.new_tokens == first.intake.new_tokens
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


@pytest.mark.usefixtures("open_gate")
def test_the_loop_learns_publishes_and_leaves_nothing_pending(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace], redis_client: redis.Redis, tmp_path: Path
) -> None:
    trainer = start(publish_interval_s=0.0, publish_min_tokens=200, checkpoint_interval_s=0.0, keep_versions=3)
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
    trainer._training.curve = LearningCurve([(1.5, 2.0)] * 16)
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
    assert metric(trainer, "pressure_ratio") == 1.0
    for name in ("math", "all"):
        assert metric(trainer, "drift_alarm", domain=name) == 1.0
        assert metric(trainer, "drift_alarms_total", domain=name) == 1.0
    assert metric(trainer, "acceptance_ratio", domain="math", window="long") == pytest.approx(0.5)
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


@pytest.mark.usefixtures("open_gate")
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


@pytest.mark.usefixtures("open_gate")
def test_killed_right_after_publishing_it_knows_what_it_published(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace], tmp_path: Path
) -> None:
    killed = start(publish_interval_s=0.0, publish_min_tokens=1)
    send(stream, traces[:4])
    learn(killed, 4)
    killed.publish()
    assert metric(killed, "published_version") == 2.0
    killed.close()
    states = DraftStore(tmp_path / "store").lifecycle
    for state in (State.LIVE, State.ROLLED_BACK, State.QUARANTINED):
        states.move(2, state, actor="engine:0")
    resumed = start()
    assert metric(resumed, "started_over_total") == 1.0, "its weights are those that were rolled back"
    assert metric(resumed, "published_version") == 1.0
    resumed.close()


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


def test_every_decision_of_the_gate_is_on_record(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace], fresh: list[Trace], redis_client: redis.Redis,
    tmp_path: Path,
) -> None:  # fmt: skip
    store = DraftStore(tmp_path / "store")
    trainer = start(golden=record(tmp_path / "golden.rec", fresh), golden_traces=24)
    send(stream, traces)
    learn(trainer, 20)
    trainer.publish()
    gate = store.manifest(2).info["gate"]
    assert (gate["outcome"], gate["incumbent"], gate["fresh"]["num_traces"]) == ("promote", 1, 24)
    assert gate["fresh"]["lower"] > 0
    assert gate["golden"] == gate["fresh"], "the same traces, while the pool is young"
    numbers = store.lifecycle.history(2)[-1].numbers
    assert numbers["change"] == gate["fresh"]["change"]
    assert [(event.kind, event.fields["version"]) for event in store.lifecycle.events.tail(9)][-1] == ("gate", 2)
    assert metric(trainer, "gate_decisions_total", outcome="promote") == 1.0
    assert metric(trainer, "gate_change_ratio", set="held_out", bound="lower") == gate["fresh"]["lower"]
    assert (metric(trainer, "gate_seconds") or 0) > 0

    trainer.publish()  # the same weights: no worse and no better
    assert store.latest() == 2
    event = store.lifecycle.events.tail(1)[0]
    assert (event.kind, event.fields["outcome"], event.fields["change"]) == ("gate", "hold", 0.0)
    assert event.fields["incumbent"] == 2

    with torch.no_grad():
        trainer.learner.averaged.fc.weight.neg_()
    trainer.publish()
    event = store.lifecycle.events.tail(1)[0]
    assert event.fields["outcome"] == "refuse"
    assert event.fields["upper"] < 0
    assert (store.latest(), DraftPointer(redis_client, "toy").published()) == (2, 2)
    assert metric(trainer, "published_version") == 2.0
    trainer.close()


@pytest.fixture(scope="module")
def fresh(model_dir: Path) -> list[Trace]:
    """Answers to other prompts than those of `traces`."""
    return answer_traces(model_dir, num_traces=24, seed=5)


def test_a_candidate_that_was_judged_waits_for_something_new(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace]
) -> None:
    trainer = start(publish_interval_s=0.0, publish_min_tokens=1)
    send(stream, traces[:2])
    learn(trainer, 2)
    assert trainer.publish_due
    trainer.publish()
    assert metric(trainer, "gate_decisions_total", outcome="hold") == 1.0, "there is no evidence"
    assert not trainer.publish_due
    trainer.step()
    assert trainer.publish_due
    trainer.close()


def test_an_incumbent_that_cannot_be_loaded_is_a_failure_and_no_promotion(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace], fresh: list[Trace], tmp_path: Path
) -> None:
    trainer = start(golden=record(tmp_path / "golden.rec", fresh), golden_traces=24)
    send(stream, traces[:2])
    learn(trainer, 2)
    weights = tmp_path / "store" / "versions" / "000001" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    trainer.publish()
    assert DraftStore(tmp_path / "store").versions() == [1]
    assert metric(trainer, "publish_errors_total") == 1.0
    trainer.close()


def kept(trainer: Trainer) -> tuple[list[str], list[str]]:
    return trainer.intake.held_out.trace_ids, trainer.intake.golden.trace_ids


def test_what_was_preferred_teaches_and_judges_nothing(
    start: MakeTrainer, stream: TraceStream, fresh: list[Trace]
) -> None:
    trainer = start(holdout_share=0.5, holdout_traces=8, golden_traces=4, max_waiting_traces=24)
    send(stream, [renamed(refused(trace), f"p-{number}", preferred=True) for number, trace in enumerate(fresh)])
    trainer.read(block_ms=0)
    assert (kept(trainer), waiting(trainer), trainer.intake.drift.states) == (([], []), 24, {})
    send(stream, [renamed(refused(different(fresh[0], 1)), "drawn")])
    trainer.step()
    trainer.read(block_ms=0)
    assert kept(trainer)[1] == ["drawn"]
    assert set(trainer.intake.drift.states) == {"all", "default"}
    trainer.close()


def refused(trace: Trace) -> Trace:
    """With one verification, in which the target refused the proposal."""
    rounds = VerifyRounds(
        position=np.array([trace.header.num_prompt_tokens], np.int32),
        draft_tokens=np.array([[1]], np.int32),
        draft_logprobs=np.array([[-1.0]], np.float16),
        draft_parents=np.array([[-1]], np.int8),
        num_accepted=np.array([0], np.int8),
        draft_version=np.array([1], np.int32),
    )
    return dataclasses.replace(trace, rounds=rounds)


def test_held_out_and_golden_traces_are_settled_and_survive_a_restart(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace], fresh: list[Trace], redis_client: redis.Redis
) -> None:
    apart = {"holdout_share": 0.5, "holdout_traces": 4, "golden_traces": 4, "max_tenant_share": 1.0}
    sent = [renamed(trace, f"fresh-{number}") for number, trace in enumerate(fresh)]
    first = start(**apart)
    send(stream, sent)
    while stream.lag().undelivered or waiting(first):
        first.read(block_ms=0)
        if waiting(first):
            first.step()
    held_out, golden = kept(first)
    assert golden == ["fresh-0", "fresh-1"], "the first ones, and room for another domain"
    assert len(held_out) == 4
    assert members(first) == {trace.header.trace_id for trace in sent} - {*held_out, *golden}
    assert first.intake.num_traces == 24
    assert [metric(first, "held_out_traces", set=name) for name in ("held_out", "golden")] == [4, 2]
    send(stream, [renamed(sent[0], "golden-again"), renamed(fresh[int(held_out[0][6:])], "held-out-again")])
    first.read(block_ms=0)
    assert metric(first, "replay_admissions_total", outcome="repeated") == 2.0
    first.checkpoint()
    first.ack()
    assert (stream.lag().acked, stream.lag().pending) == (26, 0), "nothing is owed to Redis"
    first.close()

    redis_client.flushall()
    resumed = start(**apart)
    assert kept(resumed) == (held_out, golden)
    assert members(resumed) == members(first)
    send(stream, [renamed(sent[1], "golden-after-a-restart"), *(different(sent[2], number) for number in range(20))])
    for _ in range(20):
        resumed.read(block_ms=0)
        if waiting(resumed):
            resumed.step()
    assert set(held_out) <= members(resumed), "each is learnt from in the end"
    assert kept(resumed)[1] == golden
    resumed.close()


def test_a_trace_that_left_the_pool_and_waits_is_not_lost_by_a_restart(
    start: MakeTrainer, stream: TraceStream, fresh: list[Trace]
) -> None:
    apart = {"holdout_share": 0.5, "holdout_traces": 4}
    first = start(**apart)
    send(stream, [renamed(trace, f"fresh-{number}") for number, trace in enumerate(fresh)])
    first.read(block_ms=0)
    released = set(first._replay.waiting_trace_ids) - set(first._source.trace_ids_in_hand)
    assert released
    first.checkpoint()
    first.ack()
    first.close()

    resumed = start(**apart)
    assert released <= set(kept(resumed)[0])
    resumed.read(block_ms=0)
    assert released <= set(resumed._replay.waiting_trace_ids)
    resumed.close()


def test_an_operators_golden_traces_free_those_of_traffic(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace], fresh: list[Trace], tmp_path: Path
) -> None:
    first = start(golden_traces=4, max_tenant_share=1.0, holdout_share=1e-3)
    send(stream, traces)
    learn(first, 8)
    assert kept(first)[1] == ["trace-0", "trace-1"]
    first.checkpoint()
    first.ack()
    first.close()
    resumed = start(golden_traces=4, golden=record(tmp_path / "golden.rec", fresh))
    assert len(kept(resumed)[1]) == 4
    assert kept(resumed)[0] == ["trace-0", "trace-1"], "to be learnt from when they are pushed out"
    resumed.checkpoint()
    resumed.close()
    saved = load_checkpoint(tmp_path / "state")
    assert saved is not None
    assert (saved[1].held_out, saved[1].golden) == (["trace-0", "trace-1"], [])


def roll_back(store: DraftStore, version: int) -> None:
    store.lifecycle.move(version, State.LIVE, actor="engine:0")
    store.lifecycle.move(version, State.ROLLED_BACK, actor="engine:0")
    store.lifecycle.move(version, State.QUARANTINED, actor="engine:0")


@pytest.mark.usefixtures("open_gate")
def test_a_version_that_was_never_admitted_stays_out(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace], tmp_path: Path
) -> None:
    start().close()
    store = DraftStore(tmp_path / "store")
    fingerprint = traces[0].header.target_fingerprint
    store.write(store.load(1), store.config(1), parent=1, target_fingerprint=fingerprint, info={})  # and a crash
    trainer = start()
    send(stream, traces[:2])
    learn(trainer, 2)
    trainer.publish()
    assert (store.manifest(3).parent, store.manifest(3).info["gate"]["incumbent"]) == (1, 1)
    assert store.lifecycle.state(2) is State.WRITTEN
    trainer.close()


@pytest.mark.usefixtures("open_gate")
def test_a_rollback_takes_the_trainer_back_to_the_last_good_weights(
    settings: Callable[..., TrainerConfig], stream: TraceStream, traces: list[Trace], tmp_path: Path
) -> None:
    store, now_s = DraftStore(tmp_path / "store"), [time.time()]
    config = settings(publish_interval_s=0.0, publish_min_tokens=1)

    def begin() -> Trainer:
        return Trainer(config, CollectorRegistry(), clock=lambda: now_s[0])

    trainer = begin()
    original = {name: weight.clone() for name, weight in trainer.learner.draft.named_parameters()}

    def is_original(trainer: Trainer) -> bool:
        return all(torch.equal(weight, original[name]) for name, weight in trainer.learner.draft.named_parameters())

    def publish() -> None:
        trainer.step()
        trainer.heed_rollbacks()
        assert trainer.publish_due
        trainer.publish()

    send(stream, traces)
    trainer.read(block_ms=0)
    publish()
    trainer.checkpoint()
    roll_back(store, 2)
    now_s[0] += 10
    trainer.heed_rollbacks()
    assert is_original(trainer)
    assert (trainer.learner.num_steps, len(members(trainer))) == (0, 1)
    assert not trainer.publish_due, "it has learnt nothing since"
    assert metric(trainer, "started_over_total") == 1.0
    assert metric(trainer, "published_version") == 1.0
    saved = load_checkpoint(tmp_path / "state")
    assert saved is not None
    assert (saved[1].version, int(saved[0]["num_steps"])) == (1, 0), "also on disk"

    publish()
    assert store.manifest(3).parent == 1
    trainer.checkpoint()
    roll_back(store, 3)
    trainer.close()
    trainer = begin()  # it was away while that happened
    assert is_original(trainer)
    trainer.step()
    trainer.heed_rollbacks()
    assert not trainer.publish_due, "two in a row"
    assert metric(trainer, "publishing_paused") == 1.0
    now_s[0] += config.publish_pause_s + 1
    publish()
    assert store.latest() == 4
    trainer.step()
    trainer.heed_rollbacks()
    assert not trainer.publish_due, "version 4 is on trial"
    store.lifecycle.move(4, State.LIVE, actor="engine:0")
    store.lifecycle.move(4, State.PROMOTED, actor="engine:0")
    now_s[0] += 10
    publish()
    assert store.latest() == 5
    trainer.close()


def test_the_incumbent_is_what_engines_have(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace], redis_client: redis.Redis, tmp_path: Path
) -> None:
    store, pointer = DraftStore(tmp_path / "store"), DraftPointer(redis_client, "toy")
    trainer = start()
    send(stream, traces[:2])
    learn(trainer, 2)

    def incumbent() -> int:
        trainer.publish()
        found: int = store.lifecycle.events.tail(1)[0].fields["incumbent"]
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.shadow.decide", promote)
        trainer.publish()
        trainer.publish()
    assert incumbent() == 3
    pointer.replace(3, 2)
    assert incumbent() == 2, "an operator's choice"
    roll_back(store, 2)
    assert incumbent() == 1, "the pointer is not moved yet"
    pointer.publish(99)
    assert incumbent() == 1, "of another store"
    trainer.close()


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


@pytest.mark.usefixtures("open_gate")
def test_what_could_not_be_announced_is_announced_later_and_not_made_again(
    start: MakeTrainer,
    stream: TraceStream,
    traces: list[Trace],
    redis_client: redis.Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def away(*_: object) -> None:
        raise StreamError("Redis is away")

    trainer = start(publish_interval_s=0.0, publish_min_tokens=1)
    send(stream, traces[:4])
    learn(trainer, 4)
    with monkeypatch.context() as patched:
        patched.setattr(DraftPointer, "publish", away)
        for _ in range(3):
            assert trainer.publish_due
            trainer.publish()
    store, pointer = DraftStore(tmp_path / "store"), DraftPointer(redis_client, "toy")
    assert (store.latest(), pointer.published(), metric(trainer, "publish_errors_total")) == (2, None, 3.0)
    trainer.publish()
    assert (store.latest(), pointer.published(), metric(trainer, "published_version")) == (2, 2, 2.0)
    assert not trainer.publish_due, "nothing was learnt since"
    trainer.close()

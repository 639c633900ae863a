"""What the trainer publishes: who judges a candidate, what is on record, what a rollback takes back."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
import torch
from prometheus_client import CollectorRegistry

from speculator.errors import StreamError
from speculator.redis.control_plane import DraftPointer
from speculator.redis.trace_stream import TraceStream
from speculator.trace import Trace
from speculator.versions.lifecycle import VersionState
from speculator.versions.lineage import admit
from speculator.versions.store import DraftStore
from tests.fixtures.traces import send
from tests.trainer.answers import answer_traces, different, renamed
from tests.trainer.examples import metric, promote, record
from tests.trainer.trainers import MakeTrainer, learn, members, waiting
from trainer.checkpoint import load_checkpoint
from trainer.config import TrainerConfig
from trainer.loop import Trainer
from trainer.release.gate import Decide, decide


def test_killed_right_after_publishing_it_knows_what_it_published(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace], tmp_path: Path
) -> None:
    killed = start(decide=promote, publish_interval_s=0.0, publish_min_tokens=1)
    send(stream, traces[:4])
    learn(killed, 4)
    killed.publish()
    assert metric(killed, "published_version") == 2.0
    killed.close()
    states = DraftStore(tmp_path / "store").lifecycle
    for state in (VersionState.LIVE, VersionState.ROLLED_BACK, VersionState.QUARANTINED):
        states.move(2, state, actor="engine:0")
    resumed = start(decide=promote)
    assert metric(resumed, "started_over_total") == 1.0, "its weights are those that were rolled back"
    assert metric(resumed, "published_version") == 1.0
    resumed.close()


def test_restarted_it_descends_from_the_version_of_its_checkpoint(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace], tmp_path: Path
) -> None:
    killed = start(decide=promote)
    send(stream, traces[:4])
    learn(killed, 4)
    killed.publish()
    killed.close()
    store, fingerprint = DraftStore(tmp_path / "store"), traces[0].header.target_fingerprint
    store.write(store.load(2), store.config(2), parent=2, target_fingerprint=fingerprint, info={})
    admit(store, 3, target_fingerprint=fingerprint, actor="trainer", reason="better")  # and a crash
    resumed = start(decide=promote)
    assert (resumed.training.version, resumed.learner.num_steps) == (2, 4)
    resumed.close()
    roll_back(store, 2)
    resumed = start(decide=promote)
    assert metric(resumed, "started_over_total") == 1.0
    assert resumed.training.version == 1
    saved = load_checkpoint(tmp_path / "state")
    assert saved is not None
    assert (saved[1].version, int(saved[0]["num_steps"])) == (1, 0), "weights that are restored are not the barred ones"
    resumed.close()


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
    assert trainer.candidates.due
    trainer.publish()
    assert metric(trainer, "gate_decisions_total", outcome="hold") == 1.0, "there is no evidence"
    assert not trainer.candidates.due
    assert len(trainer.training.curve.points) == 1
    trainer.step()
    assert trainer.candidates.due
    trainer.close()


@pytest.mark.parametrize("damaged", ["model.safetensors", "manifest.json"])
def test_an_incumbent_that_cannot_be_loaded_is_a_failure_and_no_promotion(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace], fresh: list[Trace], tmp_path: Path, damaged: str
) -> None:
    trainer = start(golden=record(tmp_path / "golden.rec", fresh), golden_traces=24)
    send(stream, traces[:2])
    learn(trainer, 2)
    file = tmp_path / "store" / "versions" / "000001" / damaged
    file.write_bytes(file.read_bytes()[:-1])
    trainer.publish()
    assert DraftStore(tmp_path / "store").versions() == [1]
    assert metric(trainer, "publish_errors_total") == 1.0
    trainer.close()


def kept(trainer: Trainer) -> tuple[list[str], list[str]]:
    return trainer.admission.held_out.trace_ids, trainer.admission.golden.trace_ids


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
    assert first.admission.num_traces == 24
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
    released = set(first.replay.waiting_trace_ids) - set(first.source.unused_trace_ids)
    assert released
    first.checkpoint()
    first.ack()
    first.close()

    resumed = start(**apart)
    assert released <= set(kept(resumed)[0])
    resumed.read(block_ms=0)
    assert released <= set(resumed.replay.waiting_trace_ids)
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
    store.lifecycle.move(version, VersionState.LIVE, actor="engine:0")
    store.lifecycle.move(version, VersionState.ROLLED_BACK, actor="engine:0")
    store.lifecycle.move(version, VersionState.QUARANTINED, actor="engine:0")


def test_a_version_that_was_never_admitted_stays_out(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace], tmp_path: Path
) -> None:
    start(decide=promote).close()
    store = DraftStore(tmp_path / "store")
    fingerprint = traces[0].header.target_fingerprint
    store.write(store.load(1), store.config(1), parent=1, target_fingerprint=fingerprint, info={})  # and a crash
    trainer = start(decide=promote)
    send(stream, traces[:2])
    learn(trainer, 2)
    trainer.publish()
    assert (store.manifest(3).parent, store.manifest(3).info["gate"]["incumbent"]) == (1, 1)
    assert store.lifecycle.state(2) is VersionState.WRITTEN
    trainer.close()


def test_a_rollback_takes_the_trainer_back_to_the_last_good_weights(
    settings: Callable[..., TrainerConfig], stream: TraceStream, traces: list[Trace], tmp_path: Path
) -> None:
    store, now_s = DraftStore(tmp_path / "store"), [time.time()]
    config = settings(publish_interval_s=0.0, publish_min_tokens=1)

    def begin() -> Trainer:
        return Trainer(config, CollectorRegistry(), decide=promote, clock=lambda: now_s[0])

    trainer = begin()
    original = {name: weight.clone() for name, weight in trainer.learner.draft.named_parameters()}

    def is_original(trainer: Trainer) -> bool:
        return all(torch.equal(weight, original[name]) for name, weight in trainer.learner.draft.named_parameters())

    def publish() -> None:
        trainer.step()
        trainer.restart_after_rollback()
        assert trainer.candidates.due
        trainer.publish()

    send(stream, traces)
    trainer.read(block_ms=0)
    publish()
    trainer.checkpoint()
    roll_back(store, 2)
    now_s[0] += 10
    trainer.restart_after_rollback()
    assert is_original(trainer)
    assert (trainer.learner.num_steps, len(members(trainer))) == (0, 1)
    assert not trainer.candidates.due, "it has learnt nothing since"
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
    trainer.restart_after_rollback()
    assert not trainer.candidates.due, "two in a row"
    assert metric(trainer, "publishing_paused") == 1.0
    now_s[0] += config.publish_pause_s + 1
    publish()
    assert store.latest() == 4
    trainer.step()
    trainer.restart_after_rollback()
    assert not trainer.candidates.due, "version 4 is on trial"
    store.lifecycle.move(4, VersionState.LIVE, actor="engine:0")
    store.lifecycle.move(4, VersionState.PROMOTED, actor="engine:0")
    now_s[0] += 10
    publish()
    assert store.latest() == 5
    trainer.close()


def test_the_incumbent_is_what_engines_have(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace], redis_client: redis.Redis, tmp_path: Path
) -> None:
    store, pointer = DraftStore(tmp_path / "store"), DraftPointer(redis_client, "toy")
    rules: list[Decide] = []
    trainer = start(decide=lambda *found, **asked: (rules.pop() if rules else decide)(*found, **asked))
    send(stream, traces[:2])
    learn(trainer, 2)

    def incumbent() -> int:
        trainer.publish()
        found: int = store.lifecycle.events.tail(1)[0].fields["incumbent"]
        return found

    for _ in range(2):
        rules += [promote, promote]  # it is asked twice about each
        trainer.publish()
    assert incumbent() == 3
    pointer.replace(3, 2)
    assert incumbent() == 2, "an operator's choice"
    roll_back(store, 2)
    assert incumbent() == 1, "the pointer is not moved yet"
    pointer.publish(99)
    assert incumbent() == 1, "of another store"
    trainer.close()


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

    trainer = start(decide=promote, publish_interval_s=0.0, publish_min_tokens=1)
    send(stream, traces[:4])
    learn(trainer, 4)
    with monkeypatch.context() as patched:
        patched.setattr(DraftPointer, "publish", away)
        for _ in range(3):
            assert trainer.candidates.due
            trainer.publish()
    store, pointer = DraftStore(tmp_path / "store"), DraftPointer(redis_client, "toy")
    assert (store.latest(), pointer.published(), metric(trainer, "publish_errors_total")) == (2, None, 3.0)
    trainer.publish()
    assert (store.latest(), pointer.published(), metric(trainer, "published_version")) == (2, 2, 2.0)
    assert not trainer.candidates.due, "nothing was learnt since"
    trainer.close()

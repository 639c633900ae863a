"""Steps that spoil the weights, checkpoints that cannot be read or written: what the trainer does then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from speculator.draft.checkpoint import target_fingerprint
from speculator.errors import DraftMismatchError, StoreError
from speculator.redis.trace_stream import TraceStream
from speculator.trace import Trace
from speculator.versions.lineage import ensure_lineage
from speculator.versions.store import DraftStore
from tests.fixtures.traces import send
from tests.trainer.answers import renamed
from tests.trainer.examples import metric, promote
from tests.trainer.trainers import MakeTrainer, learn, members
from trainer.checkpoint import load_checkpoint, save_checkpoint
from trainer.learning.optimizer_step import BAD_STEPS, GOOD_STEPS, all_finite
from trainer.loop import Trainer


def spoil(trainer: Trainer) -> None:
    """What no check on the way in finds: the newest trace gives a loss that is not a number."""
    trainer.replay.waiting[-1].example.aux.fill_(float("nan"))


def test_a_trace_that_spoils_a_step_is_thrown_out_alone(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace]
) -> None:
    trainer = start(publish_interval_s=0.0, publish_min_tokens=1, batch_tokens=200)
    send(stream, traces[:3])
    learn(trainer, 3)
    assert trainer.candidates.due
    send(stream, [renamed(traces[4], "bad")])
    trainer.read(block_ms=0)
    spoil(trainer)
    trainer.step()
    assert members(trainer) == {"trace-0", "trace-1", "trace-2"}
    assert not trainer.candidates.due
    assert metric(trainer, "healthy") == 0.0
    assert metric(trainer, "steps_total", outcome="skipped") == 1.0
    send(stream, [renamed(traces[4], "bad-too")])
    learn(trainer, GOOD_STEPS)
    assert metric(trainer, "replay_admissions_total", outcome="refused") == 1.0
    assert metric(trainer, "healthy") == 1.0
    assert trainer.candidates.due
    assert metric(trainer, "restored_total") == 0.0
    trainer.checkpoint()
    trainer.ack()
    assert stream.lag().acked == 5
    trainer.close()


@pytest.mark.parametrize("checkpointed", [True, False])
def test_broken_weights_are_taken_back_and_cost_no_trace(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace], checkpointed: bool
) -> None:
    trainer = start(decide=promote, publish_interval_s=0.0, publish_min_tokens=1)
    send(stream, traces[:4])
    learn(trainer, 4)
    if checkpointed:
        trainer.checkpoint()
    good = {name: tensor.clone() for name, tensor in trainer.learner.state().items()}
    trainer.learner.draft.fc.weight.data[0, 0] = float("nan")
    trainer.step()
    assert metric(trainer, "restored_total") == 1.0
    assert len(members(trainer)) == 4
    assert not trainer.candidates.due
    if checkpointed:
        assert all(torch.equal(good[name], tensor) for name, tensor in trainer.learner.state().items())
    for _ in range(GOOD_STEPS):
        trainer.step()
    assert len(members(trainer)) == 4, "good steps show that no trace was at fault"
    assert trainer.candidates.due
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


def test_weights_that_are_given_up_with_their_version_accuse_no_trace(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace]
) -> None:
    trainer = start()
    send(stream, traces[:2])
    learn(trainer, 2)
    trainer.learner.draft.fc.weight.data.fill_(3e38)
    trainer.step()
    assert metric(trainer, "restored_total") == 0.0, "so far it may be the traces"
    trainer.training.restart_from(1)
    trainer.step()
    assert metric(trainer, "steps_total", outcome="skipped") == 1.0
    assert len(members(trainer)) == 2
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


def test_a_step_without_a_trace_is_not_a_bad_one(start: MakeTrainer) -> None:
    trainer = start()
    trainer.step()
    assert metric(trainer, "healthy") == 1.0
    trainer.close()


def test_weights_that_are_taken_back_do_not_bring_back_the_memory_of_an_older_target(
    start: MakeTrainer, stream: TraceStream, traces: list[Trace]
) -> None:
    trainer = start()
    send(stream, traces[:2])
    learn(trainer, 2)
    trainer.learner.history = 5000
    trainer.checkpoint()
    trainer.learner.after_target_update()
    history = trainer.learner.history
    trainer.learner.draft.fc.weight.data[0, 0] = float("nan")
    trainer.step()
    assert metric(trainer, "restored_total") == 1.0
    assert trainer.learner.history == history
    trainer.close()


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


def test_a_checkpoint_of_another_lineage_is_refused(start: MakeTrainer, model_dir: Path, tmp_path: Path) -> None:
    trainer = start()
    trainer.checkpoint()
    trainer.close()
    ensure_lineage(DraftStore(tmp_path / "other"), model_dir, target_fingerprint(model_dir), draft_vocab_size=20)
    with pytest.raises(DraftMismatchError, match="STATE_DIR"):
        start(store_dir=tmp_path / "other", draft_vocab_size=20)


@pytest.mark.parametrize(
    ("changes", "is_older"),
    [
        ({"intermediate_size": 16}, False),
        ({"switches": ["norm_before_residual"]}, False),
        ({"intermediate_size": 16}, True),
        ({"switches": ["fc_norm"]}, True),
    ],
)
def test_a_checkpoint_of_a_draft_of_another_architecture_is_refused(
    start: MakeTrainer, model_dir: Path, tmp_path: Path, changes: dict[str, Any], is_older: bool
) -> None:
    trainer = start()
    trainer.checkpoint()
    trainer.close()
    if is_older:
        state, progress = load_checkpoint(tmp_path / "state") or pytest.fail("no checkpoint")
        save_checkpoint(tmp_path / "state", state, msgspec.structs.replace(progress, draft=None))
        start().close()
    store = DraftStore(tmp_path / "other")
    ensure_lineage(store, model_dir, target_fingerprint(model_dir), draft_vocab_size=40, **changes)
    with pytest.raises(DraftMismatchError, match="STATE_DIR"):
        start(store_dir=store.root)


def test_a_checkpoint_of_a_draft_of_another_vocabulary_is_refused(start: MakeTrainer, tmp_path: Path) -> None:
    """Of the same size."""
    trainer = start()
    trainer.checkpoint()
    trainer.close()
    state, progress = load_checkpoint(tmp_path / "state") or pytest.fail("no checkpoint")
    state["d2t"][-1] += 1
    save_checkpoint(tmp_path / "state", state, progress)
    with pytest.raises(DraftMismatchError, match="STATE_DIR"):
        start()


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

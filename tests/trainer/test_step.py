"""Learning, skipping, and going on from a saved state."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from speculator.fresh import fresh_draft
from speculator.trace import Trace
from tests.trainer.examples import acceptance, batch_of, config_for
from trainer.step import Learner


def make_learner(model_dir: Path, tmp_path: Path) -> Learner:
    return Learner(fresh_draft(model_dir, draft_vocab_size=40, seed=0), config_for(model_dir, tmp_path))


def test_a_tiny_draft_learns_a_tiny_target(model_dir: Path, tmp_path: Path, traces: list[Trace]) -> None:
    learner = make_learner(model_dir, tmp_path)
    before = acceptance(learner.averaged, traces[:4], depth=3)
    batch = batch_of(traces[:4], learner.draft)
    first, *_, last = [learner.step(batch) for _ in range(80)]
    after = acceptance(learner.averaged, traces[:4], depth=3)
    assert before.length < 1.3
    assert after.length > 2.0
    assert last.loss < first.loss
    assert last.accept_length > first.accept_length


def test_the_embedding_and_the_vocabulary_are_never_trained(
    model_dir: Path, tmp_path: Path, traces: list[Trace]
) -> None:
    learner = make_learner(model_dir, tmp_path)
    embed, d2t = learner.draft.embed.clone(), learner.draft.d2t.clone()
    learner.step(batch_of(traces[:2], learner.draft))
    assert torch.equal(learner.draft.embed, embed)
    assert torch.equal(learner.draft.d2t, d2t)
    assert learner.averaged.embed is learner.draft.embed


def test_a_batch_that_is_not_finite_changes_nothing(model_dir: Path, tmp_path: Path, traces: list[Trace]) -> None:
    learner = make_learner(model_dir, tmp_path)
    good = batch_of(traces[:2], learner.draft)
    learner.step(good)
    before = {name: tensor.clone() for name, tensor in learner.state().items()}
    poisoned = dataclasses.replace(good, aux=good.aux.clone().index_fill_(0, torch.tensor([3]), float("nan")))
    assert not learner.step(poisoned).applied
    for name, tensor in learner.state().items():
        assert torch.equal(tensor, before[name]), name
    assert learner.step(good).applied


def test_a_batch_without_any_label_is_harmless(model_dir: Path, tmp_path: Path, traces: list[Trace]) -> None:
    learner = make_learner(model_dir, tmp_path)
    batch = batch_of(traces[:1], learner.draft)
    labels = dataclasses.replace(batch.labels, labelled=torch.zeros_like(batch.labels.labelled))
    assert not learner.step(dataclasses.replace(batch, labels=labels)).applied
    assert learner.num_steps == 0


def test_a_restored_learner_takes_the_same_next_step(model_dir: Path, tmp_path: Path, traces: list[Trace]) -> None:
    learner = make_learner(model_dir, tmp_path)
    batches = [batch_of(traces[i : i + 2], learner.draft) for i in (0, 2, 4)]
    for batch in batches[:2]:
        learner.step(batch)
    saved = {name: tensor.clone() for name, tensor in learner.state().items()}
    restored = make_learner(model_dir, tmp_path)
    restored.load_state(saved)
    assert restored.step(batches[2]) == learner.step(batches[2])
    for name, tensor in learner.state().items():
        assert torch.equal(restored.state()[name], tensor), name


def test_another_drafts_state_is_refused(model_dir: Path, tmp_path: Path, traces: list[Trace]) -> None:
    learner = make_learner(model_dir, tmp_path)
    state = learner.state()
    del state["weight.fc.weight"]
    with pytest.raises(KeyError):
        make_learner(model_dir, tmp_path).load_state(state)

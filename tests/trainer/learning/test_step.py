"""Learning, skipping, and going on from a saved state."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from speculator.draft.initialization import fresh_draft
from speculator.errors import ConfigError
from speculator.trace import Trace
from tests.trainer.examples import acceptance, batch_of, config_for
from tests.trainer.learning.test_batch import with_trees
from trainer.config import DeviceSetting, choose_device
from trainer.learning.optimizer_step import MAX_AVERAGED_STEPS, MOVED_AVERAGED_STEPS, Learner
from trainer.release.gate import accept_probabilities


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


@pytest.mark.parametrize("num_dead", [0, 1])
def test_what_is_learnt_does_not_depend_on_the_size_of_the_features(
    model_dir: Path, tmp_path: Path, traces: list[Trace], num_dead: int
) -> None:
    """A feature twice as large, under half the weight, is the same to the draft, and so it is after some steps; also
    beside a feature that is always 0.
    """
    config = config_for(model_dir, tmp_path, max_gradient_norm=1e9)
    learner, other = (Learner(fresh_draft(model_dir, draft_vocab_size=40, seed=0), config) for _ in range(2))
    sizes_w = 2.0 ** torch.randint(-4, 5, (learner.draft.fc.in_features,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        other.draft.fc.weight.div_(sizes_w)
    start_dw = learner.draft.fc.weight.detach().clone()
    batch = batch_of(traces[:3], learner.draft)
    for aux in (batch.aux, batch.context.aux):
        aux[:, :num_dead] = 0
    context = dataclasses.replace(batch.context, aux=batch.context.aux * sizes_w.bfloat16())
    resized = dataclasses.replace(batch, aux=batch.aux * sizes_w.bfloat16(), context=context)
    for _ in range(4):
        learner.step(batch)
        other.step(resized)
    moved_dw = learner.draft.fc.weight - start_dw
    assert (other.draft.fc.weight * sizes_w - learner.draft.fc.weight).abs().mean() < 0.05 * moved_dw.abs().mean()


def test_features_that_are_all_zero_do_no_harm(model_dir: Path, tmp_path: Path, traces: list[Trace]) -> None:
    learner = make_learner(model_dir, tmp_path)
    batch = batch_of(traces[:2], learner.draft)
    assert learner.step(batch).applied
    assert learner.step(dataclasses.replace(batch, aux=torch.zeros_like(batch.aux))).applied
    assert learner.draft.fc.weight.isfinite().all()
    assert learner.step(batch).applied


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


@pytest.mark.parametrize("verdicts", ["recorded", "fresh"])
@pytest.mark.parametrize("chains", ["own", "all"])
def test_every_tensor_of_a_step_is_made_where_the_batch_is(
    model_dir: Path, tmp_path: Path, traces: list[Trace], verdicts: str, chains: str
) -> None:
    """What is made without saying where lands on another device, and cannot be computed with."""
    loss = f"forward_kl=1,reverse_kl=1,acceptance=1,policy_gradient=1,discard=1,verdicts={verdicts},chains={chains}"
    draft = fresh_draft(model_dir, draft_vocab_size=40, seed=0)
    learner = Learner(draft, config_for(model_dir, tmp_path, loss=loss))
    batch = batch_of([with_trees(trace, seed=0) for trace in traces[:2]], draft)
    with torch.device("meta"):
        assert learner.step(batch).applied
        learner.step(None)
        found = accept_probabilities(learner.draft, batch, depth=2, verification="coupled")
    assert {tensor.device.type for tensor in (*learner.state().values(), *found)} == {"cpu"}


def test_a_batch_moves_as_a_whole(model_dir: Path, tmp_path: Path, traces: list[Trace]) -> None:
    draft = fresh_draft(model_dir, draft_vocab_size=40, seed=0)
    batch = batch_of(traces[:1], draft)
    assert batch.to(torch.device("cpu")) is batch
    moved = batch.to(torch.device("meta"))
    parts = (moved, moved.context, moved.labels, moved.verdicts)
    tensors = [value for part in parts for value in vars(part).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 7 + 3 + 6 + 7
    assert {tensor.device.type for tensor in tensors} == {"meta"}


@pytest.mark.parametrize(
    ("setting", "num_gpus", "found"), [("auto", 0, "cpu"), ("auto", 2, "cuda:1"), ("cpu", 2, "cpu")]
)
def test_each_process_has_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch, setting: DeviceSetting, num_gpus: int, found: str
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert str(choose_device(setting)) == found
    if num_gpus:
        monkeypatch.setenv("LOCAL_RANK", "2")
    if setting != "cpu":
        with pytest.raises(ConfigError, match="SLIPSTREAM_TRAINER_DEVICE=cpu"):
            choose_device("cuda")


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


def test_the_average_forgets_sooner_when_the_target_has_moved(
    model_dir: Path, tmp_path: Path, traces: list[Trace]
) -> None:
    def share(learner: Learner) -> float:
        """Of the newest weights, in the average."""
        before = learner.averaged.fc.weight.clone()
        learner.step(batch_of(traces[:2], learner.draft))
        way = (learner.draft.fc.weight.detach() - before).abs().sum()
        return float((learner.averaged.fc.weight - before).abs().sum() / way)

    learner = make_learner(model_dir, tmp_path)
    assert share(learner) == pytest.approx(9 / 10, abs=0.01)
    learner.after_target_update()
    assert share(learner) == pytest.approx(9 / 11, abs=0.01), "a short average gets no longer"
    learner.history = 5000
    assert share(learner) == pytest.approx(1 / MAX_AVERAGED_STEPS, abs=1e-3)
    learner.after_target_update()
    resumed = make_learner(model_dir, tmp_path)
    resumed.load_state(learner.state())
    assert share(resumed) == pytest.approx(1 / MOVED_AVERAGED_STEPS, abs=2e-3)
    assert share(resumed) < 1 / MOVED_AVERAGED_STEPS, "and longer again by and by"
    of_before = resumed.state()
    del of_before["history"]
    learner.load_state(of_before)
    assert learner.history == learner.num_steps, "a checkpoint from before it was counted"

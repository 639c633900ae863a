"""The GRPO example on the toy target: the policy is updated, the engine follows it, and the draft learns along."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import safetensors.torch
import torch

from benchmarks.grpo import Policy, Sample, capitals, train
from benchmarks.in_process import loop
from benchmarks.moving_target import acceptance, draw, examples_of, learnt
from slipstream.topics import Prompt
from speculator.fresh import fresh_draft
from tests.moved import WEIGHTS
from tests.trainer.examples import config_for

PROMPTS = [Prompt("toy", f"question {number}") for number in range(4)]
ENGINE = {"dtype": "float32", "num_slots": 8, "context_length": 128, "max_waiting": 64, "suffix_depth": 0}
TRAINER = {"publish_min_tokens": 1, "max_passes": 1.0, "holdout_share": 0.25, "golden_traces": 4, "batch_tokens": 64}


def test_the_policy_moves_and_everything_follows(toy_model: Path, tmp_path: Path) -> None:
    policy = Policy(toy_model, num_layers=2, learning_rate=1e-2)
    draft = fresh_draft(toy_model, draft_vocab_size=24, seed=0)
    curves = []
    with loop(toy_model, tmp_path, draft=draft, threads=1, engine=ENGINE, trainer=TRAINER) as served:
        steps = train(
            served,
            policy,
            lambda step: PROMPTS,
            tmp_path,
            steps=2,
            size=4,
            max_tokens=12,
            reward=lambda text: text.count("a") / 12,
        )
        for row in steps:
            assert {trace.header.target_version for trace in served.traces} == {row["target_version"]}
            curves.append(row | {"live": 1.0, "static": 0.5})
        assert [row["target_version"] for row in curves] == [0, 1]
        assert served.engine.target_version == 2
        assert served.trainer.intake.target_version == 1, "the newest of which it has had a trace"
        assert served.trainer.learner.num_steps > 0
        examples = examples_of(served.traces, draft)
    assert [curves[0]["kl_from_start"] == 0, curves[1]["kl_from_start"] > 0] == [True, True]
    config = config_for(toy_model, tmp_path)
    before = acceptance(draft, examples)
    assert acceptance(learnt(draft, examples, config, passes=40), examples) > before + 0.1
    draw(curves, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_an_update_makes_what_was_better_than_its_group_more_likely(toy_model: Path, tmp_path: Path) -> None:
    policy = Policy(toy_model, num_layers=2, learning_rate=1e-3)
    samples = [
        Sample(prompt=(1, 7, 8), answer=[20, 21, 22], logprobs=[], reward=1.0, advantage=1.0),
        Sample(prompt=(1, 7, 8), answer=[30, 31], logprobs=[], reward=0.0, advantage=-1.0),
    ]
    whole = policy.model(torch.tensor([[1, 7, 8, 20, 21, 22]])).logits.log_softmax(-1)
    better, worse = policy.logprobs(samples)
    expected = whole[0, torch.arange(2, 5), torch.tensor([20, 21, 22])]
    assert torch.allclose(better, expected, atol=0.05), "in bfloat16, beside a longer answer"
    assert policy.distance(samples) == 0
    sampled = zip(samples, (better, worse), strict=True)
    policy.update([dataclasses.replace(one, logprobs=logprobs.tolist()) for one, logprobs in sampled])
    assert policy.distance(samples) != 0
    after = policy.logprobs(samples)
    assert after[0].sum() > better.sum()
    assert after[1].sum() < worse.sum()
    written = safetensors.torch.load_file(policy.save(tmp_path / "step") / WEIGHTS)
    base = safetensors.torch.load_file(toy_model / WEIGHTS)
    assert written.keys() == base.keys()
    changed = {name for name in base if not torch.equal(written[name], base[name].bfloat16())}
    assert {name.split(".")[2] for name in changed} == {"6", "7"}, "of eight layers, the last two"


@pytest.mark.parametrize(("text", "reward"), [("A Bee can Fly", 0.75), ("", 0.0), ("1 2 - x Y", 0.5)])
def test_capitals(text: str, reward: float) -> None:
    assert capitals(text) == reward

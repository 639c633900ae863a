"""The lineage benchmark: its split, what it makes of a table of acceptances, and what a draft foretells of a prompt."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import msgspec
import pytest
import torch

from benchmarks.lineages import SHARED, Turns, figures, foretold, fork, learn, report, run_seed, split
from benchmarks.replayed import Answer
from speculator.acceptance import Acceptance
from speculator.errors import ConfigError
from speculator.labels import draft_ids_by_target_id
from tests.toy import random_draft
from tests.trainer.answers import answer_traces
from trainer.batch import make_example
from trainer.config import load_config
from trainer.step import Learner


@pytest.fixture(scope="module")
def answers(toy_model: Path) -> list[Answer]:
    """Ten of each domain."""
    draft = random_draft(toy_model, seed=0)
    draft_ids_V = draft_ids_by_target_id(draft.d2t, draft.config.vocab_size)
    found = []
    for number, trace in enumerate(answer_traces(toy_model, num_traces=20)):
        header = msgspec.structs.replace(trace.header, domain="ab"[number % 2])
        labelled = dataclasses.replace(trace, header=header)
        example = make_example(labelled, draft_ids_V, feature_width=draft.fc.in_features)
        found.append(Answer(number=number, trace=labelled, example=example))
    return found


def test_as_many_of_each_and_none_is_both_learnt_and_held_out(answers: list[Answer]) -> None:
    found = split(answers[:-4], ["a", "b"], seed=0)
    for name, each in found.items():
        assert (len(each.learnt), len(each.held_out)) == (6, 2)
        numbers = {answer.number for answer in (*each.learnt, *each.held_out)}
        assert len(numbers) == 8
        assert all(answers[number].trace.header.domain == name for number in numbers)
    with pytest.raises(ConfigError, match="check --lineages"):
        split(answers, ["a", "c"], seed=0)


def test_what_the_ways_to_choose_commit() -> None:
    """Four answers of one verification each; each lineage's draft is good at its own, but for one answer of b."""

    def of(*lengths: float) -> list[Acceptance]:
        return [Acceptance(num_committed=length, num_rounds=1) for length in lengths]

    table = {
        "base": of(1, 1, 1, 1),
        SHARED: of(2, 2, 2, 2),
        "a": of(3, 3, 1, 5),
        "b": of(1, 1, 4, 2),
        "a, equal each": of(4, 4, 1, 1),
        "b, equal each": of(1, 1, 4, 4),
    }
    scores = {"a": [0.9, 0.1, 0.1, 0.9], "b": [0.1, 0.9, 0.9, 0.1]}
    found = figures(table, scores, ["a", "a", "b", "b"], seed=0)
    chosen = found["accept_length_by_choice"]
    assert chosen["base"] == 1
    assert chosen[SHARED] == 2
    assert chosen["by domain"] == (3 + 3 + 4 + 2) / 4
    assert chosen["by domain, equal each"] == 4
    assert chosen["best for each answer"] == (3 + 3 + 4 + 5) / 4
    assert chosen["by prompt"] == (3 + 1 + 4 + 5) / 4
    assert (found["right_by_prompt"], found["domain_is_best_for_answer"]) == (0.5, 0.75)
    assert found["accept_length"]["a"] == {"a": 3, "b": 3}
    assert chosen["measured"] > chosen[SHARED]


@torch.no_grad()
def test_what_is_foretold_of_a_prompt_rests_on_what_comes_before(answers: list[Answer], toy_model: Path) -> None:
    draft, trace = random_draft(toy_model, seed=3), answers[0].trace
    tokens = torch.from_numpy(trace.token_ids[: trace.header.num_prompt_tokens]).long()
    hits = []
    for last in range(2, len(tokens)):
        feature = draft.fuse(trace.aux_hidden[: last - 1][None])
        out = draft(
            tokens[None, 1:last],
            feature,
            torch.arange(last - 1)[None],
            lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        )
        hits.append(bool(draft.target_ids[draft.logits(out[0, -1]).argmax()] == tokens[last]))
    assert foretold(draft, answers[0], tail=64) == pytest.approx(sum(hits) / len(hits))
    assert foretold(draft, answers[0], tail=2) == pytest.approx(sum(hits[-2:]) / 2)


def test_lineages_take_turns_and_a_fork_goes_on_alone(answers: list[Answer], toy_model: Path) -> None:
    unused = {"redis_url": "", "model_key": "", "store_dir": Path(), "state_dir": Path()}
    config = load_config(model_dir=toy_model, batch_tokens=96, warmup_steps=1, **unused)
    turns = Turns(split(answers, ["a", "b"], seed=0), config, seed=0)
    learner = Learner(random_draft(toy_model, seed=0), config)
    learn(learner, turns, 500)
    assert abs(turns.tokens["a"] - turns.tokens["b"]) <= max(answer.example.num_bases for answer in answers)
    assert sum(turns.tokens.values()) >= 500
    forked = fork(learner, config, random_draft(toy_model, seed=1))
    before = {name: tensor.clone() for name, tensor in learner.state().items()}
    assert all(torch.equal(tensor, before[name]) for name, tensor in forked.state().items())
    learn(forked, turns, 96)
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.state().items())
    assert not torch.equal(forked.state()["weight.fc.weight"], before["weight.fc.weight"])


def test_a_small_run(
    answers: list[Answer],
    toy_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SLIPSTREAM_TRAINER_DRAFT_VOCAB_SIZE", "40")
    learnt: list[tuple[set[str], int]] = []

    def noted(learner: Learner, turns: Turns, num_tokens: int) -> None:
        learn(learner, turns, num_tokens)
        learnt.append((set(turns.tokens), num_tokens))

    monkeypatch.setattr("benchmarks.lineages.learn", noted)
    arguments = argparse.Namespace(lineages=["a", "b"], tokens=1000, fork=0.4, json=tmp_path / "out.json")
    run = run_seed(answers, arguments, toy_model, 0)
    both = {"a", "b"}
    assert learnt == [(both, 400), (both, 600), ({"a"}, 300), ({"a"}, 300), ({"b"}, 300), ({"b"}, 300)]
    assert set(run["accept_length"]) == {"base", SHARED, "a", "b", "a, equal each", "b, equal each"}
    with pytest.raises(SystemExit):
        report([run, run], arguments)
    assert "by domain" in capsys.readouterr().out
    assert json.loads(arguments.json.read_text())["runs"][1]["seed"] == 0

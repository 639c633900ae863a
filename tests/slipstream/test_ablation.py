"""The ablation's arithmetic, and one small workload from prompts to table."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import ablation
from benchmarks.ablation import replay_all
from benchmarks.ablation_table import (
    BASELINE,
    ORDINARY_BASELINE,
    cells_of,
    overall,
    phase_ratio,
    phase_table,
    table,
    tokens_to_reach,
)
from benchmarks.ordinary import OrdinaryLearner, ordinary_draft
from benchmarks.workloads import RecordOptions, record_workload, workload_prompts
from slipstream.replay import ReplayOptions, replay
from slipstream.topics import Prompt
from slipstream.traces import summary
from speculator.errors import ConfigError
from speculator.fresh import fresh_draft
from speculator.labels import draft_ids_by_target_id
from speculator.recording import RecordingReader
from tests.trainer.answers import answer_traces
from trainer.batch import cut, make_example, pack
from trainer.config import load_config
from trainer.step import Learner


def curve(*points: tuple[int, float]) -> list[dict[str, Any]]:
    return [{"trained_tokens": tokens, "accept_length_by_depth": {"3": length}} for tokens, length in points]


def test_tokens_to_reach_a_length_are_read_off_between_the_points() -> None:
    rising = curve((0, 1.0), (100, 1.2), (200, 1.1), (300, 1.4))
    assert tokens_to_reach(rising, 1.0, 3) == 0
    assert tokens_to_reach(rising, 1.1, 3) == pytest.approx(50)
    assert tokens_to_reach(rising, 1.25, 3) == pytest.approx(250)
    assert tokens_to_reach(rising, 1.5, 3) == float("inf")


def run_of(*points: tuple[int, float]) -> dict[str, Any]:
    return {"trained_tokens": points[-1][0], "accept_length": points[-1][1], "seconds": 1.0, "curve": curve(*points)}


def test_a_cell_compares_with_both_baselines_of_its_own_seed() -> None:
    runs = {
        ("qa", ORDINARY_BASELINE, 0): run_of((0, 1.0), (100, 1.5), (200, 1.5)),
        ("qa", ORDINARY_BASELINE, 1): run_of((0, 1.0), (100, 1.3)),
        ("qa", BASELINE, 0): run_of((0, 1.0), (80, 1.5), (100, 1.55)),
        ("qa", BASELINE, 1): run_of((0, 1.0), (100, 1.2)),
        ("qa", "other", 0): run_of((0, 1.0), (50, 1.5), (100, 1.6)),
        ("qa", "other", 1): run_of((0, 1.0), (50, 1.1), (100, 1.2)),
    }
    ordinary, baseline, other = cells = cells_of(runs, [3])
    assert ordinary.to_ordinary == pytest.approx((1.0, 1.0))
    assert baseline.to_baseline == pytest.approx((1.0, 1.0))
    assert baseline.to_ordinary == (pytest.approx(0.8), float("inf"))
    assert other.lengths == (1.6, 1.2)
    assert other.to_ordinary == (pytest.approx(0.5), float("inf"))
    assert other.to_baseline == (pytest.approx(0.75), pytest.approx(1.0))
    assert other.to_dict()["to_ordinary"] == [0.5, None]
    assert overall(cells, lambda cell: cell.to_baseline)["other"] == pytest.approx(0.875)
    lines = [name + rest for name, rest in table(cells)]
    assert "| `other` | 1.400 (1.20 … 1.60) |" in lines
    assert "| `other` | never (0.50 … never) | **never** | 0.88 × |" in lines


def test_the_phases_of_a_shift_count_from_where_they_come() -> None:
    def shifting(*code: float) -> dict[str, Any]:
        points = [
            {
                "step": 2 * at,
                "trained_tokens": 200 * at,
                "accept_length_by_domain": {"math": 1 + 0.1 * at, "code": each},
            }
            for at, each in enumerate(code)
        ]
        return {"steps": 8, "curve": points}

    baseline, other = shifting(1.0, 1.0, 1.0, 1.2, 1.4), shifting(1.0, 1.0, 1.0, 1.4, 1.5)
    assert phase_ratio(other, baseline, ["math", "code"], 0) == pytest.approx(1.0)
    assert phase_ratio(other, baseline, ["math", "code"], 1) == pytest.approx(0.5)
    runs = {("math>code", ORDINARY_BASELINE, 0): baseline, ("math>code", "other", 0): other}
    assert [name + rest for name, rest in phase_table(runs)][-1] == (
        "| `other` | 1.00 × (1.00 … 1.00) | 0.50 × (0.50 … 0.50) |"
    )
    assert phase_table({("math", ORDINARY_BASELINE, 0): baseline}) == []


def test_a_run_that_is_kept_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def options(steps: int) -> ReplayOptions:
        return ReplayOptions(recordings=[tmp_path / "a.rec"], model_dir=tmp_path, depths=[3], num_steps=steps)

    made = []

    def run(options: ReplayOptions, *, ordinary: bool) -> dict[str, Any]:
        made.append((options.num_steps, ordinary))
        return run_of((0, 1.0), (options.num_steps or 0, 1.5))

    monkeypatch.setattr(ablation, "run_one", run)
    # Threads in the place of processes: these would not know the function above.
    monkeypatch.setattr(ablation, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))
    log = tmp_path / "runs.jsonl"
    first = replay_all({("qa", BASELINE, 0): options(4)}, num_processes=1, log=log)
    asked = {("qa", ORDINARY_BASELINE, 0): options(4), ("qa", BASELINE, 0): options(4)}
    both = replay_all(asked, num_processes=1, log=log)
    assert list(both) == list(asked)
    assert both["qa", BASELINE, 0] == first["qa", BASELINE, 0]
    assert made == [(4, False), (4, True)]
    replay_all({("qa", BASELINE, 0): options(5)}, num_processes=1, log=log)
    assert made[2:] == [(5, False)], "other steps are another run"


def prompts_of(counts: dict[str, int]) -> Sequence[Prompt]:
    return [Prompt(domain, f"{domain} {number}") for domain, count in counts.items() for number in range(count)]


def test_a_shift_is_one_domain_and_then_the_other() -> None:
    prompts = prompts_of({"a": 20, "b": 20})
    assert {prompt.domain for prompt in workload_prompts("a", prompts, 8, seed=0)} == {"a"}
    shift = workload_prompts("a>b", prompts, 8, seed=0)
    assert [prompt.domain for prompt in shift] == ["a"] * 4 + ["b"] * 4
    assert len(set(shift)) == 8
    assert shift == workload_prompts("a>b", prompts, 8, seed=0) != workload_prompts("a>b", prompts, 8, seed=1)
    mixed = workload_prompts("a+b", prompts, 16, seed=0)
    assert {prompt.domain for prompt in mixed[:8]} == {"a", "b"}
    with pytest.raises(ConfigError, match="--workloads"):
        workload_prompts("a+c", prompts, 8, seed=0)


def test_a_workload_is_recorded_while_the_draft_learns_and_can_be_replayed(toy_model: Path, tmp_path: Path) -> None:
    options = RecordOptions(
        model_dir=toy_model,
        max_tokens=24,
        temperature=0.0,
        num_threads=1,
        depth=3,
        engine={"context_length": 256, "capture_topk": 16, "min_confidence": 0.0, "dtype": "float32"},
    )
    prompts = workload_prompts("a>b", prompts_of({"a": 12, "b": 12}), 20, seed=0)
    path = tmp_path / "toy.rec"
    record_workload(path, prompts, options, note="a test")
    document = summary(path)
    assert document["traces"] >= 15
    assert list(document["domains"]) == ["a", "b"]
    assert len(document["draft_versions"]) == 3, "a version a group of answers"
    with RecordingReader(path) as reader:
        order = [int(trace.header.request_id) for trace in reader.traces()]
    assert order == sorted(order)
    found = replay(
        ReplayOptions(recordings=[path], model_dir=toy_model, depths=[2, 3], num_steps=4, draft_vocab_size=40)
    )
    assert found["learnt_traces"] + found["held_out_traces"] == document["traces"]
    assert options.key(prompts) != options.key(prompts[1:])


def test_the_ordinary_start_and_step_differ_from_the_trainers_in_these_alone(toy_model: Path) -> None:
    ours = fresh_draft(toy_model, draft_vocab_size=40, seed=3)
    ordinary = ordinary_draft(toy_model, draft_vocab_size=40, seed=3)
    before = ours.state_dict()
    differing = {name for name, weight in ordinary.state_dict().items() if not torch.equal(weight, before[name])}
    assert differing == {f"midlayer.self_attn.{name}_proj.weight" for name in ("q", "k", "o")}

    draft_ids_V = draft_ids_by_target_id(ours.d2t, ours.config.vocab_size)
    width = ours.fc.in_features
    examples = [make_example(one, draft_ids_V, feature_width=width) for one in answer_traces(toy_model, num_traces=2)]
    batch = pack([cut(one, max_bases=64, rng=random.Random(0)) for one in examples], max_context=64)
    config = load_config(
        model_dir=toy_model, redis_url="", model_key="", store_dir=Path(), state_dir=Path(), warmup_steps=1
    )

    def moved(learner: type[Learner]) -> dict[str, torch.Tensor]:
        draft = copy.deepcopy(ours)
        assert learner(draft, config).step(batch).applied
        return {name: (weight - before[name]).abs() for name, weight in draft.named_parameters()}

    trainers, usual = moved(Learner), moved(OrdinaryLearner)
    assert {name for name, distance in usual.items() if not torch.equal(distance, trainers[name])} == {"fc.weight"}
    # AdamW's first step is the learning rate for every weight that has a gradient.
    assert usual["fc.weight"].median().item() == pytest.approx(config.learning_rate, rel=0.02)
    rms_w = batch.aux.float().square().mean(0).sqrt()
    torch.testing.assert_close(trainers["fc.weight"] * rms_w, usual["fc.weight"], rtol=0.05, atol=1e-4)

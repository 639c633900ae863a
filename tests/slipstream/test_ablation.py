"""The ablation's arithmetic, and one small workload from prompts to table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ablation import cells_of, tokens_to_reach
from benchmarks.workloads import RecordOptions, record_workload, workload_prompts
from slipstream.replay import ReplayOptions, replay
from slipstream.topics import Prompt
from slipstream.traces import summary
from speculator.errors import ConfigError
from speculator.recording import RecordingReader


def curve(*points: tuple[int, float]) -> list[dict[str, Any]]:
    return [{"trained_tokens": tokens, "accept_length_by_depth": {"3": length}} for tokens, length in points]


def test_tokens_to_reach_a_length_are_read_off_between_the_points() -> None:
    rising = curve((0, 1.0), (100, 1.2), (200, 1.1), (300, 1.4))
    assert tokens_to_reach(rising, 1.0, 3) == 0
    assert tokens_to_reach(rising, 1.1, 3) == pytest.approx(50)
    assert tokens_to_reach(rising, 1.25, 3) == pytest.approx(250)
    assert tokens_to_reach(rising, 1.5, 3) == float("inf")


def test_a_cell_compares_with_the_baseline_of_its_own_seed() -> None:
    def run_of(*points: tuple[int, float]) -> dict[str, Any]:
        return {"trained_tokens": points[-1][0], "curve": curve(*points)}

    runs = {
        ("qa", "forward_kl", 0): run_of((0, 1.0), (100, 1.5), (200, 1.5)),
        ("qa", "forward_kl", 1): run_of((0, 1.0), (100, 1.3)),
        ("qa", "other", 0): run_of((0, 1.0), (50, 1.5), (100, 1.6)),
        ("qa", "other", 1): run_of((0, 1.0), (50, 1.1), (100, 1.2)),
    }
    baseline, other = cells_of(runs, [3])
    assert baseline.token_ratios == pytest.approx((1.0, 1.0))
    assert other.lengths == (1.6, 1.2)
    assert other.token_ratios == (pytest.approx(0.5), float("inf"))
    assert other.to_dict()["token_ratios"] == [0.5, None]


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

"""The pure parts of benchmarks/serving.py: windows over runs, drafts that are of no use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.common.workloads import Work
from benchmarks.equal_cost import Round
from benchmarks.serving import Rates, useless, windows
from benchmarks.ways import Run
from tests.fixtures.toy import random_draft


def test_windows_are_of_the_other_engines_time() -> None:
    runs = [(Run(10, 9.0, cpu_s), Run(10, 9.0, 1.0)) for cpu_s in (1.0, 2.0, 1.0)]

    def cpu(run: Run) -> float:
        return run.cpu_s

    assert windows(runs, 1.0, cpu) == [1.0, 0.5, 1.0]
    assert windows(runs, 2.0, cpu) == [pytest.approx(2 / 3), pytest.approx(2 / 3)]
    assert windows(runs, 4.0, cpu) == []


def test_ratios_are_by_prompt() -> None:
    rates, work = Rates(), Work("chat", (1,), 10, 1)
    for plain, head in ((10, 20), (100, 100), (50, 150)):
        rates.add(work, "plain", plain, 1.0)
        rates.add(work, "head", head, 1.0)
    assert rates.ratio("chat", "head", "plain").median == 2.0


def test_at_equal_cost_rounds_and_planning_count() -> None:
    rates, plain = Rates(), Round(1, 0, 0, 0, 0.010, 0.0)
    slow = Round(1, 0, 0, 0, 0.030, 0.0)
    rates.runs["chat", "plain"] = [Run(10, 0.0, 0.0, (plain,) * 10)]
    rates.runs["chat", "hybrid"] = [Run(10, 0.0, 0.0, (slow,) * 4, planning_s=0.010)]
    assert rates.ratio_at_equal_cost("chat", "hybrid", "plain").median == pytest.approx(0.10 / 0.05)


def test_the_wrong_draft_says_other_tokens_as_surely(toy_model: Path) -> None:
    draft = random_draft(toy_model, seed=1)
    wrong = useless("wrong", draft, toy_model)
    assert set(wrong.target_ids.tolist()) == set(draft.target_ids.tolist())
    assert (wrong.target_ids != draft.target_ids).all()
    assert torch.equal(wrong.lm_head.weight, draft.lm_head.weight)

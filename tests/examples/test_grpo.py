"""The GRPO example as a user runs it, on a toy model: servers, a draft that learns, TRL, and weights that move."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.grpo.sums import make_sums, reward, score
from examples.grpo.train import main
from tests.fixtures.toy import make_toy_model

# Of transformers to trl, and of trl to us.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:You are using 'rollout_func'"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_model(tmp_path_factory.mktemp("models") / "toy")


def steps(folder: Path, model: Path, *arguments: str) -> list[dict[str, Any]]:
    small = ("--steps", "3", "--prompts", "2", "--samples", "4", "--max-tokens", "8", "--seed", "7")
    main([*small, "--model", str(model), "--out", str(folder), *arguments, "--", "--draft-vocab-size", "24"])
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def served(folder: Path) -> list[dict[str, Any]]:
    said = [json.loads(line) for line in (folder / "serve.log").read_text().splitlines() if line.startswith("{")]
    return [line for line in said if line["event"] == "target in service"]


def test_each_step_samples_under_the_weights_of_the_one_before(model: Path, tmp_path: Path) -> None:
    rows = steps(tmp_path / "run", model)
    assert [(row["step"], row["most_stale"], row["unfinished"]) for row in rows] == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]
    assert [line["version"] for line in served(tmp_path / "run")] == [1, 2]
    assert not list((tmp_path / "run" / "targets").iterdir()), "folders of weights that the server has are removed"
    # Asynchronous, they are begun while the step before is trained; the first are the same for the same seeds.
    late = steps(tmp_path / "late", model, "--alpha", "1", "--frozen-draft")
    assert [(row["step"], row["most_stale"]) for row in late] == [(0, 0), (1, 1), (2, 1)]
    assert [late[0][name] for name in ("reward", "tokens")] == [rows[0][name] for name in ("reward", "tokens")]
    assert [line["version"] for line in served(tmp_path / "late")] == [1, 2]


def test_a_folder_of_an_earlier_run_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="choose another --out"):
        main(["--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("better", "worse"),
    [("7", "7."), ("7.", "It is 7."), ("It is 7.", "It is 8."), ("8", "It is 8."), ("It is 8.", "no"), ("7", "7 or 8")],
)
def test_the_reward_is_shaped(better: str, worse: str) -> None:
    assert score(better, "7") >= score(worse, "7")
    assert 0 <= score(worse, "7") <= score(better, "7") <= 1
    assert reward([[{"content": better}]], ["7"]) == [score(better, "7")]


def test_the_task_is_the_same_for_a_seed() -> None:
    assert make_sums(5, seed=1)[:] == make_sums(5, seed=1)[:] != make_sums(5, seed=2)[:]

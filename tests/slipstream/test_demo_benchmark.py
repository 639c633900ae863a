"""What the three workloads of benchmarks/demo.py ask."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import demo
from benchmarks.demo import workloads_of
from speculator.errors import ConfigError


def _lines(path: Path, *domains: str) -> Path:
    path.write_text("\n".join(json.dumps({"domain": one, "prompt": f"def {one}(): ..."}) for one in domains))
    return path


def test_every_program_is_edited_in_five_ways(tmp_path: Path) -> None:
    found = workloads_of(_lines(tmp_path / "prompts.jsonl", "math", "code"))
    assert [one.domain for one in found["mixed"].prompts] == ["math", "code"]
    edits = [one.text for one in found["editing"].prompts]
    assert len(set(edits)) == 5
    assert all("```python\ndef code(): ...\n```" in text for text in edits)


def test_prompts_without_programs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="code"):
        workloads_of(_lines(tmp_path / "prompts.jsonl", "math"))


def test_without_prompts_this_projects_functions_are_edited() -> None:
    edits = workloads_of(None)["editing"].prompts
    assert len(edits) > 100
    assert all("def " in one.text for one in edits)


@pytest.mark.parametrize(("speedup", "ends_with"), [(2.0, 0), (1.5, 1), (None, 1)])
def test_plots_get_a_folder_and_a_speedup_below_its_target_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speedup: float | None, ends_with: int
) -> None:
    plots, written = tmp_path / "new" / "plots", tmp_path / "out.json"
    asked = []

    def run(_: demo.Workload, __: object, plot: tuple[str, ...]) -> dict[str, object]:
        asked.append(plot)
        assert plots.is_dir()
        return {
            "speedup": {"measured_last_two_minutes": speedup, "baseline_rounds": 30},
            "accept_length": {"first_minute": 1.5, "last_two_minutes": None},
            "requests": 10,
            "times_each_prompt_came": 10.0,
            "head_added": {"estimate": None, "low": None, "high": None},
            "client_speedup": {"estimate": 1.4, "low": 1.3, "high": 1.5},
        }

    monkeypatch.setattr(demo, "_run", run)
    prompts = _lines(tmp_path / "prompts.jsonl", "code")
    command = ["demo", "--workloads", "mixed", "--prompts", str(prompts), "--plots", str(plots)]
    monkeypatch.setattr("sys.argv", [*command, "--json", str(written)])
    with pytest.raises(SystemExit) as ended:
        demo.main()
    assert (ended.value.code or 0) == ends_with
    assert asked == [("--plot", str(plots / "mixed.png"))]
    assert json.loads(written.read_text())["mixed"]["client_speedup"]["estimate"] == 1.4

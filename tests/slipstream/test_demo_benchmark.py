"""What the three workloads of benchmarks/demo.py ask."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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

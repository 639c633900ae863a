"""docs/explanation/reliability.md promises nothing without a test, and names no test that is not there."""

from __future__ import annotations

import ast
import functools
import re

import pytest

from tests.docs.commands import ROOT

PAGE = ROOT / "docs" / "explanation" / "reliability.md"
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
_PROMISES = "## Promises"


def _rows() -> list[str]:
    section = PAGE.read_text().split(_PROMISES)[1].split("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("| ") and not line.startswith("| fault |")]


@functools.cache
def _functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("row", _rows(), ids=lambda row: row.split("|")[1].strip()[:60])
def test_each_promise_names_tests_that_exist(row: str) -> None:
    named = _TEST.findall(row)
    assert named, "no test shows it"
    for path, test in named:
        assert (ROOT / path).is_file(), path
        assert test in _functions(path), f"{path} has no {test}"


def test_every_fault_of_the_table_is_there() -> None:
    assert len(_rows()) >= 31

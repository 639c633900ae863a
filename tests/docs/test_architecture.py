"""docs/explanation/architecture.md leads to every folder and to names that exist; other pages name files that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.docs.commands import PAGES, ROOT

PACKAGES = ("speculator", "serving", "trainer", "slipstream")
_TEXT = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
_FOLDERS = re.findall(r"^\| `([\w/]+/)` \| .+ \| `([\w.]+)` \|$", _TEXT, re.MULTILINE)
_CHANGES = re.findall(r"^\| .+ \| `([\w/]+\.py)` \| `([\w.]+)` \|$", _TEXT, re.MULTILINE)
_PATH = re.compile(r"`((?:speculator|serving|trainer|slipstream|tests|benchmarks|deploy)/[\w/.]+\.\w+)")


def test_every_folder_of_modules_is_named_once() -> None:
    folders = {
        f"{path.parent.relative_to(ROOT)}/"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    named = [folder for folder, _ in _FOLDERS]
    assert sorted(named) == sorted(folders)


@pytest.mark.parametrize(("folder", "first"), _FOLDERS)
def test_the_file_to_read_first_is_there(folder: str, first: str) -> None:
    assert (ROOT / folder / first).is_file()


def test_the_table_of_changes_answers_twenty_questions() -> None:
    assert len(_CHANGES) >= 20


@pytest.mark.parametrize(("path", "name"), _CHANGES)
def test_what_one_wants_to_change_is_there(path: str, name: str) -> None:
    body: list[ast.stmt] = ast.parse((ROOT / path).read_text()).body
    for part in name.split("."):
        found = [node for node in body if part in _defined(node)]
        assert found, f"{path} has no {name}"
        body = getattr(found[0], "body", [])


def _defined(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    assert not [path for path in _PATH.findall(text) if not (ROOT / path).exists()]
    names = {file.name for folder in (*PACKAGES, "tests", "benchmarks") for file in (ROOT / folder).rglob("*.*")}
    assert set(re.findall(r"`(\w+\.(?:py|cpp|h))`", text)) <= names

"""docs/architecture.md leads to every module, and to none that is not there; other pages name files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.commands import PAGES, ROOT

PACKAGES = ("speculator", "serving", "serving/gateway", "serving/local", "serving/sglang", "serving/rollout", "trainer")
_SECTION = re.compile(r"^### `([\w/]+)/`\n(.*?)(?=^#|^A command)", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"`([\w/]+\.py)`")
_PATH = re.compile(r"`((?:speculator|serving|trainer|slipstream|tests|benchmarks|deploy)/[\w/.]+\.\w+)")


def _named() -> dict[str, list[str]]:
    """By the package whose section it is."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    return {package: _FILE.findall(section) for package, section in _SECTION.findall(page)}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_is_named_once(package: str) -> None:
    others = tuple(f"{each}/" for each in PACKAGES if each.startswith(f"{package}/"))
    paths = (str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*.py") if path.name != "__init__.py")
    modules = (path.removeprefix(f"{package}/") for path in paths if not path.startswith(others))
    assert sorted(_named()[package]) == sorted(modules), f"docs/architecture.md, ### `{package}/`"


def test_every_section_is_a_package() -> None:
    assert set(_named()) == set(PACKAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    assert not [path for path in _PATH.findall(page.read_text()) if not (ROOT / path).exists()]

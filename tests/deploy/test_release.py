"""What `make release` builds: complete metadata, the code and nothing else, with the version that a tag says."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from slipstream.models import BUNDLED_PACKAGE
from tests.deploy.compose import ROOT

PACKAGES = ("serving", "slipstream", "speculator", "trainer")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [made] = folder.glob("*.whl")
    return made


def test_it_has_the_packages_their_types_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    folders = {name.split("/")[0] for name in names}
    assert {one for one in folders if not one.endswith(".dist-info")} == set(PACKAGES)
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    tracked = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, check=True, capture_output=True, text=True)
    assert set(tracked.stdout.split()) <= set(names), "a file that the code reads is left out"


def test_its_metadata_says_what_an_index_shows(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    said = Parser().parsestr(archive.read(name).decode())
    assert (said["Name"], said["Author"], said["License-Expression"]) == (
        "slipstream-spec",
        "Slipstream contributors",
        "Apache-2.0",
    )
    assert {"demo", "grpo", "otel", "router", "sglang"} <= set(said.get_all("Provides-Extra"))
    assert "Typing :: Typed" in said.get_all("Classifier")
    assert said["Keywords"]
    assert said["Description-Content-Type"] == "text/markdown"


def test_none_of_its_extras_requires_what_only_the_repository_can_install(wheel: Path) -> None:
    """uv reads other dependencies of some packages from pyproject.toml; pip, elsewhere, compiles what those declare."""
    archive = zipfile.ZipFile(wheel)
    [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    required = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist")
    [changed] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["dependency-metadata"]
    pinned = f"{changed['name']}=={changed['version']}"
    assert [one for one in required if changed["name"] in one] == [f"{pinned}; extra == 'dev'"]
    assert pinned == BUNDLED_PACKAGE, "what the first start fetches"


@pytest.mark.parametrize(("tag", "version"), [("v9.8.7", "9.8.7"), (None, "0.0.1"), ("before-the-summer", "0.0.1")])
def test_the_version_is_the_tags_where_there_is_one(tmp_path: Path, tag: str | None, version: str) -> None:
    """On a project of one file, with stand-ins for the tools."""
    (tmp_path / "deploy").mkdir()
    shutil.copy(ROOT / "deploy" / "release.sh", tmp_path / "deploy")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "0.0.1"\n\n[tool.y]\nversion = "7"\n')
    (tmp_path / ".gitignore").write_text("dist/\nbin/\n")
    programs = tmp_path / "bin"
    programs.mkdir()
    stand_ins = {
        # `uv build --quiet --out-dir dist SOURCE`
        "uv": 'mkdir dist && cp "$5/pyproject.toml" dist/x.whl && touch dist/x.tar.gz',
        "twine": "true",
        "cyclonedx-py": 'touch "${@: -1}"',
    }
    for name, body in stand_ins.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (programs / name).chmod(0o755)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-C", str(tmp_path)]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"], *([["tag", tag]] if tag else [])):
        subprocess.run([*git, *words], check=True)
    release = [tmp_path / "deploy" / "release.sh", programs, programs / "uv"]
    subprocess.run(release, check=True, capture_output=True)
    assert (tmp_path / "dist" / f"slipstream_spec-{version}.cdx.json").exists()
    assert f'version = "{version}"\n\n[tool.y]\nversion = "7"' in (tmp_path / "dist" / "x.whl").read_text()
    (tmp_path / "new").touch()
    refused = subprocess.run(release, check=False, capture_output=True, text=True)
    assert (refused.returncode, "commit them first" in refused.stderr) == (2, True)

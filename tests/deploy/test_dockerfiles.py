"""The Dockerfiles: linted, and what they copy and install from is there, pinned, and enough."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from tests.deploy.compose import ROOT, entrypoint, instructions

DOCKERFILES = sorted((ROOT / "deploy").glob("*.Dockerfile"))
SLIPSTREAM = ROOT / "deploy" / "slipstream.Dockerfile"
ROUTER = ROOT / "deploy" / "router.Dockerfile"
EACH = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    return next(folder.iterdir())


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
    stages = set()
    for name, rest in instructions(path):
        if name == "FROM":
            base, _, stage = rest.partition(" AS ")
            assert base in stages or re.search(r":v?\d+\.\d+\.\d+(-slim)?$", base), rest
            stages.add(stage)
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
    missing = _closure(ours - brought, needed_by) - brought
    assert missing - added.keys() == set()
    assert added.keys() - missing == set(), "SGLang brings these itself"
    assert added.items() <= locked.items()


def test_the_build_backend_is_the_one_of_the_tests() -> None:
    locked, _ = _lock(ROOT / "requirements-dev.lock")
    build, _ = _lock(ROOT / "deploy" / "build.lock")
    assert "hatchling" in build
    assert {name: version for name, version in build.items() if name in locked}.items() <= locked.items()


def test_the_wheel_has_every_file_and_the_plugin(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        [entry_points] = [name for name in names if name.endswith("entry_points.txt")]
        told = archive.read(entry_points).decode()
    assert "[sglang.srt.plugins]\nslipstream = serving.sglang.plugin:register" in told
    for package in ("speculator", "serving", "trainer", "slipstream"):
        files = {path for path in (ROOT / package).rglob("*") if path.is_file() and path.parent.name != "__pycache__"}
        assert {str(path.relative_to(ROOT)) for path in files} <= names


@pytest.mark.parametrize(
    "dockerfile", [SLIPSTREAM, SLIPSTREAM.with_name("sglang.Dockerfile")], ids=["slipstream", "sglang"]
)
def test_the_modules_that_an_image_imports_to_prove_itself_exist(dockerfile: Path) -> None:
    checks = re.findall(r'python3? -c "import ([\w., ]+)"', dockerfile.read_text())
    names = [name for check in checks for name in check.split(", ")]
    assert names
    assert [name for name in names if importlib.util.find_spec(name) is None] == []


def test_pytorch_starts_without_what_the_cpu_variant_leaves_out(tmp_path: Path) -> None:
    """And learns: with links to everything else."""
    [installs] = [rest for name, rest in instructions(SLIPSTREAM) if name == "RUN" and "rm -r" in rest]
    left_out = re.findall(r"/dependencies/(\S+?)(?:;|\s)", installs.partition("rm -r ")[2])
    assert len(left_out) == 3
    packages, view = Path(torch.__file__).parents[1], tmp_path / "packages"
    if not (packages / "nvidia").exists():
        pytest.skip("this PyTorch brings nothing of CUDA")
    _link(packages, view)
    for pattern in left_out:
        found = list(view.glob(pattern))
        assert found, pattern
        for path in found:
            path.unlink()
    learns = """
import torch
layer = torch.nn.Linear(8, 8)
optimiser = torch.optim.AdamW(layer.parameters())
layer(torch.ones(1, 8)).sum().backward()
optimiser.step()
print(torch.__file__)
"""
    done = subprocess.run(
        # Without the folder of packages that this Python knows by itself.
        [sys.executable, "-S", "-c", learns],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(view), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(view)


def _link(source: Path, view: Path) -> None:
    """Libraries find each other by folders beside their own, which have to be the view's; all else is a link."""
    view.mkdir()
    for path in source.iterdir():
        if path.name in ("torch", "nvidia", "lib") or (source.name == "nvidia" and (path / "lib").is_dir()):
            _link(path, view / path.name)
        else:
            (view / path.name).symlink_to(path)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """What the stages `package` and `kernels` of the image make, by their own commands but for pip and apt."""
    told = [rest for name, rest in instructions(SLIPSTREAM) if name == "RUN"]
    [compiles] = [rest for rest in told if rest.startswith("python -m serving")]
    root = tmp_path_factory.mktemp("image")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(root)
    words = [sys.executable, *compiles.split()[1:]]
    subprocess.run(words, cwd=root, check=True, env=_in_image(root, os.environ["PATH"]))
    for path in sorted(root.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    return root


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++: make system-packages installs it")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="there are kernels for x86-64 alone")
def test_the_image_has_kernels_for_both_instruction_sets_and_needs_no_compiler(image: Path, tmp_path: Path) -> None:
    """Nor a folder that it could write to, as its /tmp runs nothing."""
    shipped = image / "serving" / "local" / "kernels" / "shipped"
    assert len(list(shipped.glob("kernels-*.so"))) == 2
    shows = """
import serving, torch
from serving.local.kernels import build
print(serving.__file__)
print("expected" if build.available() else "none")
build.found_kernels()
for each in build.available():
    build.available = lambda: [each]
    build.found_kernels.cache_clear()
    assert build.found_kernels() is not None
"""
    (empty := tmp_path / "empty").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", shows],
        cwd=empty,
        env=_in_image(image, str(empty)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    place, has, *logged = done.stdout.splitlines()
    assert Path(place).parent.parent == image
    assert all("with kernels of our own" in line for line in logged) is (has == "expected")
    assert not list(empty.iterdir())


def _in_image(root: Path, path: str) -> dict[str, str]:
    return {"PATH": path, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/dev/null"}


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

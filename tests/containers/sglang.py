"""What stands in for the image of SGLang's makers: SGLang's Python packages on Debian, as they are locked.

Its CUDA kernels are left out; the operators for CPUs of `tests/sglang/ops` have their name.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from packaging.requirements import Requirement

from tests.deploy.compose import ROOT

SITE = ROOT / ".venv-sglang" / "lib" / "python3.11" / "site-packages"
"""Of the environment that `make test-sglang` uses; Debian 12 has the same Python."""
_IN_IMAGE = "usr/local/lib/python3.11/site-packages"
_LEFT_OUT = re.compile(rf"\./((proc|sys|dev)/|{_IN_IMAGE}/(setuptools|pkg_resources|_distutils_hack|distutils-))")
"""Mounted by the kernel, or in the packages in another version."""
_OPERATORS = ROOT / "tests" / "sglang" / "ops" / "sgl_kernel"
_ONLY_ON_GPU = re.compile(
    r"sgl_kernel/|flashinfer/data/|nvidia/cudnn/lib/libcudnn_|nvidia/cu13/lib/libcusolver|nvidia/cu13/(bin|nvvm)/"
)
"""Gigabytes that a CPU does not load."""


def pack(root: Path, into: IO[bytes]) -> None:
    """Write a Debian that has Python in `root`, with the packages in it, as an archive of tar."""
    with tarfile.open(fileobj=into, mode="w|") as archive:
        archive.add(root, ".", filter=_kept)
        for path in sorted(set(_files())):
            archive.add(path, f"{_IN_IMAGE}/{path.relative_to(SITE)}", recursive=False)
        for path in sorted(_OPERATORS.glob("*.py")):
            archive.add(path, f"{_IN_IMAGE}/sgl_kernel/{path.name}")


def _kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if _LEFT_OUT.match(member.name) else member


def _files() -> Iterator[Path]:
    """Of SGLang and of what it needs: nothing that only the plugin or the tests need is among them."""
    for package in _needed("sglang"):
        for name in package.files or ():
            path = SITE / name
            if ".." in name.parts or _ONLY_ON_GPU.match(str(name)) or not path.exists():
                continue
            yield path
            if path.suffix == ".py":
                # As an installation of pip's has it: without it, every start compiles thousands of modules.
                yield from (path.parent / "__pycache__").glob(f"{path.stem}.cpython-311.pyc")


def _needed(name: str) -> list[importlib.metadata.Distribution]:
    installed = {
        _normal(each.metadata["Name"]): each for each in importlib.metadata.distributions(path=[os.fspath(SITE)])
    }
    seen: set[tuple[str, str]] = set()
    waiting = [(name, "")]
    while waiting:
        name, extra = each = waiting.pop()
        if each in seen or name not in installed:
            continue
        seen.add(each)
        for requirement in map(Requirement, installed[name].requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                waiting += [(_normal(requirement.name), extra) for extra in ("", *requirement.extras)]
    return [installed[name] for name in sorted({name for name, _ in seen})]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()

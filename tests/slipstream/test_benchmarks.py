"""Every module of benchmarks/ can be imported, and every script explains its options."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator

import pytest

import benchmarks

MODULES = [module.name for module in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.")]


@pytest.fixture
def asked_for_help() -> Iterator[None]:
    before = list(sys.argv)
    sys.argv[1:] = ["--help"]
    yield
    sys.argv[:] = before


@pytest.mark.usefixtures("asked_for_help")
@pytest.mark.parametrize("name", MODULES)
def test_it_is_imported_and_a_script_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(name)
    if hasattr(module, "main") and name.count(".") == 1:
        with pytest.raises(SystemExit) as ended:
            module.main()
        assert ended.value.code == 0
        assert "usage:" in capsys.readouterr().out.lower()


def test_scripts_keep_their_names() -> None:
    kept = "bad_inputs chaos demo kills repeats rollout_sim serving sglang_cpu soak"
    assert {f"benchmarks.{name}" for name in kept.split()} <= set(MODULES)

"""Every module of benchmarks/ can be imported, and every script explains its options."""

from __future__ import annotations

import importlib
import os
import pkgutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import benchmarks
from benchmarks.common.report import parser

MODULES = [module.name for module in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.")]


@pytest.fixture(autouse=True)
def a_script_may_end_this_process() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("name", MODULES)
def test_it_is_imported_and_a_script_explains_itself(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [name, "--help"])
    module = importlib.import_module(name)
    if hasattr(module, "main") and name.count(".") == 1:
        with pytest.raises(SystemExit) as ended:
            module.main()
        assert ended.value.code == 0
        assert "usage:" in capsys.readouterr().out.lower()


def test_prompts_that_cannot_be_read_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "not.jsonl").write_text('{"domain": "math"}\n')
    for name in ("missing.jsonl", "not.jsonl"):
        with pytest.raises(SystemExit) as ended:
            parser("Anything").parse_args(["--prompts", str(tmp_path / name)])
        assert ended.value.code == 2
        assert name in capsys.readouterr().err.splitlines()[-1]


def test_a_script_that_is_told_to_end_leaves_nothing_behind() -> None:
    """What it has started ends as the exception passes."""
    parser("Anything")
    with pytest.raises(SystemExit) as ended:
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM


def test_scripts_keep_their_names() -> None:
    kept = "bad_inputs chaos demo kills repeats rollout_sim serving sglang_cpu soak"
    assert {f"benchmarks.{name}" for name in kept.split()} <= set(MODULES)

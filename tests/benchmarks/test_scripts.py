"""Every module of benchmarks/ can be imported, and every script explains its options."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import benchmarks
from benchmarks.common.report import parser, percentile
from benchmarks.gpu import __main__ as gpu

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


def test_a_percentile_is_no_more_than_the_largest_value() -> None:
    assert [percentile(values, 99) for values in ([3.0], [1.0, 3.0], [3.0] * 200)] == [3.0, pytest.approx(2.98), 3.0]
    assert percentile([1.0, 2.0, 9.0], 50) == 2.0


def test_a_stage_runs_again_on_another_machine_or_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran, counts = list[str](), list[int]()

    def run(name: str, *, quick: bool) -> dict[str, object]:
        ran.append(name)
        return {"tests": {"passed": 1, "failed": 0, "skipped": 0}}

    monkeypatch.setattr(gpu, "_run", run)
    for device, *more in (("cpu",), ("cpu",), ("H200",), ("H200", "--quick"), ("H200", "--quick", "--again")):
        monkeypatch.setattr(gpu, "_machine", lambda _, device=device: {"device": device})
        monkeypatch.setattr("sys.argv", ["gpu", "--stage", "2", "--folder", str(tmp_path), *more])
        with pytest.raises(SystemExit):
            gpu.main()
        counts.append(len(ran))
    assert counts == [1, 1, 2, 3, 4]


@pytest.mark.parametrize("is_named", [False, True])
def test_a_run_on_a_gpu_leaves_a_json_file_and_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_named: bool
) -> None:
    figures = {"ms_a_token": {}, "report": {"captured": "3", "dropped_by_reason": "inconsistent=9"}}
    monkeypatch.setattr(gpu, "_run", lambda *_, **__: {**figures, "swaps": {"stall_ms": [1.5]}})
    monkeypatch.setattr(gpu, "_machine", lambda _: {"device": "cpu"})
    file = tmp_path / "own.json" if is_named else tmp_path / "stages" / "figures.json"
    named = ["--json", str(file)] if is_named else []
    monkeypatch.setattr("sys.argv", ["gpu", "--stage", "4", "--folder", str(tmp_path / "stages"), *named])
    with pytest.raises(SystemExit):
        gpu.main()
    assert json.loads(file.read_text())["drafting"]["seconds"] >= 0
    page = file.with_suffix(".md").read_text()
    for part in ("| stage drafting | 0", "dropped: inconsistent=9; SGLang simulates", f"[{file.name}]"):
        assert part in page
    assert f"figures in {file}, as a page in {file.with_suffix('.md')}" in capsys.readouterr().out


def test_the_stage_of_the_server_tests_capture_depth_swaps_and_trees() -> None:
    assert {Path(path).stem for path in gpu._SERVER_TESTS} >= {"test_capture", "test_depth", "test_swap", "test_tree"}
    assert all(
        (Path(benchmarks.__file__).parent.parent / path).exists() for path in (*gpu._SERVER_TESTS, *gpu._DEVICE_TESTS)
    )


def test_scripts_keep_their_names() -> None:
    kept = "bad_inputs chaos demo kills repeats rollout_sim serving sglang_cpu soak"
    assert {f"benchmarks.{name}" for name in kept.split()} <= set(MODULES)

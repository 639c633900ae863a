"""Generated inputs do no harm: a small share of what benchmarks/bad_inputs.py tries. Requests: test_api.py."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.hostile import line_files, model_folders, redis_urls, traces
from tests.hostile.api import judged
from tests.hostile.judge import Choose, FailureError, Tally, tallied


@pytest.fixture
def choose() -> Choose:
    return random.Random(0).randrange


def test_files_of_lines_are_read_or_refused_in_one_line_that_names_them(tmp_path: Path, choose: Choose) -> None:
    tally = tallied("prompt files", line_files.inputs(tmp_path / "f.jsonl", choose, 60))
    tally.check()
    assert set(tally.outcomes) == {"read", "refused"}


def test_model_folders_are_served_or_refused_by_every_command_alike(tmp_path: Path, choose: Choose) -> None:
    folders = model_folders.ModelFolders(tmp_path)
    assert model_folders.attempt(tmp_path / "whole") == "served"
    tally = tallied("model folders", folders.inputs(choose, 40))
    tally.check()
    assert tally.outcomes["refused"] > 10


def test_redis_urls_work_or_are_refused_in_one_line(redis_url: str, choose: Choose) -> None:
    tally = tallied("Redis URLs", redis_urls.inputs(choose, redis_url, 150))
    tally.check()
    assert set(tally.outcomes) == {"works", "ConfigError", "StreamError"}


def test_mutated_recordings_are_refused_or_their_damage_is_counted(tmp_path: Path, choose: Choose) -> None:
    tally = tallied("recordings", traces.mutated_recordings(tmp_path / "mutated.rec", choose, 60))
    tally.check()
    assert len(tally.outcomes) > 1


def test_failures_and_hangs_are_counted() -> None:
    tally = Tally("surface", deadline_s=0.05)
    with pytest.raises(AssertionError, match="nothing was tried"):
        tally.check()
    tally.take("good", lambda: "400")
    tally.check()
    tally.take("crash", lambda: str(1 / 0))
    with pytest.raises(AssertionError, match="crash: ZeroDivisionError"):
        tally.check()
    tally.failures.clear()
    tally.take("sleeper", lambda: str(time.sleep(60)))
    with pytest.raises(AssertionError, match="sleeper"):
        tally.check()
    assert (tally.num_inputs, tally.outcomes) == (2, {"400": 1})


@pytest.mark.parametrize(("status", "content"), [(500, b""), (503, b""), (200, b'data: {"error": "internal_error"}')])
def test_server_errors_are_failures(status: int, content: bytes) -> None:
    with pytest.raises(FailureError):
        judged(status, content, "it")
    assert judged(400, b"{}", "it") == "400"

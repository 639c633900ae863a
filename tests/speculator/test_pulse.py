"""Pages of memory between engines and whoever shares their machine."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from speculator import pulse
from speculator.errors import ConfigError
from speculator.pulse import RING, Pulse, PulseBoard


@pytest.fixture
def now_ns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The clock of both sides; every look is also a scan."""
    now = [10**12]
    monkeypatch.setattr("time.monotonic_ns", lambda: now[0])
    monkeypatch.setattr(pulse, "RESCAN_S", -1.0)
    return now


def test_what_an_engine_does_is_seen_at_once(tmp_path: Path, now_ns: list[int]) -> None:
    board = PulseBoard(tmp_path / "pulse")
    assert board.look() == (0, False, 0), "a folder that is not there yet"
    engine = Pulse(tmp_path / "pulse")
    assert board.look() == (1, False, 0)
    engine.beat(num_waiting=3)
    assert board.look() == (1, True, 3)
    engine.rest()
    assert board.look() == (1, False, 0)
    engine.close()
    assert board.look().num_engines == 0
    board.close()


def test_steps_are_told_once_with_their_times_and_shapes(tmp_path: Path, now_ns: list[int]) -> None:
    engine, board = Pulse(tmp_path), PulseBoard(tmp_path)
    board.look()
    start_ns = now_ns[0]
    engine.beat()
    engine.about(2, 200)
    now_ns[0] += 30
    engine.beat()
    engine.about(2, 208)
    now_ns[0] += 20
    engine.rest()
    engine.rest()
    now_ns[0] += 1000
    first, second = board.steps()
    assert first[1:3] == (start_ns, start_ns + 30)
    assert second[1:3] == (start_ns + 30, start_ns + 50), "a rest ends a step, once"
    assert first.shape == second.shape, "200 tokens take about as long as 208"
    assert board.steps() == []
    engine.beat()
    engine.about(3, 200)
    engine.rest()
    assert board.steps()[0].shape != first.shape
    board.close()
    engine.close()


def test_an_engine_that_cannot_tell_a_break_counts_as_busy_for_a_while(tmp_path: Path, now_ns: list[int]) -> None:
    engine, board = Pulse(tmp_path, linger_s=0.03), PulseBoard(tmp_path)
    board.look()
    begun_ns = now_ns[0]
    engine.beat()
    now_ns[0] += 5
    engine.rest()
    now_ns[0] += 29_000_000
    assert board.look().is_busy
    assert board.steps() == [], "what it launched may still run: the next step's beginning is this one's end"
    engine.beat()
    assert [step[1:3] for step in board.steps()] == [(begun_ns, now_ns[0])]
    engine.rest()
    now_ns[0] += 31_000_000
    assert not board.look().is_busy
    engine.beat()
    assert board.steps() == [], "a break is no part of a step"
    board.close()
    engine.close()


def test_after_a_long_silence_the_newest_steps_are_left(tmp_path: Path, now_ns: list[int]) -> None:
    engine, board = Pulse(tmp_path), PulseBoard(tmp_path)
    board.look()
    for _ in range(3 * RING):
        engine.beat()
        now_ns[0] += 1
    engine.rest()
    ends_ns = [step.end_ns for step in board.steps()]
    assert RING // 2 < len(ends_ns) <= RING
    assert ends_ns == list(range(now_ns[0] - len(ends_ns) + 1, now_ns[0] + 1))
    board.close()
    engine.close()


@pytest.mark.parametrize("num_meanwhile", [0, 1, 20, 3 * RING])
def test_steps_that_are_overwritten_while_they_are_read_are_not_told(
    tmp_path: Path, now_ns: list[int], num_meanwhile: int
) -> None:
    """A trainer that gives way may lose its core anywhere."""
    engine, board = Pulse(tmp_path), PulseBoard(tmp_path)
    board.look()

    def work(num_steps: int) -> None:
        for _ in range(num_steps):
            engine.beat()
            now_ns[0] += 7
        engine.rest()

    work(2 * RING)
    page = next(iter(board._pages.values()))
    page.words = Interrupted(page.words, 30, lambda: work(num_meanwhile))  # type: ignore[assignment]
    steps = board.steps()
    assert {step.end_ns - step.begin_ns for step in steps} <= {7}
    assert RING - 1 - num_meanwhile <= len(steps) <= max(RING - 1 - num_meanwhile, 0)
    board.close()
    engine.close()


class Interrupted:
    """Words of a page, whose reader loses its core after so many of them."""

    def __init__(self, words: memoryview, num_read: int, meanwhile: Callable[[], None]) -> None:
        self._words, self._left, self._meanwhile = words, num_read, meanwhile

    def __getitem__(self, at: int) -> int:
        self._left -= 1
        if self._left == 0:
            self._meanwhile()
        return int(self._words[at])


def test_an_engine_that_was_killed_is_busy_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "RESCAN_S", -1.0)
    words = "import sys, pathlib; from speculator.pulse import Pulse; p = Pulse(pathlib.Path(sys.argv[1]))"
    code = f"{words}; p.beat(); print('busy', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as engine:
        assert engine.stdout is not None
        engine.stdout.readline()
        board = PulseBoard(tmp_path)
        assert board.look()[:2] == (1, True)
        engine.kill()
        engine.wait()
    assert board.look() == (0, False, 0)
    assert list(tmp_path.iterdir()) == [], "its page is cleared away"
    board.close()


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    engine = Pulse(tmp_path)
    page = next(tmp_path.iterdir())
    (tmp_path / "empty.pulse").touch()
    (tmp_path / "other.pulse").write_bytes(bytes(page.stat().st_size))
    (tmp_path / "link.pulse").symlink_to(page)
    (tmp_path / "folder.pulse").mkdir()
    os.mkfifo(tmp_path / "pipe.pulse")
    board = PulseBoard(tmp_path)
    assert board.look().num_engines == 1
    assert len(list(tmp_path.iterdir())) == 6
    board.close()
    engine.close()


def test_a_file_that_cannot_be_mapped_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Pulse(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("mmap length is greater than file size")

    with monkeypatch.context() as patched:
        patched.setattr(pulse.mmap, "mmap", refuse)
        board = PulseBoard(tmp_path)
        assert board.look().num_engines == 0
    board.close()
    engine.close()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file cannot be used"):
        Pulse(tmp_path / "file")


def test_a_folder_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(ConfigError, match="No space left"):
        Pulse(tmp_path)
    assert list(tmp_path.iterdir()) == []

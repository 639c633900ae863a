"""Child processes: they share their parent's session, and its share of a core, but not its Ctrl-C; pause and stop."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil

from slipstream.children import Child
from tests.fixtures.waiting import wait_until


def test_a_child_is_of_the_same_session_and_not_of_the_group_that_ctrl_c_ends(tmp_path: Path) -> None:
    child = Child("help", ["--help"], log_path=tmp_path / "help.log", num_threads=1)
    try:
        assert os.getsid(child.pid) == os.getsid(0)
        assert os.getpgid(child.pid) == child.pid != os.getpgid(0)
    finally:
        child.stop()


def test_a_paused_child_computes_nothing_and_can_be_stopped(tmp_path: Path) -> None:
    child = Child("help", ["--help"], log_path=tmp_path / "help.log", num_threads=1)
    try:
        child.pause()
        process = psutil.Process(child.pid)
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED)
        child.check()
        child.resume()
        wait_until(lambda: process.status() != psutil.STATUS_STOPPED)
        child.pause()
    finally:
        child.stop(timeout_s=20)
    assert child.returncode == -signal.SIGTERM, "it was told to end, not killed"

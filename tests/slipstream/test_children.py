"""Child processes: they share their parent's session, and its share of a core, but not its Ctrl-C; pause and stop."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

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


_PARENT = """
import sys, tempfile, time
from pathlib import Path
from slipstream.children import running_child

folder = Path(sys.argv[1])
sys.executable = str(folder / "sleeps")
with running_child("serve", [], folder) as child:
    print(child.pid, flush=True)
    if sys.argv[2] == "paused":
        child.pause()
    time.sleep(60)
"""


@pytest.mark.parametrize("state", ["running", "paused"])
def test_a_child_ends_with_a_parent_that_was_killed(tmp_path: Path, state: str) -> None:
    """Otherwise it would keep its port and its cores until somebody finds it."""
    (tmp_path / "sleeps").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "sleeps").chmod(0o700)
    with subprocess.Popen([sys.executable, "-c", _PARENT, tmp_path, state], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        if state == "paused":
            wait_until(lambda: child.status() == psutil.STATUS_STOPPED)
        parent.kill()
    try:
        wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()

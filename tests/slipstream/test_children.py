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

from serving.sglang.outside.launcher import check_interpreter
from slipstream.children import Child
from speculator.errors import ConfigError
from speculator.host import path_option
from tests.fixtures.waiting import wait_until


def test_a_child_is_of_the_same_session_and_not_of_the_group_that_ctrl_c_ends(tmp_path: Path) -> None:
    child = Child("help", ["--help"], log_path=tmp_path / "help.log")
    try:
        assert os.getsid(child.pid) == os.getsid(0)
        assert os.getpgid(child.pid) == child.pid != os.getpgid(0)
    finally:
        child.stop()


def test_a_paused_child_computes_nothing_and_can_be_stopped(tmp_path: Path) -> None:
    child = Child("help", ["--help"], log_path=tmp_path / "help.log")
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


def test_a_paused_child_is_told_to_end_and_ends_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = (
        "import signal\nsignal.signal(signal.SIGTERM, lambda *_: exit(7))\nprint('ready', flush=True)\nsignal.pause()\n"
    )
    (tmp_path / "ends").write_text(f"#!{sys.executable}\n{ends}")
    (tmp_path / "ends").chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "ends"))
    child = Child("serve", ["serve"], log_path=tmp_path / "serve.log")
    try:
        wait_until(lambda: (tmp_path / "serve.log").read_text() == "ready\n")
        child.pause()
        wait_until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_STOPPED)
    finally:
        child.stop(timeout_s=10)
    assert child.returncode == 7


def test_a_child_gets_no_key_of_this_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("API_KEY", "GATEWAY_ADMIN_KEY", "GATEWAY_ADMIN_KEY_FILE", "GATEWAY_KEYS_FILE"):
        monkeypatch.setenv(f"SLIPSTREAM_{name}", "canary-of-a-key")
    child = Child("help", ["--help"], log_path=tmp_path / "help.log")
    try:
        assert b"canary-of-a-key" not in Path(f"/proc/{child.pid}/environ").read_bytes()
    finally:
        child.stop()


def test_a_child_that_does_not_end_when_told_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stays").write_text("#!/bin/sh\ntrap '' TERM\necho ready\nexec sleep 60\n")
    (tmp_path / "stays").chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "stays"))
    child = Child("serve", ["serve"], log_path=tmp_path / "serve.log")
    wait_until(lambda: (tmp_path / "serve.log").read_text() == "ready\n")
    child.stop(timeout_s=0.1)
    assert child.returncode == -signal.SIGKILL


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


_STARTS = """
from pathlib import Path
from slipstream.children import Child
child = Child("help", ["train", "--help"], log_path=Path("help.log"))
child._process.wait()
raise SystemExit(child.returncode)
"""


def test_files_in_the_working_directory_are_not_taken_for_our_packages(tmp_path: Path) -> None:
    """A project beside which a server runs may have a `trainer.py`; the command itself does not look there."""
    (tmp_path / "slipstream.py").write_text("raise SystemExit(3)")
    own = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-P", "-c", _STARTS], cwd=tmp_path, env=own, check=False)
    assert done.returncode == 0, (tmp_path / "help.log").read_text()


def test_a_child_of_a_checkout_that_is_not_installed_still_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [os.getcwd(), *sys.path])
    assert path_option() == []
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", os.getcwd())])
    assert path_option() == ["-P"]


def test_a_folder_named_sglang_is_not_taken_for_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sglang").mkdir()
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", os.getcwd())])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="has no SGLang"):
        check_interpreter(Path(sys.executable))

"""What a child process shares with its parent: the session, and with it the share of a core, but not the Ctrl-C."""

from __future__ import annotations

import os
from pathlib import Path

from slipstream.processes import Child


def test_a_child_is_of_the_same_session_and_not_of_the_group_that_ctrl_c_ends(tmp_path: Path) -> None:
    child = Child("help", ["--help"], log_path=tmp_path / "help.log", num_threads=1)
    try:
        assert os.getsid(child.pid) == os.getsid(0)
        assert os.getpgid(child.pid) == child.pid != os.getpgid(0)
    finally:
        child.stop()

"""Run Slipstream's services as processes that can be killed and restarted, and wait for conditions."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

DRAFT_VOCAB_SIZE = 24
STREAM_MAX_BYTES = 256 << 20
"""Larger than all traces of a run: otherwise the backlog of a trainer that is killed so often would be trimmed, which
would hide other losses."""
TRAINER_ENVIRONMENT = {
    "SLIPSTREAM_TRAINER_CHECKPOINT_INTERVAL_S": "0.2",
    "SLIPSTREAM_TRAINER_PUBLISH_INTERVAL_S": "1",
    "SLIPSTREAM_TRAINER_PUBLISH_MIN_TOKENS": "500",
    "SLIPSTREAM_TRAINER_NICE": "0",
    "SLIPSTREAM_TRAINER_STREAM_MAX_BYTES": str(STREAM_MAX_BYTES),
    # The service that starts first writes the first version, so all need the same setting.
    "SLIPSTREAM_TRAINER_DRAFT_VOCAB_SIZE": str(DRAFT_VOCAB_SIZE),
}


class Service:
    """One service, which is killed and restarted."""

    def __init__(self, folder: Path, name: str, words: list[str]) -> None:
        self._notes, self.log = folder / f"{name}.notes", folder / f"{name}.log"
        self._words = words
        self._nursery = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.faults.witness", str(self._notes), str(self.log)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # A fork has one thread; libraries start theirs when they are imported.
            env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        )
        self.pid = 0
        self._ended = threading.Event()
        self._ended.set()
        self.status = 0

    @property
    def is_alive(self) -> bool:
        return not self._ended.is_set()

    def notes(self) -> list[str]:
        """Notes of all its processes so far, one a line."""
        return self._notes.read_text().splitlines()

    def start(self) -> None:
        """Start a new process; the last one must have ended."""
        assert self._nursery.stdin is not None
        assert self._nursery.stdout is not None
        self._ended.clear()
        self._nursery.stdin.write(json.dumps(self._words) + "\n")
        self._nursery.stdin.flush()
        self.pid = int(self._nursery.stdout.readline())
        threading.Thread(target=self._wait, daemon=True).start()

    def end(self, number: int, timeout_s: float = 60.0) -> int:
        """Send the signal and wait for the end; returns the exit code."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
            if not self._ended.wait(timeout_s):
                raise TimeoutError(f"{self._words[0]} did not end: {self.log.read_text()[-2000:]}")
        return self.status

    def close(self) -> None:
        self.end(signal.SIGKILL)
        assert self._nursery.stdin is not None
        self._nursery.stdin.close()
        self._nursery.wait()

    def _wait(self) -> None:
        assert self._nursery.stdout is not None
        self.status = int(self._nursery.stdout.readline())
        self._ended.set()


def wait(condition: Callable[[], object], what: str, timeout_s: float = 120.0) -> float:
    """Wait until the condition is true; returns the seconds. Raises TimeoutError."""
    started_s = time.monotonic()
    while not condition():
        if time.monotonic() - started_s > timeout_s:
            raise TimeoutError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(0.1)
    return time.monotonic() - started_s

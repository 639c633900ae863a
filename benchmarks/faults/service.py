"""Run Slipstream's services as processes that can be killed and restarted, and wait for conditions."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path

from tests.fixtures.preloaded import ForkedProcess, Preloaded

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


@functools.cache
def _witness() -> Preloaded:
    # A fork has one thread; libraries start theirs when they are imported.
    return Preloaded("benchmarks.faults.witness", {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"})


class Service:
    """One service, which is killed and restarted."""

    def __init__(self, folder: Path, name: str, words: list[str]) -> None:
        self._notes, self._log = folder / f"{name}.notes", folder / f"{name}.log"
        self._words = words
        self._process: ForkedProcess | None = None

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def notes(self) -> list[str]:
        """Notes of all its processes so far, one a line."""
        return self._notes.read_text().splitlines()

    def start(self) -> None:
        """Start a new process; the last one must have ended."""
        self._process = _witness().start([str(self._notes), *self._words], os.environ, self._log)

    def end(self, number: int, timeout_s: float = 60.0) -> int:
        """Send the signal and wait for the end; returns the exit code. Raises subprocess.TimeoutExpired."""
        assert self._process is not None
        self._process.send_signal(number)
        return self._process.wait(timeout_s)


def wait(condition: Callable[[], object], what: str, timeout_s: float = 120.0) -> float:
    """Wait until the condition is true; returns the seconds. Raises TimeoutError."""
    started_s = time.monotonic()
    while not condition():
        if time.monotonic() - started_s > timeout_s:
            raise TimeoutError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(0.1)
    return time.monotonic() - started_s

"""Child processes of the demo and benchmarks: with their own thread limits, logged to files, always ended by us."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import httpx

from speculator.errors import ConfigError, SlipstreamError


class ChildError(SlipstreamError):
    """A child process ended when it should have been running, with the end of its log."""


KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""For a trainer. Each step allocates the same tens of megabytes. Left alone, glibc gives them back to the kernel, which
clears each page again: ten thousand page faults a step. See mallopt(3)."""


def _environment(command: str, num_threads: int) -> dict[str, str]:
    # Passive waiting: a thread pool that spins would take the core from the other process.
    told = {**os.environ, "OMP_NUM_THREADS": str(num_threads), "OMP_WAIT_POLICY": "PASSIVE"}
    if command == "train":
        told = {**KEEP_FREED_MEMORY, **told}
    # This shell may have the settings of a deployment: the demo's own clients on loopback have neither key nor proxy,
    # and each server is told on its command line whether it captures.
    for name in ("GATEWAY_KEYS_FILE", "GATEWAY_AUTH_ELSEWHERE", "CAPTURE"):
        told.pop(f"SLIPSTREAM_{name}", None)
    return told


class Child:
    """One `slipstream …` process; `log_path` receives everything it prints.

    It runs in a process group of its own, so that Ctrl-C reaches the parent alone, which then ends its children in
    order; but in the same session: Linux may give sessions equal shares of a core, whatever the niceness within them.
    """

    def __init__(self, name: str, arguments: list[str], *, log_path: Path, num_threads: int) -> None:
        self.name, self._log_path = name, log_path
        self._log: IO[bytes] = log_path.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "slipstream", *arguments],
            env=_environment(arguments[0], num_threads),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            process_group=0,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def check(self) -> None:
        """Raise ChildError when the process has ended."""
        if self._process.poll() is not None:
            tail = "\n".join(self._log_path.read_text(errors="replace").splitlines()[-12:])
            raise ChildError(f"{self.name} ended with code {self._process.returncode}:\n{tail}")

    def pause(self) -> None:
        """It computes nothing until `resume`."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def stop(self, timeout_s: float = 30.0) -> None:
        """Ask it to end (SIGTERM), insist after `timeout_s`."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self.resume()  # a paused process takes no signal
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()


@contextlib.contextmanager
def running_child(name: str, arguments: list[str], folder: Path) -> Iterator[Child]:
    """`slipstream NAME …` with one thread, until the end of the block; it prints to NAME.log in the folder."""
    started = Child(name, [name, *arguments], log_path=folder / f"{name}.log", num_threads=1)
    try:
        yield started
    finally:
        started.stop()


def wait_until_ready(url: str, children: Sequence[Child], *, timeout_s: float) -> None:
    """Until the gateway takes requests. Raises ChildError where one of the children ends, ConfigError where
    it takes too long.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for one in children:
            one.check()
        # No proxy: it is on this machine.
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready", timeout=2, trust_env=False).status_code == 200:
                return
        time.sleep(0.2)
    raise ConfigError(f"the gateway was not ready after {timeout_s:.0f} s: see `slipstream doctor`")

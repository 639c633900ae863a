"""Run services as child processes, for `slipstream serve --learn`, the demo and benchmarks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from speculator.errors import SlipstreamError
from speculator.host import end_with_parent, path_option


class ChildError(SlipstreamError):
    """A child process ended unexpectedly; the message has the end of its log."""


KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""Environment of a trainer. Each step allocates the same tens of megabytes. By default glibc returns them to the
kernel, which clears each page again: ten thousand page faults a step. See mallopt(3)."""

KEYS_FILE = "SLIPSTREAM_GATEWAY_KEYS_FILE"
_NOT_INHERITED = (
    *(KEYS_FILE, "SLIPSTREAM_API_KEY", "SLIPSTREAM_GATEWAY_ADMIN_KEY", "SLIPSTREAM_GATEWAY_ADMIN_KEY_FILE"),
    *("SLIPSTREAM_GATEWAY_AUTH_ELSEWHERE", "SLIPSTREAM_CAPTURE"),
)
"""Server settings that children do not inherit from this shell: their keys, and whether they capture, are passed
explicitly."""


def _environment(command: str, settings: Mapping[str, str]) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    # Passive: OpenMP threads that spin while they wait would take the core from the other process.
    threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return {**(KEEP_FREED_MEMORY if command == "train" else {}), **inherited, **threads, **settings}


class Child:
    """One `slipstream …` process, with one thread to compute; `log_path` receives everything it prints.

    It runs in a process group of its own, so that Ctrl-C reaches only the parent, which then ends its children in
    order. It stays in the parent's session, because Linux may divide a core equally between sessions whatever the
    niceness of their processes.
    """

    def __init__(
        self,
        name: str,
        arguments: list[str],
        *,
        log_path: Path,
        settings: Mapping[str, str] | None = None,
        ends_with_us: bool = False,
    ) -> None:
        """`settings` are further variables of the child's environment. With `ends_with_us` the kernel signals the child
        to end when the thread that started it ends for any reason.
        """
        self.name, self.log_path = name, log_path
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *path_option(), "-m", "slipstream", *arguments],
                env=_environment(arguments[0], settings or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=partial(end_with_parent, os.getpid()) if ends_with_us else None,
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
        if self.returncode is not None:
            tail = "\n".join(self.log_path.read_text(errors="replace").splitlines()[-12:])
            raise ChildError(f"{self.name} ended with code {self.returncode}:\n{tail}")

    def pause(self) -> None:
        """Stop it from computing until `resume`."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def stop(self, timeout_s: float = 60.0) -> None:
        """Send SIGTERM, and SIGKILL after `timeout_s`: a trainer on a busy machine may take most of a minute."""
        if self.returncode is None:
            self._process.terminate()
            self.resume()  # a stopped process does not handle SIGTERM
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


@contextlib.contextmanager
def running_child(name: str, arguments: list[str], folder: Path, **settings: str) -> Iterator[Child]:
    """Run `slipstream NAME …` with one thread until the end of the block, or of the calling thread; its output goes to
    NAME.log in the folder.
    """
    log_path, words = folder / f"{name}.log", [name, *arguments]
    started = Child(name, words, log_path=log_path, settings=settings, ends_with_us=True)
    try:
        yield started
    finally:
        started.stop()

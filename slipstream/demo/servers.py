"""The servers of the demo and of benchmarks: services as child processes, and what their /metrics say."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from serving.speedup import HEAD_AB_ARMS, Sums
from speculator.errors import ConfigError, SlipstreamError


class ChildError(SlipstreamError):
    """A child process ended when it should have been running, with the end of its log."""


KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""For a trainer. Each step allocates the same tens of megabytes. By default glibc gives them back to the kernel, which
clears each page again: ten thousand page faults a step. See mallopt(3)."""

KEYS_FILE = "SLIPSTREAM_GATEWAY_KEYS_FILE"
_NOT_INHERITED = (KEYS_FILE, "SLIPSTREAM_GATEWAY_AUTH_ELSEWHERE", "SLIPSTREAM_CAPTURE")
"""Settings of a deployment that may be in this shell. The demo's clients have keys of their own or none, and the
command line tells each server whether it captures."""


def _environment(command: str, num_threads: int, settings: Mapping[str, str]) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    # Passive waiting: a thread pool that spins would take the core from the other process.
    threads = {"OMP_NUM_THREADS": str(num_threads), "OMP_WAIT_POLICY": "PASSIVE"}
    return {**(KEEP_FREED_MEMORY if command == "train" else {}), **inherited, **threads, **settings}


class Child:
    """One `slipstream …` process; `log_path` receives everything it prints.

    It runs in a process group of its own, so that Ctrl-C reaches the parent alone, which then ends its children in
    order. It stays in the parent's session: Linux may share a core equally between sessions, whatever the niceness
    within them.
    """

    def __init__(
        self,
        name: str,
        arguments: list[str],
        *,
        log_path: Path,
        num_threads: int,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """`settings` are variables of its environment beside those of this process."""
        self.name, self._log_path = name, log_path
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "slipstream", *arguments],
                env=_environment(arguments[0], num_threads, settings or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
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
        if self.returncode is not None:
            tail = "\n".join(self._log_path.read_text(errors="replace").splitlines()[-12:])
            raise ChildError(f"{self.name} ended with code {self.returncode}:\n{tail}")

    def pause(self) -> None:
        """Stop it from computing until `resume`."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def stop(self, timeout_s: float = 30.0) -> None:
        """Ask it to end (SIGTERM), kill it after `timeout_s`."""
        if self.returncode is None:
            self._process.terminate()
            self.resume()  # a paused process takes no signal
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


@contextlib.contextmanager
def running_child(name: str, arguments: list[str], folder: Path, **settings: str) -> Iterator[Child]:
    """Run `slipstream NAME …` with one thread until the end of the block; it prints to NAME.log in the folder."""
    started = Child(name, [name, *arguments], log_path=folder / f"{name}.log", num_threads=1, settings=settings)
    try:
        yield started
    finally:
        started.stop()


def wait_until_ready(url: str, children: Sequence[Child], *, timeout_s: float) -> None:
    """Wait until the gateway takes requests.

    Raises ChildError where one of the children ends, ConfigError where it takes too long.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for child in children:
            child.check()
        # No proxy: it is on this machine.
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready", timeout=2, trust_env=False).status_code == 200:
                return
        time.sleep(0.2)
    raise ConfigError(f"the gateway was not ready after {timeout_s:.0f} s: see `slipstream doctor`")


_COUNTED = ("_total", "_count", "_sum", "_bucket")
"""How the series end that only ever grow."""


@dataclass(frozen=True)
class Scrape:
    """All series of one scrape: (name, sorted labels) → value. `at_s` is seconds since the traffic began."""

    at_s: float
    values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = field(repr=False)

    @classmethod
    def parse(cls, at_s: float, text: str) -> Scrape:
        values = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        return cls(at_s, values)

    def since(self, first: Scrape) -> Scrape:
        """What counters gained from `first` on; `at_s` is how many seconds that took."""
        gained = {series: value - first.values.get(series, 0.0) for series, value in self.values.items()}
        return Scrape(self.at_s - first.at_s, gained)

    def going_on(self, before: Scrape) -> Scrape:
        """This one with the counters of an engine that was restarted after `before` going on from there."""
        counted = {series: value for series, value in before.values.items() if series[0].endswith(_COUNTED)}
        together = {series: self.values.get(series, 0.0) + value for series, value in counted.items()}
        return Scrape(self.at_s, {**self.values, **together})

    def total(self, name: str, **labels: str) -> float:
        """Sum of the series of `name` that carry `labels`."""
        return sum(value for (series, has), value in self.values.items() if series == name and labels.items() <= {*has})

    @property
    def accept_length(self) -> float | None:
        """Tokens per verification of a drafting round, bonus included; control rounds do not count."""
        verifications = self.total("slipstream_verifications_total")
        return self.total("slipstream_verified_tokens_total") / verifications if verifications else None

    @property
    def head_ab(self) -> Sums:
        """Rounds with remembered text alone, and those with the draft head beside it."""
        return self._sums("slipstream_head_ab_rounds", "slipstream_head_ab_round_{}", "arm", HEAD_AB_ARMS)

    @property
    def rounds_ab(self) -> Sums:
        """Rounds in which nobody was drafted for, and those with drafts."""
        return self._sums("slipstream_rounds", "slipstream_round_{}", "mode", ("control", "speculative"))

    def _sums(self, counted: str, measured: str, label: str, arms: Sequence[str]) -> Sums:
        """By batch size; `arms` are the values of `label`, the baseline's first."""
        sums = Sums()
        for (series, labels), rounds in self.values.items():
            of = dict(labels)
            if series == f"{counted}_total" and of[label] in arms:
                # The first round of a batch size may be half counted.
                seconds, tokens = (
                    self.values.get((f"{measured.format(what)}_total", labels), 0.0) for what in ("seconds", "tokens")
                )
                sums.add(int(of["batch"]), of[label] == arms[1], seconds, int(tokens), int(rounds))
        return sums

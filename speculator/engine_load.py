"""How busy an engine is. Its report in Redis says so, to a trainer on the same machine."""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

LINGER_S = 0.03
"""A pause between two steps that is no longer counts as busy: a GPU may still compute what the step launched."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@cache
def machine_id() -> str:
    """The same in all processes of a machine, in containers too, until it restarts; its host name outside Linux."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return platform.node()


class EngineLoad:
    """Measures the share of time that an engine spends in steps.

    The engine's thread calls `stepping`, another thread `report`. Neither waits for the other: the share may be off by
    one step.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._busy_s, self._changed_s, self._is_stepping = 0.0, clock() - LINGER_S, False
        self._reported_busy_s, self._reported_s = 0.0, clock()

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Enclose one step of the engine."""
        self._change(is_stepping=True)
        try:
            yield
        finally:
            self._change(is_stepping=False)

    def report(self) -> dict[str, str | float]:
        """Fields of the engine's report: its machine, and `busy`, the share of time in steps since the last call."""
        now_s = self._clock()
        busy_s = self._busy_s + (now_s - self._changed_s if self._is_stepping else 0.0)
        share = (busy_s - self._reported_busy_s) / max(now_s - self._reported_s, 1e-6)
        self._reported_busy_s, self._reported_s = busy_s, now_s
        return {"machine": machine_id(), "busy": round(min(max(share, 0.0), 1.0), 3)}

    def _change(self, *, is_stepping: bool) -> None:
        now_s = self._clock()
        passed_s = now_s - self._changed_s
        if self._is_stepping or passed_s < LINGER_S:
            self._busy_s += passed_s
        self._changed_s, self._is_stepping = now_s, is_stepping


def busiest_here(reports: Mapping[str, Mapping[str, str]]) -> float:
    """Return how busy the busiest engine of this machine is, from 0 to 1; 0 where none reports. `reports` are fields
    by engine id, as `DraftPointer.engines` reads them.
    """
    return max((_busy(report) for report in reports.values() if report.get("machine") == machine_id()), default=0.0)


def _busy(report: Mapping[str, str]) -> float:
    """0 for what cannot be read: the engine may be of another release."""
    with contextlib.suppress(ValueError):
        if 0 <= (busy := float(report.get("busy", ""))) <= 1:
            return busy
    return 0.0

"""Keeps the draft in service equal to the draft that is desired: reads the pointer, swaps, reports what happened.

A loop on its own thread. It waits for the poll interval or the stop; when Redis is away it keeps the version in
service and asks again with growing pauses; a version whose file is refused is remembered and not tried again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from serving.engine import SwapReport
from speculator.errors import DraftError, EngineBusyError, EngineError, StoreError, StreamError

log = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 10.0
_REPORT_EVERY_POLLS = 4


class SwapsDrafts(Protocol):
    """What the follower needs of an engine; see `serving.engine.Engine`."""

    @property
    def draft_version(self) -> int: ...

    def install_draft(self, version: int) -> SwapReport: ...


class Pointer(Protocol):
    """Where the desired version stands and engines report theirs; implemented by `speculator.stream`."""

    def desired(self) -> int | None: ...

    def report_engine(self, engine_id: str, status: Mapping[str, str | int | float]) -> None: ...


@dataclass
class SwapLog:
    """What the follower did, for the status of this engine."""

    installed: list[tuple[float, SwapReport]] = field(default_factory=list)
    """(unix time in seconds, report), oldest first; the last 100."""
    refused: dict[int, str] = field(default_factory=dict)
    """Versions that can never be installed here, with the reason."""
    num_installed: int = 0
    num_failed: int = 0
    """Attempts that left the version before in service: refused files, and files or engines that could not be used."""

    def add(self, report: SwapReport) -> None:
        self.num_installed += 1
        self.installed.append((time.time(), report))
        del self.installed[:-100]


class DraftFollower:
    """Drives one engine towards the pointer's version.

    `on_swap` is told of each swap; `status` adds to what the engine reports.
    """

    def __init__(
        self,
        engine: SwapsDrafts,
        pointer: Pointer,
        *,
        engine_id: str,
        poll_s: float = 0.5,
        on_swap: Callable[[SwapReport], None] | None = None,
        status: Callable[[], Mapping[str, str | int | float]] = dict,
    ) -> None:
        self._engine, self._pointer, self._engine_id = engine, pointer, engine_id
        self._poll_s, self._on_swap, self._status = poll_s, on_swap, status
        self._reported_s: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="draft-follower", daemon=True)
        self.log = SwapLog()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        pause_s = self._poll_s
        while not self._stop.wait(pause_s):
            try:
                self.follow()
                pause_s = self._poll_s
            except (StreamError, StoreError, EngineError) as error:
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                log.warning("draft pointer not followed: %s (next look in %.1f s)", error, pause_s)

    def follow(self) -> None:
        """One look at the pointer, and a swap when it names another version than the one in service.

        Raises StreamError, StoreError or EngineError when this look came to nothing and the next may succeed.
        """
        desired = self._pointer.desired()
        try:
            if desired is not None and desired != self._engine.draft_version and desired not in self.log.refused:
                self._reported_s = None
                self._install(desired)
        finally:
            # Also where it came to nothing: an engine that falls silent would pass for dead.
            self._report()

    def _report(self) -> None:
        """Tell what is in service: at once after an attempt to change it, now and then otherwise."""
        now_s = time.monotonic()
        if self._reported_s is not None and now_s - self._reported_s < _REPORT_EVERY_POLLS * self._poll_s:
            return
        self._pointer.report_engine(
            self._engine_id,
            {
                "version": self._engine.draft_version,
                "refused": ",".join(map(str, sorted(self.log.refused))),
                **self._status(),
            },
        )
        self._reported_s = now_s

    def _install(self, desired: int) -> None:
        try:
            report = self._engine.install_draft(desired)
        except DraftError as error:
            self.log.num_failed += 1
            self.log.refused[desired] = str(error)
            in_service = self._engine.draft_version
            log.error("draft version %d refused, %d stays in service: %s", desired, in_service, error)
            return
        except EngineBusyError:
            raise
        except (StoreError, EngineError):
            self.log.num_failed += 1
            raise
        self.log.add(report)
        log.info("draft version %d in service at step %d, %.2f ms", report.version, report.step, report.stall_ms)
        if self._on_swap is not None:
            self._on_swap(report)

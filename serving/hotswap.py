"""Keeps the draft in service equal to the draft that is desired: reads the pointer, swaps, reports what happened.

A loop on its own thread. It waits for the poll interval or the stop; when Redis is away it keeps the version in
service and asks again with growing pauses; a version whose file is refused is remembered and not tried again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from serving.engine import Engine, SwapReport
from speculator.errors import DraftError, EngineError, StoreError, StreamError

log = structlog.get_logger(__name__)

_LONGEST_PAUSE_S = 30.0


class Pointer(Protocol):
    """Where the desired version stands and engines report theirs; implemented by `speculator.stream`."""

    def desired(self) -> int | None: ...

    def report_engine(self, engine_id: str, status: dict[str, str]) -> None: ...


@dataclass
class SwapLog:
    """What the follower did, for the status of this engine."""

    installed: list[tuple[float, SwapReport]] = field(default_factory=list)
    """(unix time in seconds, report), oldest first; the last 100."""
    refused: dict[int, str] = field(default_factory=dict)
    """Versions that can never be installed here, with the reason."""

    def add(self, report: SwapReport) -> None:
        self.installed.append((time.time(), report))
        del self.installed[:-100]


class DraftFollower:
    """Drives one engine towards the pointer's version; `on_swap` is told of each swap."""

    def __init__(
        self,
        engine: Engine,
        pointer: Pointer,
        *,
        engine_id: str,
        poll_s: float = 0.5,
        on_swap: Callable[[SwapReport], None] | None = None,
    ) -> None:
        self._engine, self._pointer, self._engine_id = engine, pointer, engine_id
        self._poll_s, self._on_swap = poll_s, on_swap
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
                log.warning("draft pointer not followed", reason=str(error), retry_s=pause_s)

    def follow(self) -> None:
        """One look at the pointer, and a swap when it names another version than the one in service.

        Raises StreamError, StoreError or EngineError when this look came to nothing and the next may succeed.
        """
        desired = self._pointer.desired()
        if desired is not None and desired != self._engine.draft_version and desired not in self.log.refused:
            try:
                report = self._engine.install_draft(desired)
            except DraftError as error:
                self.log.refused[desired] = str(error)
                log.error("draft refused", version=desired, in_service=self._engine.draft_version, reason=str(error))
            else:
                self.log.add(report)
                log.info("draft swapped", version=report.version, stall_ms=round(report.stall_ms, 2), step=report.step)
                if self._on_swap is not None:
                    self._on_swap(report)
        self._pointer.report_engine(
            self._engine_id,
            {"version": str(self._engine.draft_version), "refused": ",".join(map(str, sorted(self.log.refused)))},
        )

"""A target that moves while it serves: who may name new weights, and who else has to know of them.

    announced ──▶ newer? ──▶ folder allowed? ──▶ engine: read, verified, copied in place
                    └────────────┴─── refused: the target in service stays ────┘

The fingerprint is the lineage's for good: that of the target it began with, which says what architecture, shapes and
vocabulary its drafts are for. A target that moves keeps all of these, and its version counts on.
"""

from __future__ import annotations

import threading
from pathlib import Path

import structlog

from serving.engine import MovesTarget, TargetReport
from serving.metrics import TargetMetrics
from speculator.errors import EngineBusyError, RequestError, SlipstreamError, TargetError

log = structlog.get_logger(__name__)


class TargetDesk:
    """One engine's target; for any thread, one change at a time.

    `folder` is where weights may lie; without it no path is taken.
    """

    def __init__(self, host: MovesTarget, metrics: TargetMetrics, *, folder: Path | None) -> None:
        self._host, self._metrics = host, metrics
        self._folder = None if folder is None else folder.resolve()
        self._moving = threading.Lock()

    def announce(self, version: int, path: str | None) -> TargetReport:
        """Raises RequestError, TargetError, EngineBusyError and what else the engine raises; nothing changed then."""
        if not self._moving.acquire(blocking=False):
            raise EngineBusyError("the target is being moved already")
        try:
            report = self._move(version, path)
        except SlipstreamError as error:
            self._metrics.moves.labels("refused").inc()
            log.warning("target refused", version=version, in_service=self._host.target_version, reason=str(error))
            raise
        finally:
            self._moving.release()
        self._metrics.installed(version, report.stall_ms / 1000)
        log.info("target in service", version=version, previous=report.previous, stall_ms=round(report.stall_ms, 2))
        return report

    def _move(self, version: int, path: str | None) -> TargetReport:
        in_service = self._host.target_version
        if version <= in_service:
            raise TargetError(f"version {version} is not newer than {in_service}, which is in service")
        folder = None if path is None else self._allowed(path)
        return self._host.move_target(version, folder)

    def _allowed(self, path: str) -> Path:
        """The folder that a caller names, links followed; it must lie below ours."""
        if self._folder is None:
            raise RequestError("no path is taken here: set SLIPSTREAM_GATEWAY_TARGETS_DIR", param="path")
        try:
            folder = (self._folder / path).resolve()
            is_allowed = folder.is_relative_to(self._folder) and folder.is_dir()
        except (OSError, ValueError, RuntimeError):
            is_allowed = False
        if not is_allowed:
            raise RequestError("the path is no folder below the one that is allowed", param="path")
        return folder

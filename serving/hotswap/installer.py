"""Brings a draft version into service in one engine, and remembers what came of it."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Protocol

from serving.engine import SwapReport
from serving.hotswap.lifecycle_writer import VersionRecord
from speculator.errors import DraftError, EngineBusyError
from speculator.tracing import prefixed, span

log = logging.getLogger(__name__)


class SwapsDrafts(Protocol):
    """What the follower needs of an engine; see `serving.engine.Engine`."""

    @property
    def draft_version(self) -> int: ...

    def install_draft(self, version: int) -> SwapReport: ...


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
    verdicts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("promoted", "rolled_back", "withdrawn"), 0))
    """How trials ended; withdrawn are those that an operator, or another engine, has ended."""
    last_verdict: str = ""
    watched: int = 0
    """The version on trial; 0 where none is."""
    role: str = ""
    """canary, waiting, settled; empty where versions are not tried."""
    accept_length: float | None = None
    """Tokens a verification of the version in service, lately."""

    def add(self, report: SwapReport) -> None:
        self.num_installed += 1
        self.installed.append((time.time(), report))
        del self.installed[:-100]

    def end_trial(self, version: int, outcome: str, reason: str) -> None:
        # One assignment: another thread may be reading it.
        self.verdicts = {**self.verdicts, outcome: self.verdicts[outcome] + 1}
        self.last_verdict = f"version {version} {outcome}: {reason}"
        self.watched = 0


class Installer:
    """Used by the follower's thread; any thread may read `log`."""

    def __init__(self, engine: SwapsDrafts, record: VersionRecord) -> None:
        self._engine, self._record = engine, record
        self.num_attempts = 0
        self.log = SwapLog()

    @property
    def in_service(self) -> int:
        return self._engine.draft_version

    def install(self, version: int) -> bool:
        """Whether the version is in service now; False where its file is refused, for good.

        Raises StoreError, EngineError, or whatever loading it raises, when a later attempt may succeed.
        """
        self.num_attempts += 1
        try:
            with span("swap", version=version) as swap:
                report = self._engine.install_draft(version)
                swap.set_attributes(prefixed(previous=report.previous, stall_ms=report.stall_ms, step=report.step))
        except DraftError as error:
            self.log.num_failed += 1
            self._refuse(version, str(error))
            return False
        except EngineBusyError:
            raise
        except Exception:
            self.log.num_failed += 1
            raise
        self.log.add(report)
        log.info("draft version %d in service at step %d, %.2f ms", report.version, report.step, report.stall_ms)
        return True

    def _refuse(self, version: int, reason: str) -> None:
        self.log.refused[version] = reason
        log.error("draft version %d refused, %d stays in service: %s", version, self.in_service, reason)
        self._record.barred(version, self.in_service, reason)

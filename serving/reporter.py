"""What an engine says about itself: at once after an attempt to change its version, now and then otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from serving.canary import Canary
from serving.installer import Installer
from serving.watch import LiveWatch

Status = Mapping[str, str | int | float]


class TakesReports(Protocol):
    """The part of the pointer that engines report to; see `speculator.redis.control_plane.DraftPointer`."""

    def report_engine(self, engine_id: str, status: Status) -> None: ...


class Reporter:
    """Used by the follower's thread; `more` adds to what is said."""

    def __init__(
        self,
        pointer: TakesReports,
        installer: Installer,
        watch: LiveWatch | None,
        canary: Canary,
        *,
        engine_id: str,
        every_s: float,
        more: Callable[[], Status],
    ) -> None:
        self._pointer, self._installer, self._watch, self._canary = pointer, installer, watch, canary
        self._engine_id, self._every_s, self._more = engine_id, every_s, more
        self._sent_s, self._num_attempts_told = float("-inf"), 0

    @property
    def is_due(self) -> bool:
        is_news = self._installer.num_attempts > self._num_attempts_told
        return is_news or time.monotonic() - self._sent_s >= self._every_s

    def send(self) -> None:
        """Raises StreamError; it is then still due."""
        num_attempts, log = self._installer.num_attempts, self._installer.log
        refused = ",".join(map(str, sorted(log.refused)))
        status = {"version": self._installer.in_service, "refused": refused, **self._trial(), **self._more()}
        self._pointer.report_engine(self._engine_id, status)
        self._sent_s, self._num_attempts_told = time.monotonic(), num_attempts

    def _trial(self) -> dict[str, str | int | float]:
        log = self._installer.log
        status: dict[str, str | int | float] = {
            "watched": log.watched,
            "verdicts": ",".join(f"{outcome}={count}" for outcome, count in log.verdicts.items()),
            "last_verdict": log.last_verdict,
        }
        if self._watch is not None:
            log.role = status["role"] = self._canary.role
            status["baseline_verifications"] = self._watch.baseline_verifications
            log.accept_length = self._watch.accept_length
            if log.accept_length is not None:
                status["draft_accept_length"] = round(log.accept_length, 4)
        return status

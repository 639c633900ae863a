"""Which target an SGLang server runs, and whether its weights are the right ones on all ranks.

Each rank guards its own share of the weights (serving/target_guard.py). SGLang's target may be moved by whoever then
announces it to this process: from then on its weights are the right ones. Rank 0 reads the announcement, the others
hear of it at a meeting.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Protocol

from serving.sglang.agreement import Agreement

log = logging.getLogger(__name__)


class Announcements(Protocol):
    """The part of the pointer through which a process hears of its target; see `speculator.pointer.DraftPointer`."""

    def announced_target(self, process: str) -> int | None: ...

    def withdraw_announcement(self, process: str) -> None: ...


class Guards(Protocol):
    """What is needed of a `serving.target_guard.TargetGuard`."""

    is_unchanged: bool

    def look_at_times(self) -> bool: ...

    def move(self, change: Callable[[], None], /) -> None: ...


class RankTarget:
    """One rank's target. `on_change` and `on_renewal` are the guard's, here for what the other ranks find."""

    def __init__(
        self,
        guard: Guards,
        agreement: Agreement,
        announcements: Announcements | None,
        *,
        on_change: Callable[[], object],
        on_renewal: Callable[[], object],
        on_version: Callable[[int], object],
    ) -> None:
        """`announcements` is None on ranks that only follow; `on_version` is told of each new target."""
        self._guard, self._agreement, self._announcements = guard, agreement, announcements
        self._on_change, self._on_renewal, self._on_version = on_change, on_renewal, on_version
        self.process = f"{socket.gethostname()}:{os.getpid()}"
        self.version = self._announced = 0
        self._is_unchanged = True
        """On all ranks together; as of the last meeting."""
        self._is_listening = False
        """Whether announcements are for this process: a container that starts again often has its old host and pid."""

    @property
    def is_unchanged(self) -> bool:
        """Of all ranks, as far as is known."""
        return self._guard.is_unchanged and self._is_unchanged

    def agree(self) -> None:
        """With the other ranks, at a meeting; on the scheduler's thread."""
        self._announced = max(self._announced, self._agreement.first(self._announced))
        was_unchanged = self._is_unchanged
        # A rank that has just heard of a new target takes its weights for the right ones at its next look.
        is_expected = self._announced > self.version
        self._is_unchanged = self._agreement.all(self._guard.is_unchanged or is_expected)
        if was_unchanged and not self._is_unchanged:
            log.critical("the target's weights have changed on one rank: the text can no longer be trusted, restart")
            self._on_change()
        elif self._is_unchanged and not was_unchanged:
            self._on_renewal()

    def follow(self) -> None:
        """Look at the weights now and then, and take those of an announced target for the right ones.

        On the follower's thread. Raises StreamError: the weights were looked at, and what is announced is not known.
        """
        self._guard.look_at_times()
        if self._announcements is not None:
            if not self._is_listening:
                # Before the first report, and so before anybody can mean this process.
                self._announcements.withdraw_announcement(self.process)
                self._is_listening = True
            self._announced = max(self._announced, self._announcements.announced_target(self.process) or 0)
        announced = self._announced
        if announced > self.version:
            self._guard.move(partial(self._take, announced))
            log.info("slipstream: the target is of version %d now", announced)

    def status(self) -> dict[str, str | int | float]:
        """Fields of the engine's report."""
        return {"target_ok": int(self.is_unchanged), "target_version": self.version, "process": self.process}

    def _take(self, version: int) -> None:
        self.version = version
        self._on_version(version)

"""Which version of its target an SGLang server runs, on all of its ranks.

SGLang's weights may be moved by its own means, by whoever then announces the new version to this process. Rank 0 reads
the announcement, the others hear of it at a meeting.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from typing import Protocol

from serving.sglang.rank_agreement import Agreement

log = logging.getLogger(__name__)


class Announcements(Protocol):
    """The part of the pointer through which a process hears of its target; see
    `speculator.redis.control_plane.DraftPointer`."""

    def announced_target(self, process: str) -> int | None: ...

    def withdraw_announcement(self, process: str) -> None: ...


class RankTarget:
    """One rank's target."""

    def __init__(
        self, agreement: Agreement, announcements: Announcements | None, *, on_version: Callable[[int], object]
    ) -> None:
        """`announcements` is None on ranks that only follow; `on_version` is told of each new target."""
        self._agreement, self._announcements, self._on_version = agreement, announcements, on_version
        self.process = f"{socket.gethostname()}:{os.getpid()}"
        self.version = self._announced = 0
        self._is_listening = False
        """Whether announcements are for this process: a container that starts again often has its old host and pid."""

    def agree(self) -> None:
        """With the other ranks, at a meeting; on the scheduler's thread."""
        self._announced = max(self._announced, self._agreement.first(self._announced))

    def follow(self) -> None:
        """Take over what is announced. On the follower's thread. Raises StreamError where that cannot be read."""
        if self._announcements is not None:
            if not self._is_listening:
                # Before the first report, and so before anybody can mean this process.
                self._announcements.withdraw_announcement(self.process)
                self._is_listening = True
            self._announced = max(self._announced, self._announcements.announced_target(self.process) or 0)
        if self._announced > self.version:
            self.version = self._announced
            self._on_version(self.version)
            log.info("slipstream: the target is of version %d now", self.version)

    def status(self) -> dict[str, str | int | float]:
        """Fields of the engine's report."""
        return {"target_version": self.version, "process": self.process}

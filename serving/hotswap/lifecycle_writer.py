"""What an engine says about draft versions: to the store's state machine, and to the pointer that sends them.

The engine acts first and writes afterwards: a rollback must not wait for a disk or for Redis. What cannot be written is
kept and tried again at the next look. After a crash the states tell as much as was written, and each of them is safe: a
version that is live, or scored, comes into service by the same way again; one that was rolled back never does.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from speculator.errors import LifecycleError, StoreError, StreamError
from speculator.versions.lifecycle import BARRED, SERVABLE, Lifecycle, Number, State

log = logging.getLogger(__name__)

_MOST_OWED = 100


class Replaces(Protocol):
    """The part of the pointer that takes a version back; see `speculator.redis.control_plane.DraftPointer`."""

    def replace(self, old: int, new: int) -> bool: ...


class VersionRecord:
    """One engine's notes on versions; used by one thread. `lifecycle` is None where there is no store to write to."""

    def __init__(self, lifecycle: Lifecycle | None, pointer: Replaces, *, engine_id: str) -> None:
        self._lifecycle, self._pointer, self._actor = lifecycle, pointer, f"engine:{engine_id}"
        self._owed: deque[Callable[[], object]] = deque(maxlen=_MOST_OWED)

    def may_serve(self, version: int) -> bool:
        """Raises StoreError: what is to be installed is read from the store anyway."""
        return self._lifecycle is None or self._lifecycle.state(version) in SERVABLE

    def is_promoted(self, version: int) -> bool:
        """Raises StoreError."""
        return self._lifecycle is not None and self._lifecycle.state(version) is State.PROMOTED

    def is_on_trial(self, version: int) -> bool:
        """Whether it may serve and nothing confirms it yet. Raises StoreError."""
        return self._lifecycle is None or self._lifecycle.state(version) in SERVABLE - {State.PROMOTED}

    def is_barred(self, version: int) -> bool:
        """False also where the store cannot be read: what is in service then stays."""
        try:
            return self._lifecycle is not None and self._lifecycle.state(version) in BARRED
        except StoreError as error:
            log.warning("state of draft version %d not read: %s", version, error)
            return False

    def last_good(self, *, other_than: int) -> int | None:
        """None also where the store cannot be read."""
        try:
            return self._lifecycle.last_good(other_than=other_than) if self._lifecycle is not None else None
        except StoreError as error:
            log.warning("last good draft version not read: %s", error)
            return None

    def live(self, version: int) -> None:
        self._note(lambda states: self._move(states, version, State.LIVE, "in service"))

    def promoted(self, version: int, reason: str, numbers: Mapping[str, Number]) -> None:
        def write(states: Lifecycle) -> None:
            # What is owed since a full disk may still be missing.
            if states.state(version) is State.SCORED:
                self._move(states, version, State.LIVE, "in service")
            # Another engine may have promoted it, and another version after it.
            if states.state(version) is State.LIVE:
                self._move(states, version, State.PROMOTED, reason, numbers)

        self._note(write)

    def barred(
        self,
        version: int,
        good: int,
        reason: str,
        numbers: Mapping[str, Number] | None = None,
    ) -> None:
        """The version is to serve nowhere, and the good one is published in its place; done already is done."""
        self._note(lambda states: self._bar(states, version, reason, numbers))
        self._owe(lambda: self._pointer.replace(version, good))

    def bar(self, version: int, reason: str, numbers: Mapping[str, Number]) -> None:
        """The version is to serve nowhere; the pointer stays. Raises StoreError, and nothing is owed then."""
        if self._lifecycle is not None:
            self._bar(self._lifecycle, version, reason, numbers)

    def flush(self) -> None:
        """Write what is owed, in its order; what fails stays owed."""
        owed, self._owed = self._owed, deque(maxlen=_MOST_OWED)
        self._owed.extend(write for write in owed if not self._try(write))

    def _note(self, write: Callable[[Lifecycle], object]) -> None:
        states = self._lifecycle
        if states is not None:
            self._owe(lambda: write(states))

    def _owe(self, write: Callable[[], object]) -> None:
        self._owed.append(write)
        self.flush()

    def _try(self, write: Callable[[], object]) -> bool:
        try:
            write()
        except LifecycleError as error:
            log.warning("not noted: %s", error)
        except (StoreError, StreamError) as error:
            log.warning("not noted yet, tried again: %s", error)
            return False
        return True

    def _bar(self, states: Lifecycle, version: int, reason: str, numbers: Mapping[str, Number] | None) -> None:
        if states.state(version) is None:
            self._move(states, version, State.WRITTEN, "unknown to the store")
        states.bar(version, actor=self._actor, reason=reason, numbers=numbers)

    def _move(
        self,
        states: Lifecycle,
        version: int,
        state: State,
        reason: str,
        numbers: Mapping[str, Number] | None = None,
    ) -> None:
        states.move(version, state, actor=self._actor, reason=reason, numbers=numbers)

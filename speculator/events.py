"""What happened to the drafts of a store and who did it, one line of JSON an event.

Appended with one write, so that processes do not mix their lines; a line that a crash cut short is passed over.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec

from speculator.errors import StoreError

_MAX_BYTES = 8 * 1024 * 1024
"""Then the file becomes `events.1.jsonl`, in place of the one before."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """`fields` say what, in numbers where there are any; never a key or a text."""

    at_ms: int
    kind: str
    actor: str
    fields: dict[str, Any] = {}


class EventLog:
    """Events of one store; any number of writers."""

    def __init__(self, root: Path) -> None:
        self._path = root / "events.jsonl"
        self._before = root / "events.1.jsonl"

    def append(self, kind: str, *, actor: str, **fields: Any) -> None:
        """Durable when it returns. Raises StoreError."""
        event = Event(at_ms=time.time_ns() // 1_000_000, kind=kind, actor=actor, fields=fields)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists() and self._path.stat().st_size > _MAX_BYTES:
                self._path.replace(self._before)
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                # The newline comes first: it ends a line that a crash cut short.
                os.write(descriptor, b"\n" + msgspec.json.encode(event))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StoreError(f"cannot write {self._path}: check its permissions and free space ({error})") from error

    def tail(self, count: int) -> list[Event]:
        """The last `count` events, oldest first. Raises StoreError."""
        events: list[Event] = []
        for path in (self._path, self._before):
            if len(events) < count:
                events = self._read(path)[len(events) - count :] + events
        return events

    def _read(self, path: Path) -> list[Event]:
        try:
            lines = path.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error}") from error
        events = []
        for line in lines:
            try:
                events.append(msgspec.json.decode(line, type=Event))
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
        return events

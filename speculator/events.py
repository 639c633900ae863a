"""What happened to the drafts of a store and who did it, one line of JSON an event.

    events.jsonl      appended by whoever holds events.lock; when it is long it becomes
    events.1.jsonl    in place of the one before

A line that a crash cut short is passed over. Events of transitions have their number, so that those which a crash kept
from being written can be told later (speculator/lifecycle.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from speculator.clock import now_ms
from speculator.errors import StoreError
from speculator.files import exclusive, shared, sync
from speculator.json_lines import json_line

_MAX_BYTES = 8 * 1024 * 1024
_BLOCK_BYTES = 64 * 1024


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """`fields` say what, in numbers where there are any; never a key or a user's text."""

    at_ms: int
    kind: str
    actor: str
    fields: dict[str, Any] = {}
    sequence: int = 0
    """Of a transition: its number; 0 for what is none."""


class EventLog:
    """Events of one store; any number of writers."""

    def __init__(self, root: Path) -> None:
        self._path = root / "events.jsonl"
        self._before = root / "events.1.jsonl"
        self._lock = root / "events.lock"

    def append(self, kind: str, /, *, actor: str, **fields: Any) -> None:
        """Durable when it returns. Raises StoreError."""
        self.add(Event(at_ms=now_ms(), kind=kind, actor=actor, fields=fields))

    def add(self, event: Event) -> None:
        """The same for an event that happened before."""
        line = json_line(event)
        with self._file_errors():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with exclusive(self._lock):
                if self._path.exists() and self._path.stat().st_size > _MAX_BYTES:
                    self._path.replace(self._before)
                _append_line(self._path, line)

    def tail(self, count: int) -> list[Event]:
        """The last `count` events, oldest first. Raises StoreError."""
        return list(islice(self._newest_first(), count))[::-1]

    def last_sequence(self) -> int:
        """The number of the last transition that is on record; 0 where none is. Raises StoreError."""
        return next((event.sequence for event in self._newest_first() if event.sequence), 0)

    def _newest_first(self) -> Iterator[Event]:
        with self._file_errors(), shared(self._lock):
            for path in (self._path, self._before):
                for line in _newest_lines(path):
                    if (event := _decoded(line)) is not None:
                        yield event

    @contextlib.contextmanager
    def _file_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(f"cannot use {self._path}: check its permissions and free space ({error})") from error


def _decoded(line: bytes) -> Event | None:
    try:
        return msgspec.json.decode(line, type=Event)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _newest_lines(path: Path) -> Iterator[bytes]:
    """From the end, block by block: the live page asks for the last few every second, and the file has megabytes."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        at, begun = file.seek(0, os.SEEK_END), b""
        while at > 0:
            size = min(at, _BLOCK_BYTES)
            at -= size
            file.seek(at)
            begun, *lines = (file.read(size) + begun).split(b"\n")
            yield from reversed(lines)
        yield begun


def _append_line(path: Path, line: bytes) -> None:
    with path.open("a+b") as file:
        length = file.seek(0, os.SEEK_END)
        if length > 0:
            file.seek(length - 1)
            if file.read(1) != b"\n":
                # A crash cut the last line short: end it, so that it takes no other with it.
                file.write(b"\n")
        file.write(line + b"\n")
        file.flush()
        os.fsync(file.fileno())
    if length == 0:
        sync(path.parent)

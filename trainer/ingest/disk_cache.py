"""Traces on disk, as they came: after a restart replay, held-out pool and golden set are filled again, whatever Redis
has trimmed.

One file a trace beside the checkpoint, written when the trace arrives, synced before the checkpoint that lists it, and
removed when a checkpoint no longer does. So every trace that the last checkpoint lists is here, also after a kill at
any moment and after a power cut. A file that cannot be written is no failure: the trace may still be in the stream
after a restart, and is otherwise learnt from no more.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Collection, Iterable
from pathlib import Path

import structlog

from speculator.files import sync

log = structlog.get_logger()

_SUFFIX = ".trace"
TEMPORARY = ".tmp"
"""Of a file that is being written."""


def shelf_folder(state_dir: Path) -> Path:
    """Where a trainer with this state keeps its traces."""
    return state_dir / "replay"


class Shelf:
    """Several processes may share the folder; each removes only what it put there or took over."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._own: dict[str, None] = {}
        self._unsynced: set[str] = set()

    def put(self, trace_id: str, payload: bytes) -> None:
        """Keep an encoded trace; a power cut may take it until `sync`."""
        path = self._path(trace_id)
        temporary = path.with_suffix(f".{os.getpid()}{TEMPORARY}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(payload)
            temporary.rename(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            log.warning("a trace will not survive a restart", folder=str(self._folder), error=str(error))
            return
        self._own[trace_id] = None
        self._unsynced.add(trace_id)

    def sync(self, trace_ids: Collection[str]) -> None:
        """Make those of these traces that are new survive a power cut; call before a checkpoint that lists them."""
        new = self._unsynced & set(trace_ids)
        try:
            for trace_id in new:
                # `slipstream tenants erase` may have removed it meanwhile.
                with contextlib.suppress(FileNotFoundError):
                    sync(self._path(trace_id))
            if new:
                sync(self._folder)
        except OSError as error:
            log.warning("traces may not survive a power cut", folder=str(self._folder), error=str(error))
            return
        self._unsynced -= new

    def take_over(self, trace_id: str) -> bytes | None:
        """The encoded trace that an earlier process has put here; None where there is none."""
        try:
            payload = self._path(trace_id).read_bytes()
        except OSError:
            return None
        self._own[trace_id] = None
        return payload

    def keep(self, trace_ids: Collection[str]) -> None:
        """Remove this process's other traces; call after a checkpoint that lists these is on disk."""
        for trace_id in [trace_id for trace_id in self._own if trace_id not in trace_ids]:
            self._path(trace_id).unlink(missing_ok=True)
            self._unsynced.discard(trace_id)
            del self._own[trace_id]

    def remove(self, trace_ids: Iterable[str]) -> None:
        """Remove these traces, whoever put them here."""
        for trace_id in trace_ids:
            self._path(trace_id).unlink(missing_ok=True)
            self._unsynced.discard(trace_id)
            self._own.pop(trace_id, None)

    def sweep(self, trace_ids: Collection[str]) -> None:
        """Remove every file but those of these traces. Call at the start, while no process puts anything here."""
        kept = {self._path(trace_id).name for trace_id in trace_ids}
        for path in self._folder.glob("*") if self._folder.is_dir() else ():
            if path.name not in kept:
                path.unlink(missing_ok=True)

    def _path(self, trace_id: str) -> Path:
        # A trace id is whatever a producer wrote; a file name must not be.
        return self._folder / (hashlib.blake2b(trace_id.encode(), digest_size=16).hexdigest() + _SUFFIX)

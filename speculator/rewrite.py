"""A recording without some of its traces: written anew beside it and put in its place."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from speculator.codec import read_header
from speculator.errors import ConfigError, TraceError
from speculator.files import sync
from speculator.recording import RecordingReader, RecordingWriter
from speculator.removal import Chosen


@dataclass(frozen=True, kw_only=True)
class Rewritten:
    """Traces of one file. What cannot be read may be anybody's, and goes too."""

    removed: int
    kept: int
    unreadable: int
    """Of those removed."""
    cut_bytes: int
    """Bytes at the end that were no whole entry; they go, too."""


def remove_from_recording(path: Path, chosen: Chosen, *, dry_run: bool = False) -> Rewritten:
    """Remove every trace whose header is chosen; the file is left as it is where there is none.

    Safe to kill and to repeat. Nobody may record into the file meanwhile. Raises ConfigError where it is no recording
    or cannot be written.
    """
    found = _look(path, chosen)
    if dry_run or not (found.removed or found.cut_bytes):
        return found
    temporary = path.with_name(f".{path.name}.rewritten")
    try:
        temporary.unlink(missing_ok=True)
        with RecordingReader(path) as reader, RecordingWriter(temporary, reader.header) as writer:
            for payload in reader.payloads():
                if (trace_id := _kept_id(payload, chosen)) is not None:
                    writer.append(payload, trace_id=trace_id)
        os.chmod(temporary, path.stat().st_mode)
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        raise ConfigError(f"cannot write {path} anew ({error.strerror}): check its folder") from error
    finally:
        temporary.unlink(missing_ok=True)
    return found


def _look(path: Path, chosen: Chosen) -> Rewritten:
    num_unreadable = num_chosen = num_kept = 0
    with RecordingReader(path) as reader:
        for payload in reader.payloads():
            try:
                if chosen(read_header(payload)):
                    num_chosen += 1
                else:
                    num_kept += 1
            except TraceError:
                num_unreadable += 1
        num_unreadable += reader.num_damaged
        return Rewritten(
            removed=num_chosen + num_unreadable,
            kept=num_kept,
            unreadable=num_unreadable,
            cut_bytes=reader.num_cut_bytes,
        )


def _kept_id(payload: bytes, chosen: Chosen) -> str | None:
    try:
        header = read_header(payload)
    except TraceError:
        return None
    return None if chosen(header) else header.trace_id

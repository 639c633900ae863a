"""A recording: traces in one file, in the order in which they were recorded; no pickle.

    magic      8 bytes
    header     length (4 bytes, little endian), msgpack of `RecordingHeader`
    entries    length (4), CRC-32 of length and trace (4), one encoded trace (speculator/trace.py); any number

Entries are only appended, each with one write, so a writer that dies leaves at most an incomplete last entry: a reader
stops there and reports its size, and the next writer removes it. Damaged entries are skipped and counted.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec

from speculator.errors import ConfigError, TraceError
from speculator.host import sync
from speculator.trace import Trace, decode_trace

FORMAT_VERSION = 1
_MAGIC = b"slip-rec"
_LENGTH = struct.Struct("<I")
_ENTRY = struct.Struct("<II")
# A damaged length must not cause a large allocation.
_MAX_HEADER_BYTES = 1 << 20


class RecordingHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Header of a recording, which holds for all its traces. `note` describes their origin for people."""

    target_fingerprint: str
    model: str
    created_ms: int
    note: str = ""
    format_version: int = FORMAT_VERSION


def is_recording(path: Path) -> bool:
    """Whether the file exists and begins as a recording."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


class RecordingReader:
    """Reads the traces of a recording, once. Raises ConfigError where the file is not a recording."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb")
            self.num_bytes = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise ConfigError(f"cannot read the recording {path} ({error.strerror}): give an existing file") from error
        try:
            self.header = self._read_header()
        except ConfigError:
            self._file.close()
            raise
        self.end = self._file.tell()
        """File offset after the last whole entry read so far."""
        self.num_damaged = 0
        """Entries whose bytes were altered; they are skipped."""

    @property
    def num_cut_bytes(self) -> int:
        """After the iteration: bytes at the end that are not a whole entry."""
        return self.num_bytes - self.end

    def payloads(self) -> Iterator[bytes]:
        """Each entry's encoded trace."""
        while len(prefix := self._file.read(_ENTRY.size)) == _ENTRY.size:
            length, checksum = _ENTRY.unpack(prefix)
            if length > self.num_bytes - self._file.tell():
                return
            payload = self._file.read(length)
            self.end = self._file.tell()
            if _checksum(payload) != checksum:
                self.num_damaged += 1
                continue
            yield payload

    def traces(self) -> Iterator[Trace]:
        """Each entry, decoded; entries that are not traces of the header's target count as damaged."""
        for payload in self.payloads():
            try:
                trace = decode_trace(payload)
            except TraceError:
                self.num_damaged += 1
                continue
            if trace.header.target_fingerprint != self.header.target_fingerprint:
                self.num_damaged += 1
                continue
            yield trace

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> RecordingReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _read_header(self) -> RecordingHeader:
        try:
            if self._file.read(len(_MAGIC)) != _MAGIC:
                raise ConfigError(f"{self.path} is not a recording of traces: give a file that `traces record` wrote")
            length = self._file.read(_LENGTH.size)
            if len(length) < _LENGTH.size or _LENGTH.unpack(length)[0] > _MAX_HEADER_BYTES:
                raise ConfigError(f"{self.path} is damaged: its header is cut off")
            header = msgspec.msgpack.decode(self._file.read(_LENGTH.unpack(length)[0]), type=RecordingHeader)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{self.path} is damaged: its header is not valid ({error})") from error
        if header.format_version != FORMAT_VERSION:
            raise ConfigError(
                f"{self.path} has format version {header.format_version}; this code reads version {FORMAT_VERSION}"
            )
        return header


class RecordingWriter:
    """Appends to a recording, or begins one. Raises ConfigError where the file cannot be used.

    An existing file must have the same target. An incomplete last entry is removed; `num_removed_bytes` is its size.
    """

    def __init__(self, path: Path, header: RecordingHeader) -> None:
        self.path = path
        self.num_removed_bytes = 0
        self._file: BinaryIO
        self.known_ids: set[str] = set()
        """Trace ids in the file."""
        try:
            if path.exists() and path.stat().st_size:
                self._continue(path, header)
            else:
                self._file = path.open("wb")
                encoded = msgspec.msgpack.encode(header)
                self._file.write(_MAGIC + _LENGTH.pack(len(encoded)) + encoded)
        except OSError as error:
            raise _not_writable(path, error) from error

    def append(self, payload: bytes, *, trace_id: str) -> None:
        """Add one encoded trace. Raises ConfigError when the disk is full."""
        try:
            self._file.write(_ENTRY.pack(len(payload), _checksum(payload)) + payload)
        except OSError as error:
            raise _not_writable(self.path, error) from error
        self.known_ids.add(trace_id)

    def close(self) -> None:
        """Flush to disk and close. Raises ConfigError when the disk is full."""
        try:
            with self._file:
                self._file.flush()
                os.fsync(self._file.fileno())
            sync(self.path.parent)
        except OSError as error:
            raise _not_writable(self.path, error) from error

    def __enter__(self) -> RecordingWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _continue(self, path: Path, header: RecordingHeader) -> None:
        with RecordingReader(path) as reader:
            if reader.header.target_fingerprint != header.target_fingerprint:
                raise ConfigError(f"{path} holds traces of another target: choose another file")
            self.known_ids = {trace.header.trace_id for trace in reader.traces()}
            self.num_removed_bytes = reader.num_cut_bytes
            if reader.num_damaged:
                # After a damaged length there may be whole traces, so the rest must not be cut off.
                raise ConfigError(f"{path} is damaged in the middle: record into another file")
        self._file = path.open("r+b")
        self._file.truncate(reader.end)
        self._file.seek(reader.end)


def _checksum(payload: bytes) -> int:
    # Includes the length, so that a run of zeros is not a valid entry.
    return zlib.crc32(payload, zlib.crc32(_LENGTH.pack(len(payload))))


def _not_writable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write the recording {path} ({error.strerror}): choose another path")

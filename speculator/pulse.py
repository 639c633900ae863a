"""What engines do right now, for whoever shares their machine: a page of memory each, in a folder that both see.

The folder is on a file system in memory (`/dev/shm/…`): to write a word there never waits for a disk, and to read it
costs no call of the system. So it also says which engines matter: those of this machine. An engine holds a lock on its
page while it lives, which the kernel takes back however it ends.

Times are CLOCK_MONOTONIC in nanoseconds, which all processes of a machine share, those in containers too.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from speculator.errors import ConfigError

RING = 128
"""Steps that a page remembers."""
RESCAN_S = 1.0
_SUFFIX = ".pulse"
_MAGIC = int.from_bytes(b"slippls1", "little")
# Words of a page: these, then the ring with begin, end and shape of each step.
_MAGIC_AT, _LINGER, _WORKING, _CHANGED, _WAITING, _NUM_STEPS, _FIRST = range(7)
_NUM_WORDS = _FIRST + 3 * RING
_PAGE_BYTES = 8 * _NUM_WORDS


class EngineStep(NamedTuple):
    """One step of an engine; `shape` is equal where batch and number of new tokens are about equal."""

    engine: str
    """Its page's name."""
    begin_ns: int
    end_ns: int
    shape: int


class Serving(NamedTuple):
    """The engines of this machine together."""

    num_engines: int = 0
    is_busy: bool = False
    num_waiting: int = 0


class Pulse:
    """An engine's page; used by the thread that makes its steps. Nothing here waits."""

    def __init__(self, folder: Path, *, linger_s: float = 0.0) -> None:
        """`linger_s`: an engine that cannot tell a short break from its last step counts as busy for so long after
        one. Raises ConfigError where the folder cannot be used.
        """
        name = secrets.token_hex(8)
        hidden, self._path = folder / f".{name}", folder / f"{name}{_SUFFIX}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            # Written, not only made longer: where the folder is full, the first store to memory would end the engine.
            os.write(self._file, bytes(_PAGE_BYTES))
            # Under its final name it is locked from the first moment on: a page without a lock has no engine.
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._words = memoryview(mmap.mmap(self._file, _PAGE_BYTES)).cast("Q")
            self._words[_MAGIC_AT], self._words[_LINGER] = _MAGIC, int(1e9 * linger_s)
            hidden.rename(self._path)
        except OSError as error:
            with suppress(OSError):
                hidden.unlink()
            raise ConfigError(f"{folder} cannot be used to share this machine: {error}") from error
        self._begun_ns = self._shape = 0

    def beat(self, num_waiting: int = 0) -> None:
        """A step begins, and so many requests have no place in it. Where it follows another, that one has ended."""
        words, now_ns = self._words, time.monotonic_ns()
        if words[_WORKING] or now_ns - words[_CHANGED] < words[_LINGER]:
            self._record(now_ns)
        self._begun_ns = words[_CHANGED] = now_ns
        words[_WAITING] = num_waiting
        words[_WORKING] = 1

    def about(self, batch: int, num_tokens: int) -> None:
        """What the step that began last computes: requests, and tokens of all of them together."""
        # An eighth more or less makes little difference to a large step, and shapes should come again.
        unit = 1 << max(num_tokens.bit_length() - 4, 0)
        self._shape = batch << 32 | -(-num_tokens // unit) * unit

    def rest(self) -> None:
        """Nothing is computed until the next beat."""
        words, now_ns = self._words, time.monotonic_ns()
        if not words[_WORKING]:
            return
        if not words[_LINGER]:
            self._record(now_ns)
        words[_CHANGED] = now_ns
        words[_WAITING] = 0
        words[_WORKING] = 0

    def close(self) -> None:
        with suppress(FileNotFoundError):
            self._path.unlink()
        os.close(self._file)

    def _record(self, now_ns: int) -> None:
        if not self._begun_ns:
            return
        words, number = self._words, self._words[_NUM_STEPS]
        at = _FIRST + 3 * (number % RING)
        words[at], words[at + 1], words[at + 2] = self._begun_ns, now_ns, self._shape
        # Last: who sees the new number sees the step.
        words[_NUM_STEPS] = number + 1
        self._begun_ns = 0


class _Page:
    """Another process's page, as it is read."""

    def __init__(self, name: str, file: int) -> None:
        self.name, self.file = name, file
        self.words = memoryview(mmap.mmap(file, _PAGE_BYTES, prot=mmap.PROT_READ)).cast("Q")
        self.num_seen = self.words[_NUM_STEPS]

    def is_busy(self, now_ns: int) -> bool:
        return bool(self.words[_WORKING]) or now_ns - self.words[_CHANGED] < self.words[_LINGER]

    def new_steps(self) -> list[EngineStep]:
        words, number = self.words, self.words[_NUM_STEPS]
        first = max(self.num_seen, number - RING)
        self.num_seen = number
        places = (_FIRST + 3 * (one % RING) for one in range(first, number))
        steps = [EngineStep(self.name, words[at], words[at + 1], words[at + 2]) for at in places]
        # Who reads may have to wait for a core, and the engine has gone on: those that it has overwritten since, and
        # the one that it may be overwriting now, are not whole.
        num_lost = words[_NUM_STEPS] - RING + 1 - first
        return steps[max(num_lost, 0) :]

    def is_left(self) -> bool:
        """Its engine has ended."""
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


class PulseBoard:
    """All pages of a folder; used by one thread. A folder that does not exist yet has no engines."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pages: dict[str, _Page] = {}
        self._scanned_ns: int | None = None

    def look(self) -> Serving:
        now_ns = time.monotonic_ns()
        if self._scanned_ns is None or now_ns - self._scanned_ns > 1e9 * RESCAN_S:
            self._scan()
            self._scanned_ns = now_ns
        pages = self._pages.values()
        num_waiting = sum(page.words[_WAITING] for page in pages)
        return Serving(len(pages), any(page.is_busy(now_ns) for page in pages), num_waiting)

    def steps(self) -> list[EngineStep]:
        """Those that have ended since the last call; of long silences the newest."""
        return [step for page in self._pages.values() for step in page.new_steps()]

    def close(self) -> None:
        for name in list(self._pages):
            self._drop(name)

    def _scan(self) -> None:
        try:
            names = {name for name in os.listdir(self._folder) if name.endswith(_SUFFIX)}
        except OSError:
            names = set()
        for name in self._pages.keys() - names:
            self._drop(name)
        for name in names - self._pages.keys():
            self._add(name)
        for name, page in list(self._pages.items()):
            if page.is_left():
                with suppress(OSError):
                    (self._folder / name).unlink()
                self._drop(name)

    def _add(self, name: str) -> None:
        try:
            # A pipe of that name would hold the trainer up until somebody writes.
            file = os.open(self._folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return
        # Another version's page, or a foreign file, says nothing to us.
        try:
            page = _Page(name, file) if os.fstat(file).st_size == _PAGE_BYTES else None
        except (OSError, ValueError):
            # No file, or shorter by now.
            page = None
        if page is None or page.words[_MAGIC_AT] != _MAGIC:
            os.close(file)
            return
        self._pages[name] = page

    def _drop(self, name: str) -> None:
        os.close(self._pages.pop(name).file)

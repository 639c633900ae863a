"""What the store's files need: to survive a power cut, and to be changed by one writer at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


def write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def exclusive(lock: Path) -> Iterator[None]:
    """Hold a lock file alone. It excludes threads of this process too, and a crash releases it."""
    with lock.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def shared(lock: Path) -> Iterator[None]:
    """Hold a lock file beside other readers; needs no write access, and no lock where nobody has written yet."""
    try:
        file = lock.open("rb")
    except FileNotFoundError:
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield

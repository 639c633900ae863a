"""A file system that can be full without harm to anything else."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

_BLOCK = 1 << 16


@contextlib.contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[bool]:
    """Make `folder` a tmpfs of that size; False, and it is an ordinary folder, where nothing may be mounted."""
    folder.mkdir(parents=True)
    mount = ("mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "slipstream-faults", str(folder))
    try:
        is_mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        is_mounted = False
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(("umount", "--lazy", str(folder)), check=True)


@contextlib.contextmanager
def filled(folder: Path) -> Iterator[None]:
    """Use up what is free in a small disk; given back at the end."""
    filler = folder / "filler"
    descriptor = os.open(filler, os.O_WRONLY | os.O_CREAT)
    try:
        with contextlib.suppress(OSError):
            while True:
                os.write(descriptor, bytes(_BLOCK))
        yield
    finally:
        os.close(descriptor)
        filler.unlink()

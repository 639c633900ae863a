"""Freed memory stays in the trainer's process: counted in page faults, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trainer.allocator import keep_freed_memory

FAULTS = """
import ctypes, resource, sys
from trainer.allocator import keep_freed_memory

if sys.argv[1] == "kept":
    assert keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    # Several at a time, as the tensors of a step: alone, the last one would raise glibc's own threshold.
    blocks = [libc.malloc(size << 20) for size in (24, 25, 26)]
    for block in blocks:
        ctypes.memset(block, 1, 24 << 20)
    for block in blocks:
        libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(kind: str) -> int:
    done = subprocess.run([sys.executable, "-c", FAULTS, kind], check=True, capture_output=True, text=True)
    return int(done.stdout)


@pytest.mark.skipif(not keep_freed_memory(), reason="another C library than glibc")
def test_freed_memory_is_used_again() -> None:
    # 72 MiB in pages of at most 4 KiB, touched once and not twenty times.
    assert faults("kept") < 2 * 72 * 256
    assert faults("as it is") > 5 * faults("kept")

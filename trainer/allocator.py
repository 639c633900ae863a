"""Keeps freed memory in the process: a training step allocates the same tens of megabytes again and again.

Left alone, glibc maps every tensor of more than some hundred kilobytes afresh and gives it back when it is freed, and
the kernel clears each page when it is touched: ten thousand page faults a step.
"""

from __future__ import annotations

import ctypes

# Of glibc's <malloc.h>; the threshold is the largest that it takes on 64 bits.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
_KEPT_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Whether the C library has been told so; others than glibc manage their memory in their own way."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))

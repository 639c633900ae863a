"""Weights side by side in large pages, where the system gives some: a pass reads all of them, and with pages of 4 KiB
it looks up an address for every 64 lines.
"""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

_LINE, _PAGE = 64, 2 << 20


class LargePages:
    """Room for tensors, which lives as long as one of them. What is not written costs no memory."""

    def __init__(self, sizes: list[int]) -> None:
        """For tensors of so many bytes. Raises OSError where there is no room."""
        room = sum(map(_padded, sizes)) + _PAGE
        memory = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel that has none
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._used = -self._bytes.data_ptr() % _PAGE

    def hold(self, tensor: Tensor) -> Tensor:
        """A copy in here."""
        end = self._used + tensor.nbytes
        copy = self._bytes[self._used : end].view(tensor.dtype).view(tensor.shape)
        self._used += _padded(tensor.nbytes)
        return copy.copy_(tensor)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _LINE) * _LINE

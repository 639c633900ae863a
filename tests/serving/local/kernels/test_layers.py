"""Weights in large pages: the same numbers, side by side, for as long as anybody reads them."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from torch import Tensor

from serving.local.kernels import layers
from serving.local.kernels.layers import HugePages


def _some() -> list[Tensor]:
    return [torch.randn(3, 5).bfloat16(), torch.randn(0, 7), torch.arange(100, dtype=torch.int8), torch.randn(2, 3, 70)]


def test_copies_lie_one_behind_the_other_from_a_page_on_and_each_from_a_line_on() -> None:
    tensors = _some()
    pages = HugePages([tensor.nbytes for tensor in tensors])
    copies = [pages.copy_in(tensor) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        assert copy.dtype == tensor.dtype
        assert torch.equal(copy, tensor)
        assert copy.data_ptr() % 64 == 0 or copy.numel() == 0
    first = copies[0].data_ptr()
    assert first % (2 << 20) == 0
    assert [copy.data_ptr() - first for copy in (copies[2], copies[3])] == [64, 64 + 128]
    copies[0].zero_()
    assert torch.equal(copies[2], tensors[2])


def test_memory_goes_with_the_last_tensor() -> None:
    def size() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE

    before, room = size(), 4 << 30
    pages = HugePages([room])
    held = [pages.copy_in(torch.ones(100)) for _ in range(2)]
    del pages, held[0]
    assert size() > before + room
    assert held[0].sum() == 100
    del held
    assert size() < before + room


def test_a_system_without_large_pages_gives_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(layers.mmap, "mmap", Refusing)
    tensor = torch.randn(30)
    assert torch.equal(HugePages([tensor.nbytes]).copy_in(tensor), tensor)

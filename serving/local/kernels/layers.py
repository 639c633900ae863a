"""Memory layouts of the kernels: linear layers in panels, weights in huge pages, KV cache in panels.

A layer's result for a token does not depend on the other tokens of the pass. A pass reads all weights; with pages of
4 KiB it would need an address translation every 64 cache lines.

Suffixes: K inputs, N outputs.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence

import structlog
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serving.local.kernels.library import LANES, PANEL, Kernels, Layer, pointer

log = structlog.get_logger(__name__)
_LINE, _PAGE = 64, 2 << 20


class KernelLinear(nn.Module):
    """A frozen nn.Linear, bfloat16 [..., K] → [..., N], K a multiple of `LANES`; its weight may change in place."""

    def __init__(self, linear: nn.Linear, kernels: Kernels, *, in_pairs: bool | None = None) -> None:
        """`in_pairs`: whether products take two inputs at a time; None: the kernels' default."""
        in_pairs = kernels.in_pairs if in_pairs is None else in_pairs
        assert linear.in_features % LANES == 0
        assert kernels.has_pairs or not in_pairs
        super().__init__()
        self._kernels = kernels
        weight, bias_N = panels(linear.weight.detach()), None
        if linear.bias is not None:
            bias_N = F.pad(linear.bias.detach().float(), (0, -linear.out_features % PANEL))
        self.parts: tuple[Tensor, ...] = (weight,) if bias_N is None else (weight, bias_N)
        """The packed tensors that the pass reads; those of another layer of the same shape can be copied over them."""
        self.layer = Layer(linear.in_features, linear.out_features, pointer(weight), pointer(bias_N), in_pairs)

    def move(self, pages: HugePages) -> None:
        """Move the weight into these pages."""
        weight = pages.copy_in(self.parts[0])
        self.parts = weight, *self.parts[1:]
        self.layer.weight = pointer(weight)

    def forward(self, x: Tensor) -> Tensor:
        return self._kernels.linear(self.layer, x)


def move_to_huge_pages(layers: Sequence[KernelLinear]) -> None:
    """Move the layers' weights into huge pages, one after the other; they stay where they are if there is no memory."""
    try:
        pages = HugePages([layer.parts[0].nbytes for layer in layers])
    except OSError as error:
        log.info("weights are not in huge pages", reason=str(error))
        return
    for layer in layers:
        layer.move(pages)


def panels(weight_NK: Tensor) -> Tensor:
    """bfloat16 [panels, K / 2, 64, 2]: the order in which a kernel reads a weight, padded with rows of zeros."""
    assert weight_NK.dtype == torch.bfloat16
    padded = F.pad(weight_NK, (0, 0, 0, -len(weight_NK) % PANEL))
    return padded.view(-1, PANEL, padded.shape[1] // 2, 2).transpose(1, 2).contiguous()


class HugePages:
    """A huge-page buffer for tensors, freed with the last of them. Unwritten pages cost no memory."""

    def __init__(self, sizes: list[int]) -> None:
        """For tensors of so many bytes each. Raises OSError where there is no memory."""
        room = sum(map(_padded, sizes)) + _PAGE
        memory = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a Linux kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._used = -self._bytes.data_ptr() % _PAGE

    def copy_in(self, tensor: Tensor) -> Tensor:
        """Copy a tensor into the buffer."""
        end = self._used + tensor.nbytes
        copy = self._bytes[self._used : end].view(tensor.dtype).view(tensor.shape)
        self._used += _padded(tensor.nbytes)
        return copy.copy_(tensor)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _LINE) * _LINE


class PanelSlots:
    """KV cache: `storage` [layers, S slots, G key heads, keys and values, L · h] in bfloat16; L = `length` or more.

    A head's keys are [L / 64, h / 2, 64, 2], positions third, its values [h / 64, L / 2, 64, 2], positions second and
    last. Positions past a request's committed length hold rejected proposals, which no query reads and the next write
    replaces. Unwritten pages cost no memory.
    """

    def __init__(self, num_layers: int, num_slots: int, num_heads: int, length: int, head_dim: int) -> None:
        assert head_dim % PANEL == 0
        self.num_slots, self.length, self._head_dim = num_slots, length, head_dim
        room = -(-length // PANEL) * PANEL * head_dim
        self.storage = torch.zeros(num_layers, num_slots, num_heads, 2, room, dtype=torch.bfloat16)

    def move(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` positions of one slot over another."""
        keys = self.storage[..., 0, :]
        num_numbers = -(-length // PANEL) * PANEL * self._head_dim
        keys[:, destination, :, :num_numbers] = keys[:, source, :, :num_numbers]
        values = self.storage[..., 1, :].view(*self.storage.shape[:3], self._head_dim // PANEL, -1)
        num_numbers = -(-length // 2) * 2 * PANEL
        values[:, destination, ..., :num_numbers] = values[:, source, ..., :num_numbers]

    def keep_path(self, slot: int, start: int, path: Sequence[int]) -> None:
        """As `KVSlots.keep_path`."""
        heads = self.storage[:, slot]
        keys = heads[:, :, 0].view(*heads.shape[:2], -1, self._head_dim // 2, PANEL, 2)
        values = heads[:, :, 1].view(*heads.shape[:2], self._head_dim // PANEL, -1, PANEL, 2)
        for to, place in enumerate(path, start):
            if (source := start + place) != to:
                keys[:, :, to // PANEL, :, to % PANEL] = keys[:, :, source // PANEL, :, source % PANEL]
                values[:, :, :, to // 2, :, to % 2] = values[:, :, :, source // 2, :, source % 2]

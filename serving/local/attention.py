"""Key/value slots and the attention over them, shared by target and draft.

Running requests always fill slots 0…n−1, so a batch attends over a view of the cache and nothing is gathered.

Shape letters: S slots, G key heads, L positions, h head size, B batch, H query heads, N heads of one kind or several,
T new tokens, P = H / G query heads of one key head, R = T × P.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_PADDING_OF_A_CALL = 64
"""Keys of a slot that take as long as a call of attention of its own."""


class KVSlots:
    """Keys and values of some layers, with room for `length` positions a slot.

    Positions past a request's committed length hold leftovers of rejected proposals; the mask never shows them and
    the next write covers them. On CPU, pages that were never written cost no memory.
    """

    def __init__(
        self, num_layers: int, num_slots: int, num_heads: int, length: int, head_dim: int, like: Tensor
    ) -> None:
        shape = (num_layers, num_slots, 2 * num_heads, length, head_dim)
        # Zeros, not empty: a NaN left in fresh memory would survive a masked softmax (0 × NaN).
        self._storage = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.num_slots, self.length = num_slots, length
        self._lines = [layer.view(-1, head_dim) for layer in self._storage]
        self._first_lines = torch.arange(2 * num_heads, device=like.device) * length  # of the heads of slot 0

    def lines(self, slots_B: Tensor, positions_BT: Tensor) -> Tensor:
        """Where `write` puts the heads of new tokens: indices [B · T · 2G] into a layer's lines of h numbers."""
        starts_B = slots_B * (self._storage.shape[2] * self._storage.shape[3])
        return ((positions_BT + starts_B[:, None])[:, :, None] + self._first_lines).flatten()

    def write(self, layer: int, lines: Tensor, kv_MNh: Tensor) -> None:
        """Store keys and values of M = B · T tokens, N = 2G heads each, in one operation whatever the positions are."""
        self._lines[layer].index_copy_(0, lines, kv_MNh.reshape(-1, kv_MNh.shape[-1]))

    def read(self, slots: slice, length: int) -> list[tuple[Tensor, Tensor]]:
        """Views of the keys and values of every layer, [B, G, length, h] each."""
        keys, values = self._storage[:, slots, :, :length].chunk(2, 2)
        return list(zip(keys.unbind(), values.unbind(), strict=True))

    def move(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` positions of one slot over another."""
        self._storage[:, destination, :, :length] = self._storage[:, source, :, :length]


class _Call(NamedTuple):
    """One call of attention: what it reads by layer, and its mask."""

    read: list[tuple[Tensor, Tensor]]
    mask: Tensor | None


class SlotWindow:
    """Where one forward pass reads and writes: slots [first, first + B), T new positions from `starts` [B] on."""

    def __init__(self, first: int, starts: list[int], num_new: int, like: Tensor) -> None:
        device = like.device
        self.batch, self.first, self.starts = len(starts), first, starts
        self._slots = slice(first, first + self.batch)
        self._lengths = [start + num_new for start in starts]
        self._length = max(self._lengths)
        # Keys that a short context is padded with cost as much as its own; a call costs as much as some of them.
        num_padding = self.batch * self._length - sum(self._lengths)
        self._one_by_one = device.type == "cpu" and num_padding > _PADDING_OF_A_CALL * self.batch
        self.positions_BT = torch.tensor(starts, device=device)[:, None] + torch.arange(num_new, device=device)
        self._like = like
        # One new token that follows everything in the window sees all of it.
        self._masked = num_new > 1 or (min(starts) < max(starts) and not self._one_by_one)
        # Made in the first layer, the same in all.
        self._lines: Tensor | None = None
        self._calls: list[_Call] = []

    def attend(
        self, cache: KVSlots, layer: int, q_BHTh: Tensor, k_BGTh: Tensor, v_BGTh: Tensor, scale: float | None
    ) -> Tensor:
        """Write the new keys and values, then attend causally over everything before; returns [B, H, T, h]."""
        batch, num_groups, num_new, head_dim = k_BGTh.shape
        q_BGPTh = q_BHTh.reshape(batch, num_groups, -1, num_new, head_dim)
        q_BRGh = q_BGPTh.permute(0, 3, 2, 1, 4).flatten(1, 2)
        kv_BTNh = torch.cat([k_BGTh, v_BGTh], 1).transpose(1, 2)
        out_BRGh = self.attend_rows(cache, layer, q_BRGh, kv_BTNh.flatten(0, 1), scale)
        out_BTPGh = out_BRGh.view(batch, num_new, -1, num_groups, head_dim)
        return out_BTPGh.permute(0, 3, 2, 1, 4).flatten(1, 2)

    def attend_rows(self, cache: KVSlots, layer: int, q_BRGh: Tensor, kv_MNh: Tensor, scale: float | None) -> Tensor:
        """The same, with the queries as rows of their key head, a token's rows together; returns [B, R, G, h].

        No key is repeated in memory, and this order is the one in which the result leaves the kernel.
        """
        if self._lines is None:
            slots_B = torch.arange(self._slots.start, self._slots.stop, device=kv_MNh.device)
            self._lines = cache.lines(slots_B, self.positions_BT)
            self._calls = list(self._plan_calls(cache, q_BRGh.shape[1]))
        cache.write(layer, self._lines, kv_MNh)
        q_BGRh = q_BRGh.transpose(1, 2)
        if len(self._calls) == 1:
            return _attended(q_BGRh, self._calls[0], layer, scale).transpose(1, 2)
        rows = zip(q_BGRh.chunk(self.batch), self._calls, strict=True)
        return torch.cat([_attended(q_1GRh, call, layer, scale) for q_1GRh, call in rows]).transpose(1, 2)

    def _plan_calls(self, cache: KVSlots, num_rows: int) -> Iterator[_Call]:
        mask = self._mask(num_rows) if self._masked else None
        if not self._one_by_one:
            yield _Call(cache.read(self._slots, self._length), mask)
            return
        for row, length in enumerate(self._lengths):
            slot = self._slots.start + row
            read = cache.read(slice(slot, slot + 1), length)
            yield _Call(read, None if mask is None else mask[row : row + 1, ..., :length])

    def _mask(self, num_rows: int) -> Tensor:
        rows_BR = self.positions_BT.repeat_interleave(num_rows // self.positions_BT.shape[1], 1)
        hidden_BRL = torch.arange(self._length, device=rows_BR.device) > rows_BR[:, :, None]
        mask_BRL = torch.zeros(hidden_BRL.shape, dtype=self._like.dtype, device=rows_BR.device)
        return mask_BRL.masked_fill_(hidden_BRL, float("-inf"))[:, None]


def _attended(q_BGRh: Tensor, call: _Call, layer: int, scale: float | None) -> Tensor:
    keys, values = call.read[layer]
    return F.scaled_dot_product_attention(q_BGRh, keys, values, attn_mask=call.mask, scale=scale)

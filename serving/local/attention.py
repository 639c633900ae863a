"""Key/value slots and the attention over them, shared by target and draft.

Running requests always fill slots 0…n−1, so a batch attends over a view of the cache and nothing is gathered.

Shape letters: S slots, G key heads, L positions, h head size, B batch, H query heads, N heads of one kind or several,
T new tokens, P = H / G query heads of one key head, R = T × P.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_PADDING_OF_A_CALL = 64
"""Keys of a slot that take as long as a call of attention of its own."""


class KVSlots:
    """`keys` and `values` [layers, S, G, L, h] with room for `length` positions a slot, in one storage.

    Positions past a request's committed length hold leftovers of rejected proposals; the mask never shows them and
    the next write covers them. On CPU, pages that were never written cost no memory.
    """

    def __init__(
        self, num_layers: int, num_slots: int, num_heads: int, length: int, head_dim: int, like: Tensor
    ) -> None:
        shape = (num_layers, num_slots, 2 * num_heads, length, head_dim)
        # Zeros, not empty: a NaN left in fresh memory would survive a masked softmax (0 × NaN).
        self._storage = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.keys, self.values = self._storage[:, :, :num_heads], self._storage[:, :, num_heads:]
        self._layers = list(self._storage)
        self._lines = [layer.view(-1, head_dim) for layer in self._layers]
        self._first_lines = torch.arange(2 * num_heads, device=like.device) * length  # of the heads of slot 0

    def lines(self, slots_B: Tensor, positions_BT: Tensor) -> Tensor:
        """Where `write` puts the heads of new tokens: indices [B · T · 2G] into a layer's lines of h numbers."""
        starts_B = slots_B * (self._storage.shape[2] * self._storage.shape[3])
        return ((positions_BT + starts_B[:, None])[:, :, None] + self._first_lines).flatten()

    def write(self, layer: int, lines: Tensor, kv_BTNh: Tensor) -> None:
        """Store new keys and values, N = 2G heads a token, in one operation whatever the positions are."""
        self._lines[layer].index_copy_(0, lines, kv_BTNh.reshape(-1, kv_BTNh.shape[-1]))

    def read(self, layer: int, slots: slice, length: int) -> tuple[Tensor, Tensor]:
        """Views of keys and values, [B, G, length, h] each."""
        keys, values = self._layers[layer][slots, :, :length].chunk(2, 1)
        return keys, values

    def move(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` positions of one slot over another."""
        self._storage[:, destination, :, :length] = self._storage[:, source, :, :length]


class SlotWindow:
    """Where one forward pass reads and writes: slots [first, first + B), T new positions from `starts` [B] on."""

    def __init__(self, first: int, starts: list[int], num_new: int, like: Tensor) -> None:
        device = like.device
        self._slots = slice(first, first + len(starts))
        self._lengths = [start + num_new for start in starts]
        self._length = max(self._lengths)
        # Keys that a short context is padded with cost as much as its own; a call costs as much as some of them.
        num_padding = len(starts) * self._length - sum(self._lengths)
        self._one_by_one = device.type == "cpu" and num_padding > _PADDING_OF_A_CALL * len(starts)
        self.positions_BT = torch.tensor(starts, device=device)[:, None] + torch.arange(num_new, device=device)
        self._like = like
        # One new token that follows everything in the window sees all of it.
        self._masked = num_new > 1 or (min(starts) < max(starts) and not self._one_by_one)
        self._lines: Tensor | None = None
        self._mask_B1RL: Tensor | None = None

    def attend(
        self, cache: KVSlots, layer: int, q_BHTh: Tensor, k_BGTh: Tensor, v_BGTh: Tensor, scale: float | None
    ) -> Tensor:
        """Write the new keys and values, then attend causally over everything before; returns [B, H, T, h]."""
        batch, num_groups, num_new, head_dim = k_BGTh.shape
        q_BGPTh = q_BHTh.reshape(batch, num_groups, -1, num_new, head_dim)
        q_BRGh = q_BGPTh.permute(0, 3, 2, 1, 4).flatten(1, 2)
        out_BRGh = self.attend_rows(cache, layer, q_BRGh, torch.cat([k_BGTh, v_BGTh], 1).transpose(1, 2), scale)
        out_BTPGh = out_BRGh.view(batch, num_new, -1, num_groups, head_dim)
        return out_BTPGh.permute(0, 3, 2, 1, 4).flatten(1, 2)

    def attend_rows(self, cache: KVSlots, layer: int, q_BRGh: Tensor, kv_BTNh: Tensor, scale: float | None) -> Tensor:
        """The same, with the queries as rows of their key head, a token's rows together; returns [B, R, G, h].

        No key is repeated in memory, and this order is the one in which the result leaves the kernel.
        """
        if self._lines is None:
            slots_B = torch.arange(self._slots.start, self._slots.stop, device=kv_BTNh.device)
            self._lines = cache.lines(slots_B, self.positions_BT)
        cache.write(layer, self._lines, kv_BTNh)
        keys, values = cache.read(layer, self._slots, self._length)
        mask = self._mask(q_BRGh.shape[1]) if self._masked else None
        q_BGRh = q_BRGh.transpose(1, 2)
        if not self._one_by_one:
            out = F.scaled_dot_product_attention(q_BGRh, keys, values, attn_mask=mask, scale=scale)
            return out.transpose(1, 2)
        alone = [slice(slot, slot + 1) for slot in range(len(self._lengths))]
        outs = [
            F.scaled_dot_product_attention(
                q_BGRh[slot],
                keys[slot, :, :length],
                values[slot, :, :length],
                attn_mask=None if mask is None else mask[slot, ..., :length],
                scale=scale,
            )
            for slot, length in zip(alone, self._lengths, strict=True)
        ]
        return torch.cat([out.transpose(1, 2) for out in outs])

    def _mask(self, num_rows: int) -> Tensor:
        if self._mask_B1RL is None:
            rows_BR = self.positions_BT.repeat_interleave(num_rows // self.positions_BT.shape[1], 1)
            hidden_BRL = torch.arange(self._length, device=rows_BR.device) > rows_BR[:, :, None]
            mask_BRL = torch.zeros(hidden_BRL.shape, dtype=self._like.dtype, device=rows_BR.device)
            self._mask_B1RL = mask_BRL.masked_fill_(hidden_BRL, float("-inf"))[:, None]
        return self._mask_B1RL

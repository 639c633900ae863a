"""Key/value slots and the attention over them, shared by target and draft.

Running requests always fill slots 0…n−1, so a batch attends over a view of the cache and nothing is gathered.

Shape letters: S slots, G key heads, L positions, h head size, B batch, H query heads, T new tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class KVSlots:
    """Keys and values [layers, S, G, L, h] with room for `length` positions a slot.

    Positions past a request's committed length hold leftovers of rejected proposals; the mask never shows them and
    the next write covers them. On CPU, pages that were never written cost no memory.
    """

    def __init__(
        self, num_layers: int, num_slots: int, num_heads: int, length: int, head_dim: int, like: Tensor
    ) -> None:
        shape = (num_layers, num_slots, num_heads, length, head_dim)
        # Zeros, not empty: a NaN left in fresh memory would survive a masked softmax (0 × NaN).
        self.keys = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.values = torch.zeros(shape, dtype=like.dtype, device=like.device)

    def move(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` positions of one slot over another."""
        for cache in (self.keys, self.values):
            cache[:, destination, :, :length] = cache[:, source, :, :length]


class SlotWindow:
    """Where one forward pass reads and writes: slots [first, first + B), T new positions from `starts` [B] on."""

    def __init__(self, first: int, starts: list[int], num_new: int, like: Tensor) -> None:
        device = like.device
        self.batch = len(starts)
        self.slots = slice(first, first + self.batch)
        self.length = max(starts) + num_new
        self.positions_BT = torch.tensor(starts, device=device)[:, None] + torch.arange(num_new, device=device)
        self._rows_B1 = torch.arange(self.batch, device=device)[:, None]
        hidden_BTL = torch.arange(self.length, device=device) > self.positions_BT[:, :, None]
        self._mask_BTL = torch.zeros(hidden_BTL.shape, dtype=like.dtype, device=device)
        self._mask_BTL.masked_fill_(hidden_BTL, float("-inf"))
        self._grouped_mask: Tensor | None = None

    def attend(
        self, cache: KVSlots, layer: int, q_BHTh: Tensor, k_BGTh: Tensor, v_BGTh: Tensor, scale: float | None
    ) -> Tensor:
        """Write the new keys and values, then attend causally over everything before; returns [B, H, T, h]."""
        keys, values = cache.keys[layer, self.slots], cache.values[layer, self.slots]
        keys[self._rows_B1, :, self.positions_BT] = k_BGTh.transpose(1, 2)
        values[self._rows_B1, :, self.positions_BT] = v_BGTh.transpose(1, 2)
        batch, num_heads, num_new, head_dim = q_BHTh.shape
        # The query heads of one key head become extra rows: no key is repeated in memory.
        per_group = num_heads // k_BGTh.shape[1]
        if self._grouped_mask is None:
            self._grouped_mask = self._mask_BTL[:, None].repeat(1, 1, per_group, 1)
        out = F.scaled_dot_product_attention(
            q_BHTh.reshape(batch, -1, per_group * num_new, head_dim),
            keys[:, :, : self.length],
            values[:, :, : self.length],
            attn_mask=self._grouped_mask,
            scale=scale,
        )
        return out.reshape(batch, num_heads, num_new, head_dim)

"""Keys and values of the slots as the library reads them: as weights in panels, which grow."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from serving.local.kernels.library import PANEL


class PanelSlots:
    """`storage` [layers, S slots, G key heads, keys and values, L · h] in bfloat16, room for `length` positions a slot.

    Of a head: keys [L / 64, h / 2, 64, 2], positions third, and values [h / 64, L / 2, 64, 2], positions second and
    last. Positions past a request's committed length hold leftovers of rejected proposals, which nothing shows and the
    next write covers. Pages that were never written cost no memory.
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
        """What `KVSlots.keep_path` does."""
        heads = self.storage[:, slot]
        keys = heads[:, :, 0].view(*heads.shape[:2], -1, self._head_dim // 2, PANEL, 2)
        values = heads[:, :, 1].view(*heads.shape[:2], self._head_dim // PANEL, -1, PANEL, 2)
        for to, place in enumerate(path, start):
            if (source := start + place) != to:
                keys[:, :, to // PANEL, :, to % PANEL] = keys[:, :, source // PANEL, :, source % PANEL]
                values[:, :, :, to // 2, :, to % 2] = values[:, :, :, source // 2, :, source % 2]

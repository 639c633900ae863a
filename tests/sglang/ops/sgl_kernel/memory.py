"""Moving cached keys and values from slot to slot, in all layers at once."""

from __future__ import annotations

import numpy as np
from torch import Tensor


def copy_all_layer_kv_cache_cpu(addresses: Tensor, slot_bytes: Tensor, to_N: Tensor, from_N: Tensor) -> None:
    """Copy slot `from_N[i]` to slot `to_N[i]` in every buffer; all sources are read before any target is written.

    `addresses` are those of each layer's key buffer and value buffer, `slot_bytes` the size of one slot in each.
    """
    moves = to_N != from_N
    to, source = to_N[moves].numpy(), from_N[moves].numpy()
    if not len(to):
        return
    num_slots = int(max(to.max(), source.max())) + 1
    for address, size in zip(addresses.tolist(), slot_bytes.tolist(), strict=True):
        slots = np.asarray(_Bytes(address, (num_slots, size)))
        slots[to] = slots[source]


class _Bytes:
    """A window on memory that somebody else owns, as NumPy's array interface describes it."""

    def __init__(self, address: int, shape: tuple[int, int]) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": shape, "typestr": "|u1", "version": 3}

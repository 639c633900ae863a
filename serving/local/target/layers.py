"""Shared by target and draft: attention over a KV cache of slots, and linear layers with packed weights.

Running requests always fill slots 0…n−1, so a batch attends over a view of the cache and nothing is gathered.

PyTorch's bfloat16 matmul on CPU reorders the weight at every call with more than one row, so verifying 4 tokens costs
1.4 × one. With weights packed beforehand (as Inductor's freezing does) it costs 1.1 ×.

Shape letters: S slots, G key heads, L positions, h head size, B batch, H query heads, N heads of one kind or several,
T new tokens, P = H / G query heads of one key head, R = T × P.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serving.local.kernels.layers import KernelLinear
from serving.local.kernels.library import Kernels
from speculator.draft.eagle3 import is_fast

Parents = Sequence[int] | None
"""For a tree of new tokens in a slot: each token's parent, as an earlier index in the window, −1 for the first. None:
a chain.
"""
_PADDING_OF_A_CALL = 64
"""So many padded keys a slot cost as much as a separate attention call for the slot."""
_ROWS_HINT = 8  # rows the layout is chosen for: a few requests times a short chain


class KVSlots:
    """KV cache of some layers, with `length` positions a slot.

    Positions past a request's committed length hold rejected proposals; the mask hides them and the next write
    replaces them. On CPU, unwritten pages cost no memory.
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

    def lines(self, slots_B: Tensor, places_BT: Tensor) -> Tensor:
        """Indices [B · T · 2G] for `write`: where the heads of new tokens go, in a layer's rows of h numbers."""
        starts_B = slots_B * (self._storage.shape[2] * self._storage.shape[3])
        return ((places_BT + starts_B[:, None])[:, :, None] + self._first_lines).flatten()

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

    def keep_path(self, slot: int, start: int, path: Sequence[int]) -> None:
        """Move keys and values of a tree's accepted tokens together; `path` are their indices behind `start`."""
        heads = self._storage[:, slot]
        for to, place in enumerate(path, start):
            if (source := start + place) != to:
                heads[:, :, to] = heads[:, :, source]


class _Call(NamedTuple):
    """One call of attention: keys and values by layer, and the mask."""

    read: list[tuple[Tensor, Tensor]]
    mask: Tensor | None


class SlotWindow:
    """Cache range of one forward pass: slots [first, first + B), T new entries from `starts` [B] on.

    A token's position is its cache index; in a tree it is the root's position plus the token's depth.
    """

    def __init__(
        self, first: int, starts: Sequence[int], num_new: int, like: Tensor, parents: Sequence[Parents]
    ) -> None:
        device = like.device
        self.batch, self._starts = len(starts), starts
        self.num_layers_read = 0
        """Calls of Hugging Face's attention interface: one a layer."""
        self._slots = slice(first, first + self.batch)
        self._lengths = [start + num_new for start in starts]
        self._length = max(self._lengths)
        # Padding a short context to the longest costs time; beyond some padding, a call for each slot is cheaper.
        num_padding = self.batch * self._length - sum(self._lengths)
        self._one_by_one = device.type == "cpu" and num_padding > _PADDING_OF_A_CALL * self.batch
        starts_B1 = torch.tensor(starts, device=device)[:, None]
        self._places_BT = starts_B1 + torch.arange(num_new, device=device)
        self.positions_BT = self._places_BT
        self._followed_BTT: Tensor | None = None
        """Tree mask: which new tokens are ancestors of each, itself included; None without a tree."""
        if any(of_row is not None for of_row in parents):
            self._followed_BTT = torch.stack([_followed(of_row, num_new) for of_row in parents]).to(device)
            self.positions_BT = starts_B1 + self._followed_BTT.sum(-1) - 1
        self._like = like
        # A single new token sees the whole context, so it needs no mask.
        self._masked = num_new > 1 or (min(starts) < max(starts) and not self._one_by_one)
        # Computed in the first layer, the same in all.
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
        """As `attend`, with the queries as rows of their key head, a token's rows together; returns [B, R, G, h].

        No key is repeated in memory, and the kernel returns its result in this order.
        """
        if self._lines is None:
            slots_B = torch.arange(self._slots.start, self._slots.stop, device=kv_MNh.device)
            self._lines = cache.lines(slots_B, self._places_BT)
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
        places_BT = self._places_BT
        hidden_BTL = torch.arange(self._length, device=places_BT.device) > places_BT[:, :, None]
        if self._followed_BTT is not None:
            for hidden_TL, followed_TT, start in zip(hidden_BTL, self._followed_BTT, self._starts, strict=True):
                hidden_TL[:, start : start + len(followed_TT)] = ~followed_TT
        hidden_BRL = hidden_BTL.repeat_interleave(num_rows // places_BT.shape[1], 1)
        mask_BRL = torch.zeros(hidden_BRL.shape, dtype=self._like.dtype, device=places_BT.device)
        return mask_BRL.masked_fill_(hidden_BRL, float("-inf"))[:, None]


def _followed(parents: Parents, num_new: int) -> Tensor:
    """Which of T new tokens are ancestors of each, itself included: bool [T, T]."""
    if parents is None:
        return torch.ones(num_new, num_new, dtype=torch.bool).tril_()
    followed = torch.eye(num_new, dtype=torch.bool)
    for place, parent in enumerate(parents):
        if parent >= 0:
            followed[place] |= followed[parent]
    return followed


def _attended(q_BGRh: Tensor, call: _Call, layer: int, scale: float | None) -> Tensor:
    keys, values = call.read[layer]
    return F.scaled_dot_product_attention(q_BGRh, keys, values, attn_mask=call.mask, scale=scale)


def pack(weight: Tensor) -> Tensor:
    """An opaque bfloat16 tensor for `linear`; another one of the same shape can be copied into it in place."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)  # type: ignore[no-any-return]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[..., in] → [..., out] with a weight that is packed or not."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]
    return F.linear(x, weight, bias)


class PackedLinear(nn.Module):
    """A frozen nn.Linear without gradient, [..., in] → [..., out]."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.packed = pack(linear.weight.detach())
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.parts: tuple[Tensor, ...] = (self.packed,) if self.bias is None else (self.packed, self.bias)
        """The packed tensors that the pass reads; those of another layer of the same shape can be copied over them."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.packed, self.bias)


Replaced = PackedLinear | KernelLinear
"""A linear layer that reads a packed copy of its weight."""


def product_of(layer: nn.Linear | Replaced) -> Callable[[Tensor], Tensor]:
    """A function that computes the layer without nn.Module's overhead; the weight may change in place."""
    assert not isinstance(layer, KernelLinear), "KernelDecoder runs those layers"
    weight = layer.packed if isinstance(layer, PackedLinear) else layer.weight
    return partial(linear, weight=weight, bias=layer.bias)


def pack_linears(model: nn.Module, *, kernels: Kernels | None) -> None:
    """Replace every bfloat16 nn.Linear of a model on the CPU: with `kernels`, which must support the model, by a
    `KernelLinear`, else by a `PackedLinear` where oneDNN can.
    """
    if kernels is None and not can_pack():
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and child.weight.dtype == torch.bfloat16:
                setattr(parent, name, PackedLinear(child) if kernels is None else KernelLinear(child, kernels))


def can_pack() -> bool:
    """Whether this CPU multiplies packed bfloat16."""
    return is_fast(torch.device("cpu"))

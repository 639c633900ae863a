"""The pass of the library over a target's layers.

Shape letters: B batch, T new tokens, M all of them (B × T, or what rows of different length add up to), d hidden size,
h head size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from serving.local.kernels.layers import KernelLinear
from serving.local.kernels.library import (
    Block,
    Heads,
    Kernels,
    Layer,
    Model,
    Norm,
    Window,
    can_compute,
    parents_of,
    pointer,
)
from serving.local.kernels.slots import PanelSlots
from serving.local.target.attention import Parents, SlotWindow
from serving.local.target.forward import FusedLayer, RMSNorm

_SILU = {"SiLU", "SiLUActivation"}
"""PyTorch's and Hugging Face's."""
_STRETCHING = {"dynamic", "longrope"}
"""Rotary embeddings that turn a token by how long the longest text beside it is."""


def fits(model: Any) -> bool:
    """Whether the library runs a model that `fusible` accepts."""
    config = model.config
    return (
        model.dtype == torch.bfloat16
        and can_compute(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            head_dim=model.model.layers[0].self_attn.head_dim,
        )
        and model.model.rotary_emb.rope_type not in _STRETCHING
        and all(type(layer.mlp.act_fn).__name__ in _SILU for layer in model.model.layers)
    )


class KernelDecoder:
    """Embedding, layers and final norm of a model that has been fused and whose linear layers are `KernelLinear`.

    Used by one thread at a time.
    """

    def __init__(self, model: Any, aux_layers: tuple[int, ...], kernels: Kernels, length: int) -> None:
        """For positions below `length`."""
        self._kernels = kernels
        # What the structures point to lives as long as these.
        self._layers: list[FusedLayer] = list(model.model.layers)
        self._embed: Tensor = model.model.embed_tokens.weight
        self._norm: RMSNorm = model.model.norm
        # Once and for all: computed for some positions, they may be rounded by how many these are.
        like, positions = torch.empty(0, dtype=torch.float32), torch.arange(length)[None]
        cos_Lh, sin_Lh = (table[0].contiguous() for table in model.model.rotary_emb(like, positions))
        self._rotation = cos_Lh, sin_Lh
        blocks = (Block * len(self._layers))(*map(_block, self._layers))
        self._model = Model(
            len(blocks),
            len(aux_layers),
            blocks,
            (ctypes.c_int64 * len(aux_layers))(*aux_layers),
            _norm(self._norm),
            _described(model.lm_head).weight,
        )

    def __call__(self, tokens_BT: Tensor, window: SlotWindow, cache: PanelSlots) -> tuple[Tensor, Tensor]:
        """Returns the final hidden states [B, T, d] and the inputs of the aux layers side by side [B, T, 3d]."""
        windows = [
            _window(slot, start, tokens_BT.shape[1], parents)
            for slot, (start, parents) in enumerate(zip(window.starts, window.parents, strict=True), window.first)
        ]
        hidden_Md, aux_Mw = self._run(tokens_BT.flatten(), windows, cache)
        return hidden_Md.view(*tokens_BT.shape, -1), aux_Mw.view(*tokens_BT.shape, -1)

    def windows(
        self,
        rows: Sequence[Sequence[int]],
        starts: Sequence[int],
        parents: Sequence[Parents],
        cache: PanelSlots,
    ) -> tuple[Tensor, Tensor]:
        """The same for rows of different length, of slots 0…, behind `starts` other tokens: [M, d] and [M, 3d]."""
        windows = [
            _window(slot, start, len(row), of_row)
            for slot, (row, start, of_row) in enumerate(zip(rows, starts, parents, strict=True))
        ]
        return self._run(torch.tensor([token for row in rows for token in row]), windows, cache)

    def _run(self, tokens_M: Tensor, windows: Sequence[Window], cache: PanelSlots) -> tuple[Tensor, Tensor]:
        x_Md = F.embedding(tokens_M, self._embed)
        return self._kernels.run(self._model, windows, self._rotation, x_Md, cache.storage)


def _window(slot: int, start: int, num_tokens: int, parents: Parents) -> Window:
    assert parents is None or len(parents) == num_tokens
    return Window(slot, start, num_tokens, None if parents is None else parents_of(parents))


def _block(layer: FusedLayer) -> Block:
    heads = Heads(
        layer.num_queries // layer.num_groups,
        layer.num_groups,
        layer.head_dim,
        layer.scale,
        _norm(layer.query_norm),
        _norm(layer.key_norm),
    )
    return Block(_norm(layer.attention_norm), _norm(layer.mlp_norm), heads, *map(_described, layer.products))


def _norm(norm: RMSNorm | None) -> Norm:
    if norm is None:
        return Norm()
    weight, floor = norm.derived
    return Norm(len(weight), pointer(weight), pointer(floor))


def _described(linear: Any) -> Layer:
    assert isinstance(linear, KernelLinear)
    return linear.layer

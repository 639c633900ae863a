"""Fused forward passes of Llama-like Hugging Face models: with PyTorch, and with the C++ kernels.

A decode step of one token reads every weight once; the rest of its time is call overhead. So calls are few: one
projection for queries, keys and values, one for gate and up, rotary embedding of all heads in three operations, keys
and values stored in one. None goes through nn.Module, whose overhead equals a small operation.

Shape letters: B batch, T new tokens, M all of them (B × T, or what rows of different length add up to), d hidden size,
H query heads, G key heads, N = H + 2G, h head size.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serving.local.kernels.layers import KernelLinear, PanelSlots
from serving.local.kernels.library import (
    Block,
    Heads,
    Kernels,
    KernelWindow,
    Layer,
    Model,
    Norm,
    can_compute,
    parents_of,
    pointer,
)
from serving.local.target.layers import KVSlots, Parents, Replaced, SlotWindow, product_of

Operation = Callable[[Tensor], Tensor]
_SAME_LAYERS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
"""Hugging Face layers whose computation `FusedLayer` reproduces. Others may look the same and compute differently."""
_SILU = {"SiLU", "SiLUActivation"}
"""Class names of SiLU in PyTorch and Hugging Face."""
STRETCHING = {"dynamic", "longrope"}
"""Rotary embeddings that depend on the length of the longest text in the batch."""


def fusible(model: Any) -> bool:
    """Whether `Decoder` can run this model: its layers are known and rotate whole heads."""
    layers, config = model.model.layers, model.config
    head_dim = getattr(getattr(layers[0], "self_attn", None), "head_dim", 0)
    return (
        all(type(layer).__name__ in _SAME_LAYERS for layer in layers)
        and 2 * model.model.rotary_emb.inv_freq.numel() == head_dim
        and config.num_attention_heads % config.num_key_value_heads == 0
    )


def fuse(model: Any) -> None:
    """Replace the layers and the final norm of a fusible model by fused ones."""
    layers = model.model.layers
    for index in range(len(layers)):
        layers[index] = FusedLayer(layers[index], model.config)  # one at a time: the originals are freed
    model.model.norm = RMSNorm(model.model.norm)


class Decoder:
    """Embedding, layers and final norm of a fused model, with PyTorch's operations.

    Used by one thread at a time.
    """

    def __init__(self, model: Any, aux_layers: tuple[int, ...], cache: KVSlots) -> None:
        self._cache = cache
        self._layers: list[FusedLayer] = list(model.model.layers)
        for layer in self._layers:
            layer.bind()
        self._embed: Tensor = model.model.embed_tokens.weight
        self._norm: RMSNorm = model.model.norm
        self._rotary = model.model.rotary_emb
        self._aux_layers = aux_layers

    def __call__(self, tokens_BT: Tensor, window: SlotWindow) -> tuple[Tensor, Tensor]:
        """Returns the final hidden states [M, d] and the inputs of the aux layers side by side [M, 3d]."""
        x_Md = F.embedding(tokens_BT.flatten(), self._embed)
        cos_MNh, signed_sin_MNh = self._rotation(x_Md, window.positions_BT)
        aux = []
        for index, layer in enumerate(self._layers):
            if index in self._aux_layers:
                aux.append(x_Md)
            x_Md = layer.run(x_Md, cos_MNh, signed_sin_MNh, window, self._cache, index)
        return self._norm.forward(x_Md), torch.cat(aux, -1)

    def _rotation(self, x_Md: Tensor, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine [M, N, h] for all heads; value heads are not rotated (cosine 1, sine 0)."""
        cos_Mh, sin_Mh = (table.flatten(0, 1) for table in self._rotary(x_Md, positions_BT))
        left, right = sin_Mh.chunk(2, -1)
        num_rotated, num_values = self._layers[0].num_rotated, self._layers[0].num_groups
        return (
            _per_head(cos_Mh, num_rotated, torch.ones_like(cos_Mh), num_values),
            _per_head(torch.cat([-left, right], -1), num_rotated, torch.zeros_like(sin_Mh), num_values),
        )


class FusedLayer(nn.Module):
    """One decoder layer.

    Query heads are ordered by index in the group first, group second: a token's queries are then rows of their key
    heads, as `SlotWindow.attend_rows` takes and returns them.
    """

    def __init__(self, layer: Any, config: Any) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.head_dim: int = attention.head_dim
        self.num_groups: int = config.num_key_value_heads
        self.num_queries: int = config.num_attention_heads
        self.num_rotated = self.num_queries + self.num_groups
        self.scale: float = attention.scaling
        heads = torch.arange(self.num_queries * self.head_dim, device=attention.q_proj.weight.device)
        order = heads.view(self.num_groups, -1, self.head_dim).transpose(0, 1).flatten()
        self.qkv = _stacked(attention.q_proj, attention.k_proj, attention.v_proj, order=order)
        self.out = _linear(attention.o_proj.weight[:, order], attention.o_proj.bias)
        self.gate_up = _stacked(mlp.gate_proj, mlp.up_proj)
        self.down = _linear(mlp.down_proj.weight, mlp.down_proj.bias)
        self.act = mlp.act_fn
        self.attention_norm = RMSNorm(layer.input_layernorm)
        self.mlp_norm = RMSNorm(layer.post_attention_layernorm)
        self.query_norm = RMSNorm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.key_norm = RMSNorm(attention.k_norm) if hasattr(attention, "k_norm") else None

    @property
    def products(self) -> tuple[nn.Linear | Replaced, ...]:
        return self.qkv, self.out, self.gate_up, self.down

    def bind(self) -> None:
        """Resolve once the functions that `run` calls; after this, weights may only change in place."""
        self._qkv, self._out, self._gate_up, self._down = map(product_of, self.products)
        self._act: Operation = self.act.forward
        self._first_norm, self._second_norm = self.attention_norm.forward, self.mlp_norm.forward

    def run(
        self, x_Md: Tensor, cos_MNh: Tensor, signed_sin_MNh: Tensor, window: SlotWindow, cache: KVSlots, index: int
    ) -> Tensor:
        """The layer's output [M, d]; keys and values go to the cache's layer `index`."""
        rotated_MNh = self._rotated(self._first_norm(x_Md), cos_MNh, signed_sin_MNh)
        x_Md = x_Md + self._out(self._attend(rotated_MNh, window, cache, index))
        return x_Md + self._down(self._gated(self._gate_up(self._second_norm(x_Md))))

    def _gated(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return self._act(gate).mul_(up)

    def _rotated(self, x_Md: Tensor, cos_MNh: Tensor, signed_sin_MNh: Tensor) -> Tensor:
        qkv_MNh = self._qkv(x_Md).view(x_Md.shape[0], -1, self.head_dim)
        if self.query_norm is not None and self.key_norm is not None:
            q, k, v = qkv_MNh.split_with_sizes([self.num_queries, self.num_groups, self.num_groups], 1)
            qkv_MNh = torch.cat([self.query_norm.forward(q), self.key_norm.forward(k), v], 1)
        swapped = qkv_MNh.roll(self.head_dim // 2, -1)
        return torch.addcmul(qkv_MNh * cos_MNh, swapped, signed_sin_MNh)

    def _attend(self, rotated_MNh: Tensor, window: SlotWindow, cache: KVSlots, index: int) -> Tensor:
        """Store keys and values in the cache's layer `index`, then attend; returns [M, H · h]."""
        q_MHh, kv_MNh = rotated_MNh.split_with_sizes([self.num_queries, 2 * self.num_groups], 1)
        q_BRGh = q_MHh.reshape(window.batch, -1, self.num_groups, self.head_dim)
        return window.attend_rows(cache, index, q_BRGh, kv_MNh, self.scale).reshape(len(rotated_MNh), -1)


class RMSNorm(nn.Module):
    """Hugging Face's RMSNorm, [..., d] → [..., d]: float32 arithmetic whatever the dtype."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self._eps: float = norm.variance_epsilon
        width = len(norm.weight)
        # x / √(|x|²/d + ε) · w = x · w√d / √(|x|² + dε)
        self._scaled_weight = norm.weight.float() * math.sqrt(width)
        self._floor = torch.tensor(width * self._eps, device=norm.weight.device)
        self.derived = self._scaled_weight, self._floor
        """Tensors derived from the weight, which the pass reads instead of it."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.bfloat16 and x.is_cpu:  # half the time of rms_norm on a CPU, and one rounding fewer
            length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
            # Not hypot: its vectorised form rounds differently, so results would depend on the number of tokens.
            length = length.square_().add_(self._floor).sqrt_()
            return (x * self._scaled_weight).div_(length).to(x.dtype)  # type: ignore[no-any-return]
        return self.weight * F.rms_norm(x.float(), self.weight.shape, None, self._eps).to(x.dtype)  # type: ignore[no-any-return]


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _stacked(first: nn.Linear, *others: nn.Linear, order: Tensor | None = None) -> nn.Linear:
    """Several projections of one input as one; `order` rearranges the outputs of the first."""
    linears = [first, *others]
    weights: list[Tensor] = [linear.weight for linear in linears]
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    if order is not None:
        weights[0] = weights[0][order]
        biases[:1] = [bias[order] for bias in biases[:1]]
    return _linear(torch.cat(weights), torch.cat(biases) if biases else None)


def _per_head(rotated_Mh: Tensor, num_rotated: int, fixed_Mh: Tensor, num_fixed: int) -> Tensor:
    tables = [rotated_Mh[:, None].expand(-1, num_rotated, -1), fixed_Mh[:, None].expand(-1, num_fixed, -1)]
    return torch.cat(tables, 1)


def fits_kernels(model: Any) -> bool:
    """Whether the C++ kernels can run a model that `fusible` accepts."""
    config = model.config
    return (
        model.dtype == torch.bfloat16
        and can_compute(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            head_dim=model.model.layers[0].self_attn.head_dim,
        )
        and model.model.rotary_emb.rope_type not in STRETCHING
        and all(type(layer.mlp.act_fn).__name__ in _SILU for layer in model.model.layers)
    )


class KernelDecoder:
    """Embedding, layers and final norm of a fused model whose linear layers are `KernelLinear`, with the C++ kernels.

    Used by one thread at a time.
    """

    def __init__(self, model: Any, aux_layers: tuple[int, ...], kernels: Kernels, cache: PanelSlots) -> None:
        self._kernels, self._cache = kernels, cache
        # Keeps alive the tensors that the structures point to.
        self._layers: list[FusedLayer] = list(model.model.layers)
        self._embed: Tensor = model.model.embed_tokens.weight
        self._norm: RMSNorm = model.model.norm
        # For all positions at once: rounding could depend on how many are computed together.
        like, positions = torch.empty(0, dtype=torch.float32), torch.arange(cache.length)[None]
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

    def __call__(
        self, rows: Sequence[Sequence[int]], first_slot: int, starts: Sequence[int], parents: Sequence[Parents]
    ) -> tuple[Tensor, Tensor]:
        """Returns the final hidden states [M, d] and the inputs of the aux layers side by side [M, 3d]."""
        windows = [
            KernelWindow(slot, start, len(row), None if of_row is None else parents_of(of_row))
            for slot, (row, start, of_row) in enumerate(zip(rows, starts, parents, strict=True), first_slot)
        ]
        x_Md = F.embedding(torch.tensor([token for row in rows for token in row]), self._embed)
        return self._kernels.run(self._model, windows, self._rotation, x_Md, self._cache.storage)


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

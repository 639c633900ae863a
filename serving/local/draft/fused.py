"""The draft network in few and large operations: what `speculator.draft.eagle3.Eagle3Draft` computes, over fused
weights.

A pair is the embedding of token t+1 and the feature of position t. Only its key and value matter to later pairs, so
they alone are computed for every pair that is read; attention and the rest of the layer run where a proposal starts.

Shape letters: N pairs, B requests, d hidden size, H query heads, G key heads, P = H / G, h head size, D draft
vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from serving.local.target.attention import KVSlots
from serving.local.target.linear_layers import can_pack, linear, pack
from speculator.draft.eagle3 import DraftConfig, Eagle3Draft

_LAYER, _ATTENTION, _MLP = "midlayer", "midlayer.self_attn", "midlayer.mlp"


class Span(NamedTuple):
    """Pairs of one slot that follow one another, and the position of the first."""

    start: int
    num_pairs: int


class FusedDraft:
    """The arithmetic of one draft; the weights in `weights` are packed on a CPU in bfloat16.

    Query heads are stored by their place in the group first, the group second, as attention over slots wants them.
    """

    def __init__(self, model: Eagle3Draft, *, num_slots: int, length: int) -> None:
        config = self._config = model.config
        self.dtype, self.device = model.norm.weight.dtype, model.norm.weight.device
        self.num_queries, self.num_groups, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self._embed = model.embed.to(self.dtype)
        like = model.norm.weight
        self.cache = KVSlots(1, num_slots, config.num_key_value_heads, length, config.head_dim, like)
        self._positions = torch.arange(length, device=like.device)
        left, right = model.rotary.sin.chunk(2, -1)
        rotation = torch.stack([model.rotary.cos, torch.cat([-left, right], -1)], 1)
        self._rotation = rotation.to(self.dtype)  # [positions, 2, h]: cosine and signed sine
        self._wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        root = math.sqrt(config.hidden_size)
        self._floor = torch.tensor(root * math.sqrt(config.rms_norm_eps), dtype=self._wide, device=self.device)
        self.weights = self.fused(dict(model.named_parameters()))
        """By name; only ever changed in place."""

    @torch.no_grad()
    def fused(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of a draft file in the form of `weights`, in memory of their own; for any thread."""
        norms = fused_norms(state, self._config, self._wide)
        return {
            **{name: self._matrix(weight) for name, weight in fused_matrices(state, self._config).items()},
            **{name: norm.to(self.device) for name, norm in norms.items()},
        }

    def features(self, aux_Nw: Tensor) -> Tensor:
        """Reduce the three target features [N, 3d] to one [N, d]."""
        return linear(aux_Nw.to(self.dtype), self.weights["fc"])

    def layer(self, tokens_N: Sequence[int], feature_Nd: Tensor, spans: Sequence[Span], *, first_slot: int) -> Tensor:
        """Read the pairs of slots `first_slot`…, span after span: the layer's output [B, d] at the newest of each."""
        lengths = [start + num_pairs for start, num_pairs in spans]
        index = [
            tokens_N,
            [slot for slot, span in enumerate(spans, first_slot) for _ in range(span.num_pairs)],
            [position for span, length in zip(spans, lengths, strict=True) for position in range(span.start, length)],
        ]
        ids_N, slots_N, positions_N = torch.tensor(index, device=self.device)
        qkv_NHh = self._project(ids_N, feature_Nd, positions_N)
        self.cache.write(0, self.cache.lines(slots_N, positions_N[:, None]), qkv_NHh[:, self.num_queries :])
        if len(ids_N) > len(spans):
            ends = itertools.accumulate(span.num_pairs for span in spans)
            newest_B = torch.tensor([end - 1 for end in ends], device=self.device)
            feature_Nd, qkv_NHh = feature_Nd[newest_B], qkv_NHh[newest_B]
        longest = max(lengths)
        ((keys, values),) = self.cache.read(slice(first_slot, first_slot + len(lengths)), longest)
        mask_B11L = None
        if min(lengths) < longest:
            length_B111 = torch.tensor(lengths, device=self.device)[:, None, None, None]
            mask_B11L = self._positions[:longest] < length_B111
        attended_Bw = self._attend(qkv_NHh[:, : self.num_queries], keys, values, mask_B11L)
        return self._finish(feature_Nd, attended_Bw)

    def _project(self, tokens_N: Tensor, feature_Nd: Tensor, positions_N: Tensor) -> Tensor:
        """Queries, keys and values [N, H + 2G, h] of pairs, rotated to their positions."""
        pair_N2d = torch.cat([F.embedding(tokens_N, self._embed), feature_Nd], -1).view(len(tokens_N), 2, -1)
        normed = self._norm(pair_N2d, self.weights["pair_norm"]).flatten(1)
        qkv_NHh = linear(normed, self.weights["qkv"]).view(len(tokens_N), -1, self.head_dim)
        rotated_NHh = qkv_NHh[:, : self.num_queries + self.num_groups]
        swapped_NHh = rotated_NHh.view(*rotated_NHh.shape[:2], 2, -1).flip(2).flatten(2)
        cos, signed_sin = self._rotation.index_select(0, positions_N).chunk(2, 1)
        torch.addcmul(rotated_NHh * cos, swapped_NHh, signed_sin, out=rotated_NHh)
        return qkv_NHh

    def _attend(self, q_BHh: Tensor, keys_BGLh: Tensor, values_BGLh: Tensor, mask: Tensor | None) -> Tensor:
        """What one query a request sees, [B, H · h]."""
        q_BGPh = q_BHh.view(len(q_BHh), -1, self.num_groups, self.head_dim).transpose(1, 2)
        out_BGPh = F.scaled_dot_product_attention(q_BGPh, keys_BGLh, values_BGLh, attn_mask=mask)
        return out_BGPh.transpose(1, 2).reshape(len(q_BHh), -1)

    def _finish(self, feature_Bd: Tensor, attended_Bw: Tensor) -> Tensor:
        """The layer's output [B, d]: before the final norm, as it is fed back."""
        hidden_Bd = feature_Bd + linear(attended_Bw, self.weights["out"])
        normed_Bd = self._norm(hidden_Bd, self.weights["mlp_norm"])
        gate, up = linear(normed_Bd, self.weights["gate_up"]).chunk(2, -1)
        return hidden_Bd + linear(F.silu(gate).mul_(up), self.weights["down"])

    def logits(self, output_Bd: Tensor) -> Tensor:
        """Logits over the draft vocabulary [B, D]."""
        return linear(self._norm(output_Bd, self.weights["norm"]), self.weights["head"])

    def _norm(self, x: Tensor, scaled_weight: Tensor) -> Tensor:
        # x / √(|x|²/d + ε) · w = x · w√d / √(|x|² + dε): the fewest operations on a CPU, in float32 at least.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=self._wide)
        return (x * scaled_weight).div_(length.hypot_(self._floor)).to(self.dtype)

    def _matrix(self, weight: Tensor) -> Tensor:
        if self.device.type == "cpu" and self.dtype == torch.bfloat16 and can_pack():
            return pack(weight.to("cpu", torch.bfloat16))
        return weight.to(self.device, self.dtype, copy=True)


def fused_matrices(state: Mapping[str, Tensor], config: DraftConfig) -> dict[str, Tensor]:
    """Those of a draft file by the name in `weights`, query heads by their place in the group first."""
    heads = torch.arange(config.num_attention_heads * config.head_dim)
    order = heads.view(config.num_key_value_heads, -1, config.head_dim).transpose(0, 1).flatten()
    return {
        "fc": state["fc.weight"],
        "qkv": torch.cat(
            [
                state[f"{_ATTENTION}.q_proj.weight"][order],
                state[f"{_ATTENTION}.k_proj.weight"],
                state[f"{_ATTENTION}.v_proj.weight"],
            ]
        ),
        "out": state[f"{_ATTENTION}.o_proj.weight"][:, order],
        "gate_up": torch.cat([state[f"{_MLP}.gate_proj.weight"], state[f"{_MLP}.up_proj.weight"]]),
        "down": state[f"{_MLP}.down_proj.weight"],
        "head": state["lm_head.weight"],
    }


def fused_norms(state: Mapping[str, Tensor], config: DraftConfig, wide: torch.dtype) -> dict[str, Tensor]:
    """w√d, computed in `wide`: x / √(|x|²/d + ε) · w = x · w√d / √(|x|² + dε)."""
    norms = {
        "pair_norm": torch.stack([state[f"{_LAYER}.input_layernorm.weight"], state[f"{_LAYER}.hidden_norm.weight"]]),
        "mlp_norm": state[f"{_LAYER}.post_attention_layernorm.weight"],
        "norm": state["norm.weight"],
    }
    return {name: weight.to(wide) * math.sqrt(config.hidden_size) for name, weight in norms.items()}

"""The draft's network in the library.

Shape letters: N pairs, B requests, d hidden size, h head size, L positions, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from serving.local.draft.fused import Span, fused_matrices, fused_norms
from serving.local.kernels.layers import panels
from serving.local.kernels.library import Block, Draft, Heads, Kernels, Layer, Norm, Window, can_compute, pointer
from serving.local.kernels.memory import LargePages
from serving.local.kernels.slots import PanelSlots
from speculator.draft.eagle3 import Eagle3Draft


def fits(model: Eagle3Draft) -> bool:
    """Whether the library computes this draft."""
    config, weight = model.config, model.norm.weight
    return (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and can_compute(
            hidden_size=config.hidden_size, intermediate_size=config.intermediate_size, head_dim=config.head_dim
        )
    )


class KernelDraft:
    """What `serving.local.draft.fused.FusedDraft` is, in C++."""

    def __init__(self, model: Eagle3Draft, kernels: Kernels, *, num_slots: int, length: int) -> None:
        config = model.config
        self._config, self._kernels, self._embed = config, kernels, model.embed.to(torch.bfloat16)
        self._rotation = model.rotary.cos.float().contiguous(), model.rotary.sin.float().contiguous()
        self._floor = torch.tensor(config.hidden_size * config.rms_norm_eps, dtype=torch.float32)
        self.cache = PanelSlots(1, num_slots, config.num_key_value_heads, length, config.head_dim)
        self.weights = _gathered(self.fused(dict(model.named_parameters())))
        """By name; only ever changed in place."""
        self._layers = {name: self._layer_of(name) for name in ("fc", "qkv", "out", "gate_up", "down", "head")}
        heads = Heads(
            config.num_attention_heads // config.num_key_value_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.head_dim**-0.5,
            Norm(),
            Norm(),
        )
        embedding_norm, *norms = map(self._norm_of, (*self.weights["pair_norm"], self.weights["mlp_norm"]))
        layers = (self._layers[name] for name in ("qkv", "out", "gate_up", "down"))
        self._draft = Draft(embedding_norm, Block(*norms, heads, *layers))
        self._norm = self._norm_of(self.weights["norm"])

    @torch.no_grad()
    def fused(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of a draft file in the form of `weights`, in memory of their own; for any thread."""
        matrices, norms = fused_matrices(state, self._config), fused_norms(state, self._config, torch.float32)
        return {
            **{name: panels(weight.to("cpu", torch.bfloat16)) for name, weight in matrices.items()},
            **{name: norm.to("cpu") for name, norm in norms.items()},
        }

    def features(self, aux_Nw: Tensor) -> Tensor:
        """Reduce the three target features [N, 3d] to one [N, d]."""
        return self._kernels.linear(self._layers["fc"], aux_Nw.to(torch.bfloat16))

    def layer(self, tokens_N: Sequence[int], feature_Nd: Tensor, spans: Sequence[Span], *, first_slot: int) -> Tensor:
        """What `FusedDraft.layer` says."""
        windows = [Window(slot, span.start, span.num_pairs) for slot, span in enumerate(spans, first_slot)]
        embedding_Nd = F.embedding(torch.tensor(tokens_N), self._embed)
        return self._kernels.draft(
            self._draft, windows, self._rotation, embedding_Nd, feature_Nd, self.cache.storage[0]
        )

    def logits(self, output_Bd: Tensor) -> Tensor:
        """Logits over the draft vocabulary [B, D]."""
        return self._kernels.normed_linear(self._norm, self._layers["head"], output_Bd)

    def _norm_of(self, weight: Tensor) -> Norm:
        return Norm(len(weight), pointer(weight), pointer(self._floor))

    def _layer_of(self, name: str) -> Layer:
        config = self._config
        d, heads = config.hidden_size, config.num_attention_heads
        sizes = {
            "fc": (3 * d, d),
            "qkv": (2 * d, (heads + 2 * config.num_key_value_heads) * config.head_dim),
            "out": (heads * config.head_dim, d),
            "gate_up": (d, 2 * config.intermediate_size),
            "down": (config.intermediate_size, d),
            "head": (d, config.draft_vocab_size),
        }
        return Layer(*sizes[name], pointer(self.weights[name]), None, self._kernels.in_pairs)


def _gathered(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """In large pages."""
    pages = LargePages([weight.nbytes for weight in weights.values()])
    return {name: pages.hold(weight) for name, weight in weights.items()}

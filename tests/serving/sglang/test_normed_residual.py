"""SGLang's draft layer, as it is written there, with the residual of a draft that was trained with another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from serving.sglang.plugin.normed_residual import add_to_normed_features
from speculator.draft.eagle3 import DraftConfig, DraftLayer, RotaryEmbedding
from speculator.errors import ConfigError
from tests.fixtures.drafts import make_draft


class Fused(nn.Module):
    """An RMSNorm of SGLang's: with a residual it adds in its place and returns both."""

    def __init__(self, norm: nn.RMSNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if residual is None:
            return self.norm(x)  # type: ignore[no-any-return]
        residual += x
        return self.norm(residual), residual


class SglangLayer(nn.Module):
    def __init__(self, layer: DraftLayer, config: DraftConfig) -> None:
        super().__init__()
        self.layer, self.rotary = layer, RotaryEmbedding(config)
        self.hidden_norm, self.input_layernorm = Fused(layer.hidden_norm), Fused(layer.input_layernorm)
        self.post_attention_layernorm = Fused(layer.post_attention_layernorm)

    def forward(
        self, positions: Tensor, embeds: Tensor, hidden_states: Tensor, forward_batch: None, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        residual = hidden_states
        hidden_states = self.hidden_norm(hidden_states)
        pair = torch.cat([self.input_layernorm(embeds), hidden_states], -1)
        attended = self.layer.self_attn(pair, positions, self.rotary, attend)
        hidden_states, residual = self.post_attention_layernorm(attended, residual)
        return self.layer.mlp(hidden_states), residual


class Other(SglangLayer):
    """What a later version might do."""

    def forward(self, positions: Tensor, embeds: Tensor, hidden_states: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        return self.layer.mlp(self.hidden_norm(hidden_states)), hidden_states


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(layers)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def inputs(config: DraftConfig) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    embeds, feature = torch.randn(2, 1, 5, config.hidden_size, generator=generator)
    return torch.arange(5)[None], embeds, feature


@torch.no_grad()
@pytest.mark.parametrize("is_normed", [False, True])
def test_only_the_residual_is_another(is_normed: bool) -> None:
    draft = make_draft(3, norm_before_residual=is_normed)
    layer = SglangLayer(draft.midlayer, draft.config)
    if is_normed:
        add_to_normed_features(Model(layer))
    positions, embeds, feature = inputs(draft.config)
    expected = draft.midlayer(embeds, feature, positions, draft.rotary, attend)
    for _ in range(2):
        given = feature.clone()
        ours, residual = layer(positions, embeds, given, None, None)
        torch.testing.assert_close(ours + residual, expected)
        assert torch.equal(given, feature) is is_normed, "SGLang adds in the residual's place"


def test_a_layer_that_computes_otherwise_ends_the_pass_and_one_without_norms_the_start() -> None:
    draft = make_draft(3, norm_before_residual=True)
    layer = Other(draft.midlayer, draft.config)
    add_to_normed_features(Model(layer))
    positions, embeds, feature = inputs(draft.config)
    with pytest.raises(ConfigError, match=r"cannot serve a draft with norm_before_residual, .*Other does not add"):
        layer(positions, embeds, feature, None, None)
    for model in (Model(), Model(nn.Linear(2, 2)), Model(layer, layer)):
        with pytest.raises(ConfigError, match="has not one layer with hidden_norm"):
            add_to_normed_features(model)

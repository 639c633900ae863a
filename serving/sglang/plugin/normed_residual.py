"""Serve heads that were trained with `norm_before_residual`, which SGLang's own draft layer does not compute.

SGLang's layer adds the output of its attention to the feature itself:

    residual = hidden_states
    hidden_states = self.hidden_norm(hidden_states)
    …
    hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)

Two hooks on its modules give the second norm the output of the first one as the residual. They run while SGLang records
its graphs, which then include the change. Other drafts get no hooks, and their servers need no such layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from serving.sglang.plugin.checks import INSTALL, sglang_version
from serving.sglang.plugin.contract import NORMED_RESIDUAL, check_sglang_functions
from serving.sglang.settings import PluginSettings
from speculator.draft.checkpoint import config_from_json
from speculator.errors import ConfigError
from speculator.versions.store import DraftStore

_Pair = tuple[torch.Tensor, torch.Tensor]


def check_layer(args: Any, settings: PluginSettings) -> None:
    """Raises ConfigError where the draft, which `check_server` has accepted, needs a layer that this SGLang lacks."""
    version = int(Path(args.speculative_draft_model_path).resolve().name)
    if config_from_json(DraftStore(settings.store).config(version)).norm_before_residual:
        check_sglang_functions(NORMED_RESIDUAL, sglang_version())


def add_to_normed_features(model: nn.Module) -> None:
    """Change the residual in the draft's layer. Raises ConfigError where the draft has not one layer with norms."""
    layers: list[Any] = list(getattr(getattr(model, "model", None), "layers", []))
    norms = [[getattr(layer, name, None) for name in ("hidden_norm", "post_attention_layernorm")] for layer in layers]
    if len(norms) != 1 or not all(isinstance(norm, nn.Module) for norm in norms[0]):
        raise _unusable(f"{type(model).__name__} has not one layer with hidden_norm and post_attention_layernorm")
    _NormedResidual(layers[0])


class _NormedResidual:
    """Raises where SGLang does not call both norms as expected: it would silently compute another network."""

    def __init__(self, layer: Any) -> None:
        self._forward, self._name = layer.forward, f"{type(layer).__module__}.{type(layer).__name__}"
        self._normed: torch.Tensor | None = None
        self._is_exchanged = False
        layer.hidden_norm.register_forward_hook(self._after_feature_norm)
        layer.post_attention_layernorm.register_forward_pre_hook(self._before_mlp_norm)
        layer.forward = self._checked

    def _after_feature_norm(self, _: nn.Module, __: Any, normed: torch.Tensor) -> None:
        self._normed = normed

    def _before_mlp_norm(self, _: nn.Module, inputs: _Pair) -> _Pair:
        attended, residual = inputs
        normed, self._normed = self._normed, None
        if normed is None or normed.shape != residual.shape:
            raise self._changed()
        self._is_exchanged = True
        return attended, normed

    def _checked(self, *args: Any, **kwargs: Any) -> Any:
        self._is_exchanged = False
        output = self._forward(*args, **kwargs)
        if not self._is_exchanged:
            raise self._changed()
        return output

    def _changed(self) -> ConfigError:
        return _unusable(f"{self._name} does not add to its feature as expected")


def _unusable(what: str) -> ConfigError:
    return ConfigError(f"SGLang {sglang_version()} cannot serve a draft with norm_before_residual, {what}: {INSTALL}")

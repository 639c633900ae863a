"""A target that moves: new weights are staged aside in the form of those in service, and then copied over them.

The staged copy goes through the same fusing and packing as the target itself did, so its tensors correspond one by one
to those that the passes read, whatever those are: a fused projection, a packed layer, or a norm's scaled weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from serving.local.target.forward import RMSNorm
from serving.local.target.linear_layers import Replaced
from speculator.errors import TargetError


@dataclass(frozen=True)
class StagedTarget:
    """Verified weights, in the order of `all_tensors`."""

    tensors: tuple[Tensor, ...]


def all_tensors(model: Any) -> Iterator[Tensor]:
    """Everything that the passes read and that follows from the weights, always in the same order."""
    for module in model.modules():
        if isinstance(module, Replaced):
            yield from module.parts
        elif isinstance(module, RMSNorm):
            yield from module.derived
    yield from model.state_dict().values()


def bare_copy(model: Any, weights: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
    """A model of the same class over these weights, on the CPU. It cannot run: tables that do not come from weights are
    missing. Raises TargetError where the class has other tensors than the file.
    """
    with torch.device("meta"):
        bare = type(model)(model.config).to(dtype)
    found = bare.load_state_dict(
        {name: tensor.to(dtype) for name, tensor in weights.items()}, strict=False, assign=True
    )
    bare.tie_weights()
    missing = [name for name, parameter in bare.named_parameters() if parameter.is_meta]
    if missing or found.unexpected_keys:
        raise TargetError(f"{type(model).__name__} does not take its weights under the names in the file")
    return bare.eval().requires_grad_(False)


@torch.no_grad()
def copy_over(places: Sequence[Tensor], staged: StagedTarget) -> None:
    for place, tensor in zip(places, staged.tensors, strict=True):
        assert place.shape == tensor.shape, "the staged copy was made like the target"
        place.copy_(tensor)

"""Linear layers with weights reordered once, for oneDNN or for kernels of our own; who computes which.

PyTorch's bfloat16 matmul on CPU reorders the weight at every call as soon as there is more than one row, which makes
verifying 4 tokens cost 1.4 × one. With weights packed beforehand (what Inductor's freezing does) it costs 1.1 ×.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serving.local.kernels.layers import KernelLinear
from serving.local.kernels.library import Kernels
from speculator.draft.eagle3 import is_fast

_ROWS_HINT = 8  # rows the layout is chosen for: a few requests times a short chain


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

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """What is read in the weight's place; another layer's of the same shape can be copied into it."""
        return (self.packed,) if self.bias is None else (self.packed, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.packed, self.bias)


Replaced = PackedLinear | KernelLinear
"""A layer that does not read its weight as the checkpoint has it."""


def product_of(layer: nn.Linear | Replaced) -> Callable[[Tensor], Tensor]:
    """What the layer computes, without the detours of a module; its weight may change in place."""
    assert not isinstance(layer, KernelLinear), "a pass of its own runs those"
    weight = layer.packed if isinstance(layer, PackedLinear) else layer.weight
    return partial(linear, weight=weight, bias=layer.bias)


def pack_linears(model: nn.Module, *, kernels: Kernels | None) -> None:
    """Replace every bfloat16 nn.Linear of a model on the CPU by a layer of `kernels`, which the model fits, or of
    oneDNN, where it can.
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

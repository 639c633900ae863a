"""Linear layers that the library computes: what a token gets does not depend on the tokens beside it.

Suffixes: K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serving.local.kernels.library import LANES, PANEL, Kernels, Layer, pointer
from serving.local.kernels.memory import LargePages

log = structlog.get_logger(__name__)


class KernelLinear(nn.Module):
    """A frozen nn.Linear, bfloat16 [..., K] → [..., N], K a multiple of `LANES`; its weight may change in place."""

    def __init__(self, linear: nn.Linear, kernels: Kernels, *, in_pairs: bool | None = None) -> None:
        """`in_pairs`: whether products take two inputs at a time; None as the kernels do by default."""
        in_pairs = kernels.in_pairs if in_pairs is None else in_pairs
        assert linear.in_features % LANES == 0
        assert kernels.has_pairs or not in_pairs
        super().__init__()
        self._kernels = kernels
        weight, bias_N = panels(linear.weight.detach()), None
        if linear.bias is not None:
            bias_N = F.pad(linear.bias.detach().float(), (0, -linear.out_features % PANEL))
        self._parts = (weight,) if bias_N is None else (weight, bias_N)
        self.layer = Layer(linear.in_features, linear.out_features, pointer(weight), pointer(bias_N), in_pairs)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """What is read in the weight's place; another layer's of the same shape can be copied into it."""
        return self._parts

    def move(self, pages: LargePages) -> None:
        """The weight into these pages."""
        weight = pages.hold(self._parts[0])
        self._parts = weight, *self._parts[1:]
        self.layer.weight = pointer(weight)

    def forward(self, x: Tensor) -> Tensor:
        return self._kernels.linear(self.layer, x)


def gather(layers: Sequence[KernelLinear]) -> None:
    """Move their weights into large pages, one after the other; they stay where they are if there is no room."""
    try:
        pages = LargePages([layer.parts[0].nbytes for layer in layers])
    except OSError as error:
        log.info("weights stay in small pages", reason=str(error))
        return
    for layer in layers:
        layer.move(pages)


def panels(weight_NK: Tensor) -> Tensor:
    """bfloat16 [panels, K / 2, 64, 2]: the order in which a kernel reads a weight, padded with rows of zeros."""
    assert weight_NK.dtype == torch.bfloat16
    padded = F.pad(weight_NK, (0, 0, 0, -len(weight_NK) % PANEL))
    return padded.view(-1, PANEL, padded.shape[1] // 2, 2).transpose(1, 2).contiguous()

"""Linear layers that the library computes: what a token gets does not depend on the tokens beside it.

Suffixes: K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serving.local.int8 import OFFSET, whole_numbers
from serving.local.kernels.library import LANES, PANEL, Kernels, Layer, pointer
from serving.local.kernels.memory import LargePages

log = structlog.get_logger(__name__)

_STEP_BYTES = 4
"""Of inputs that lie together."""


class KernelLinear(nn.Module):
    """A frozen nn.Linear, bfloat16 [..., K] → [..., N], K a multiple of `LANES`; its weight may change in place."""

    def __init__(
        self,
        linear: nn.Linear,
        kernels: Kernels,
        weight_NK: Tensor,
        *,
        offsets_N: Tensor | None = None,
        scale_N: Tensor | None = None,
        in_pairs: bool = False,
    ) -> None:
        assert linear.in_features % LANES == 0
        super().__init__()
        self._kernels = kernels
        weight = panels(weight_NK)
        bias_N = None if linear.bias is None else linear.bias.detach().float()
        rest = [None if of_N is None else _padded(of_N) for of_N in (offsets_N, scale_N, bias_N)]
        self._parts = (weight, *(part for part in rest if part is not None))
        self.layer = Layer(linear.in_features, linear.out_features, *map(pointer, (weight, *rest)), in_pairs)

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


class VnniLinear(KernelLinear):
    """What `Int8Linear` computes, to the last bit, in bfloat16."""

    def __init__(self, linear: nn.Linear, kernels: Kernels) -> None:
        assert kernels.has_int8
        whole_NK, scale_N1 = whole_numbers(linear.weight.detach())
        # What the inputs' offset adds to the sums is taken off beforehand.
        offsets_N = -OFFSET * whole_NK.sum(1, dtype=torch.int32)
        super().__init__(linear, kernels, whole_NK, offsets_N=offsets_N, scale_N=scale_N1[:, 0])


class Bfloat16Linear(KernelLinear):
    """Summed up in float32, one input after the other or in pairs: by default as the kernels have it."""

    def __init__(self, linear: nn.Linear, kernels: Kernels, *, in_pairs: bool | None = None) -> None:
        in_pairs = kernels.in_pairs if in_pairs is None else in_pairs
        super().__init__(linear, kernels, linear.weight.detach(), in_pairs=in_pairs)


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
    """[panels, steps, 64, inputs of a step]: the order in which a kernel reads it, padded with rows of zeros."""
    together = _STEP_BYTES // weight_NK.element_size()
    padded = F.pad(weight_NK, (0, 0, 0, -len(weight_NK) % PANEL))
    return padded.view(-1, PANEL, padded.shape[1] // together, together).transpose(1, 2).contiguous()


def _padded(of_N: Tensor) -> Tensor:
    return F.pad(of_N, (0, -len(of_N) % PANEL)).contiguous()

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
from serving.local.kernels.library import LANES, PANEL, Kernels, Layer, Way, pointer
from serving.local.kernels.memory import LargePages

log = structlog.get_logger(__name__)

_STEP_BYTES = 4
"""Of inputs that lie together."""
_BLOCK, _WEIGHT_BITS = 64, 12
"""Inputs that share an exponent, and bits of a weight beside its sign (shared.h)."""
_LEAST_POWER = -62
"""Of two, so that the product with an input's is no denormal number."""


class KernelLinear(nn.Module):
    """A frozen nn.Linear, bfloat16 [..., K] → [..., N], K a multiple of `LANES`; its weight may change in place."""

    def __init__(
        self,
        linear: nn.Linear,
        kernels: Kernels,
        weight: Tensor,
        way: Way,
        *,
        offsets_N: Tensor | None = None,
        scale_N: Tensor | None = None,
    ) -> None:
        """`weight`: laid out as the way reads it."""
        assert linear.in_features % LANES == 0
        assert way in kernels.ways
        super().__init__()
        self._kernels = kernels
        bias_N = None if linear.bias is None else linear.bias.detach().float()
        rest = [None if of_N is None else _padded(of_N) for of_N in (offsets_N, scale_N, bias_N)]
        self._parts = (weight, *(part for part in rest if part is not None))
        self.layer = Layer(linear.in_features, linear.out_features, *map(pointer, (weight, *rest)), way)

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
        whole_NK, scale_N1 = whole_numbers(linear.weight.detach())
        # What the inputs' offset adds to the sums is taken off beforehand.
        offsets_N = -OFFSET * whole_NK.sum(1, dtype=torch.int32)
        super().__init__(linear, kernels, _panels(whole_NK), Way.WHOLE8, offsets_N=offsets_N, scale_N=scale_N1[:, 0])


class Bfloat16Linear(KernelLinear):
    """Multiplied as the kernels do by default, or in another way, and summed up in float32."""

    def __init__(self, linear: nn.Linear, kernels: Kernels, *, way: Way | None = None) -> None:
        way = kernels.way if way is None else way
        super().__init__(linear, kernels, bfloat16_weight(linear.weight.detach(), way), way)


def gather(layers: Sequence[KernelLinear]) -> None:
    """Move their weights into large pages, one after the other; they stay where they are if there is no room."""
    try:
        pages = LargePages([layer.parts[0].nbytes for layer in layers])
    except OSError as error:
        log.info("weights stay in small pages", reason=str(error))
        return
    for layer in layers:
        layer.move(pages)


def bfloat16_weight(weight_NK: Tensor, way: Way) -> Tensor:
    """A weight in bfloat16, laid out as the way reads it."""
    assert weight_NK.dtype == torch.bfloat16
    return _strips(weight_NK) if way is Way.SHARED_EXPONENTS else _panels(weight_NK)


def _panels(weight_NK: Tensor) -> Tensor:
    """[panels, steps, 64, inputs of a step]: the order in which a kernel reads it, padded with rows of zeros."""
    together = _STEP_BYTES // weight_NK.element_size()
    padded = F.pad(weight_NK, (0, 0, 0, -len(weight_NK) % PANEL))
    return padded.view(-1, PANEL, padded.shape[1] // together, together).transpose(1, 2).contiguous()


def _strips(weight_NK: Tensor) -> Tensor:
    """int16 [strips, blocks, (powers of 16 outputs in bfloat16, then [steps, 16, 2 inputs])]: the order of shared.h,
    padded to whole panels and blocks with zeros.
    """
    padded = F.pad(weight_NK, (0, -weight_NK.shape[1] % _BLOCK, 0, -len(weight_NK) % PANEL))
    blocks = padded.view(-1, LANES, padded.shape[1] // _BLOCK, _BLOCK).transpose(1, 2)
    largest = blocks.abs().amax(-1, keepdim=True).float()  # NaN if one is
    exponent = largest.frexp().exponent - _WEIGHT_BITS
    powers = torch.ldexp(torch.ones_like(largest), exponent.clamp_min(_LEAST_POWER))
    whole = (blocks / powers).round_().nan_to_num_(0, 0, 0).to(torch.int16)
    steps = whole.view(*whole.shape[:-1], -1, 2).transpose(2, 3).flatten(2)
    kept = powers[..., 0].where(largest[..., 0].isfinite(), torch.nan).bfloat16().view(torch.int16)
    return torch.cat([kept, steps], -1)


def _padded(of_N: Tensor) -> Tensor:
    return F.pad(of_N, (0, -len(of_N) % PANEL)).contiguous()

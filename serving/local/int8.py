"""Linear layers in 8 bits: half the bytes of bfloat16 to read, and sums of whole numbers.

A weight's row is whole numbers from -127 to 127 times a scale of its own. A token's input is two such rows, the second
of what the first leaves over: rows are cheap, and one alone would be the larger error by far (docs/local-loop.md).
Sums of whole numbers are exact, so what a token gets does not depend on the tokens beside it: verifying several rounds
no differently from decoding one by one. The text is another one than in bfloat16.

Suffixes: M tokens, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from serving.local.compiled import as_it_is

_LARGEST = 127
OFFSET = 128  # of inputs: oneDNN multiplies unsigned ones fast, and signed ones in a loop of its reference
_ROWS_HINT = 8  # rows the layout is chosen for, as for packed bfloat16


def whole_numbers(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., K] → int8 [..., K] and float32 scales [..., 1], whose product is nearest to x."""
    rounded, scale = _rounded(x)
    return rounded.to(torch.int8), scale


def _rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / _LARGEST
    return (x / scale).round(), scale


def is_exact() -> bool:
    """Whether this CPU adds such products in 32 bits: without VNNI oneDNN adds pairs in 16 first, which overflow."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_vnni", "avx_vnni"))


class Int8Linear(nn.Module):
    """A frozen nn.Linear without gradient, [..., K] → [..., N] of the same dtype, on a CPU with oneDNN."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.out_features = linear.out_features
        whole_NK, scale_N1 = whole_numbers(linear.weight.detach())
        self.packed: Tensor = torch.ops.onednn.qlinear_prepack(whole_NK, [_ROWS_HINT, linear.in_features])
        self.scale_N = scale_N1[:, 0].contiguous()
        self.bias_N = None if linear.bias is None else linear.bias.detach().float()
        self._zeros_N = torch.zeros(self.out_features, dtype=torch.int32)
        self._product = self.bound(as_it_is)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """What is read in the weight's place; another layer's of the same shape can be copied into it."""
        return (self.packed, self.scale_N) if self.bias_N is None else (self.packed, self.scale_N, self.bias_N)

    def bound(self, wrap: Callable[..., Callable[[Tensor], Tensor]]) -> Callable[[Tensor], Tensor]:
        """The layer as a function; `wrap` gets the part that oneDNN computes, its width and its dtype."""
        times = wrap(self._times, self.out_features, torch.float32)

        def product(x: Tensor) -> Tensor:
            first, scale = _rounded(x)
            # What is left is at most half a step of the first.
            second = ((x.float() / scale - first) * (2 * _LARGEST)).round()
            both = times((torch.cat([first, second]) + OFFSET).to(torch.uint8))
            ours, left = both.chunk(2)
            y = (ours + left / (2 * _LARGEST)) * scale
            return (y if self.bias_N is None else y + self.bias_N).to(x.dtype)

        return product

    def forward(self, x: Tensor) -> Tensor:
        return self._product(x)

    def _times(self, moved: Tensor) -> Tensor:
        """Whole numbers + 128, uint8 [..., K], times the weight: float32 [..., N]."""
        scales: tuple[Any, ...] = (1.0, OFFSET, self.packed, self.scale_N, self._zeros_N, None, 1.0, 0)
        return torch.ops.onednn.qlinear_pointwise(moved, *scales, torch.float32, "none", [], "")  # type: ignore[no-any-return]

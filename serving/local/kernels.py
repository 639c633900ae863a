"""The kernels of `kernels.cpp`, compiled at the first start of an engine where there is a C++ compiler: two seconds.

A library's call of one product takes longer to prepare than to read a small layer's weights, and a step makes 121 of
them (docs/local-loop.md has the figures, and what other libraries take). And no library promises that a token's result
does not depend on how many are beside it, which is what makes the text with a draft the same, bit for bit.

Suffixes: M tokens, K inputs, N outputs, T new tokens, G key heads, P query heads of one key head, S slots, L positions,
h head size; in `attend` B requests.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import structlog
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serving.local.compiled import find_compiler, kernel_folder
from serving.local.int8 import OFFSET, whole_numbers
from speculator.errors import ConfigError

log = structlog.get_logger(__name__)

_SOURCE = Path(__file__).with_suffix(".cpp")
# Contracted products and sums would round differently from PyTorch's, and from those of another compiler.
_OPTIONS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC")
_INSTRUCTIONS = ("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq", "avx512_vnni")
_BFLOAT16 = "avx512_bf16"
_PANEL = 64
"""Outputs that lie together in a packed weight."""
_STEP_BYTES = 4
"""Of inputs that do."""
_HEAD_DIMS = (64, 128)
_SILU = {"SiLU", "SiLUActivation"}
"""PyTorch's and Hugging Face's."""


def available() -> bool:
    """Whether this CPU has the instructions of all but the bfloat16 product. One that multiplies tiles (AMX) is left to
    oneDNN: for many tokens that is likely faster there, and nobody has compared.
    """
    return _has(*_INSTRUCTIONS) and not _has("amx_tile")


def _has(*names: str) -> bool:
    capabilities = torch.cpu.get_capabilities()
    return all(capabilities.get(name, False) for name in names)


class Kernels:
    """The compiled library."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        number, pointer = ctypes.c_int64, ctypes.c_void_p
        self._int8 = _declared(library.slipstream_linear_int8, [number] * 3 + [pointer] * 6 + [number])
        self._attend = _declared(
            library.slipstream_attend, [number] * 7 + [pointer, ctypes.c_float] + [pointer] * 3 + [number]
        )
        self._gate = _declared(library.slipstream_gate, [number] * 2 + [pointer] * 2 + [number])
        self.has_bfloat16 = hasattr(library, "slipstream_linear_bfloat16")
        if self.has_bfloat16:
            self._bfloat16 = _declared(library.slipstream_linear_bfloat16, [number] * 3 + [pointer] * 4 + [number])

    def linear_int8(
        self, x: Tensor, num_outputs: int, weight: Tensor, offsets_N: Tensor, scale_N: Tensor, bias_N: Tensor | None
    ) -> Tensor:
        """bfloat16 [..., K] → [..., N], with what `VnniLinear` keeps of a layer."""
        x = _checked(x, weight)
        y = x.new_empty(*x.shape[:-1], num_outputs)
        kept = (_pointer(part) for part in (x, weight, offsets_N, scale_N, bias_N, y))
        self._int8(x.numel() // x.shape[-1], x.shape[-1], num_outputs, *kept, torch.get_num_threads())
        return y

    def linear_bfloat16(self, x: Tensor, num_outputs: int, weight: Tensor, bias_N: Tensor | None) -> Tensor:
        """bfloat16 [..., K] → [..., N], with what `Bfloat16Linear` keeps of a layer."""
        x = _checked(x, weight)
        y = x.new_empty(*x.shape[:-1], num_outputs)
        kept = (_pointer(part) for part in (x, weight, bias_N, y))
        self._bfloat16(x.numel() // x.shape[-1], x.shape[-1], num_outputs, *kept, torch.get_num_threads())
        return y

    def attend(
        self, heads_MNh: Tensor, cache_SNLh: Tensor, starts_B: Tensor, *, first_slot: int, num_groups: int, scale: float
    ) -> Tensor:
        """Store keys and values of M = B · T new tokens of slots first_slot… from positions `starts_B` (int64) on, then
        attend to all up to each token: bfloat16 [M, P · G + 2G, h] → [M, P · G · h], query heads by their place in the
        group first. The cache has G key heads and then G value heads.
        """
        heads_MNh = heads_MNh.contiguous()
        assert heads_MNh.dtype == cache_SNLh.dtype == torch.bfloat16
        assert cache_SNLh.is_contiguous()
        num_tokens, num_heads, head_dim = heads_MNh.shape
        num_queries, batch = num_heads - 2 * num_groups, len(starts_B)
        out = heads_MNh.new_empty(num_tokens, num_queries * head_dim)
        self._attend(
            batch,
            num_tokens // batch,
            num_queries // num_groups,
            num_groups,
            cache_SNLh.shape[2],
            head_dim,
            first_slot,
            starts_B.data_ptr(),
            scale,
            heads_MNh.data_ptr(),
            cache_SNLh.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def gate(self, gate_up: Tensor) -> Tensor:
        """silu(gate) · up: bfloat16 [M, 2I], gates first, → [M, I], rounded after either."""
        gate_up = gate_up.contiguous()
        num_tokens, num_both = gate_up.shape
        out = gate_up.new_empty(num_tokens, num_both // 2)
        self._gate(num_tokens, num_both // 2, gate_up.data_ptr(), out.data_ptr(), torch.get_num_threads())
        return out

    @staticmethod
    def can_gate(act: nn.Module, down: nn.Module) -> bool:
        """`down` is the layer that takes what is gated."""
        return type(act).__name__ in _SILU and isinstance(down, VnniLinear | Bfloat16Linear)

    @staticmethod
    def can_attend(dtype: torch.dtype, head_dim: int) -> bool:
        return dtype == torch.bfloat16 and head_dim in _HEAD_DIMS

    def can_multiply(self, linear: nn.Linear, *, int8: bool) -> bool:
        has_instructions = int8 or self.has_bfloat16
        return has_instructions and linear.weight.dtype == torch.bfloat16 and linear.in_features % 16 == 0


class VnniLinear(nn.Module):
    """What `Int8Linear` computes, to the last bit, in bfloat16: [..., K] → [..., N]."""

    def __init__(self, linear: nn.Linear, kernels: Kernels) -> None:
        super().__init__()
        self.out_features = linear.out_features
        whole_NK, scale_N1 = whole_numbers(linear.weight.detach())
        self.weight = _panels(whole_NK)
        # What the inputs' offset adds to the sums is taken off beforehand.
        self.offsets_N = _padded(-OFFSET * whole_NK.sum(1, dtype=torch.int32))
        self.scale_N = _padded(scale_N1[:, 0])
        self.bias_N = None if linear.bias is None else _padded(linear.bias.detach().float())
        self._kernels = kernels

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """What is read in the weight's place; another layer's of the same shape can be copied into it."""
        parts = self.weight, self.offsets_N, self.scale_N
        return parts if self.bias_N is None else (*parts, self.bias_N)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.weight, self.offsets_N, self.scale_N, self.bias_N
        return self._kernels.linear_int8(x, self.out_features, *kept)


class Bfloat16Linear(nn.Module):
    """A frozen bfloat16 nn.Linear, [..., K] → [..., N]: what a token gets does not depend on the tokens beside it."""

    def __init__(self, linear: nn.Linear, kernels: Kernels) -> None:
        super().__init__()
        self.out_features = linear.out_features
        self.weight = _panels(linear.weight.detach())
        self.bias_N = None if linear.bias is None else _padded(linear.bias.detach().float())
        self._kernels = kernels

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """What is read in the weight's place; another layer's of the same shape can be copied into it."""
        return (self.weight,) if self.bias_N is None else (self.weight, self.bias_N)

    def forward(self, x: Tensor) -> Tensor:
        return self._kernels.linear_bfloat16(x, self.out_features, self.weight, self.bias_N)


def _panels(weight_NK: Tensor) -> Tensor:
    """[panels, steps, 64, inputs of a step]: the order in which a kernel reads it, padded with rows of zeros."""
    together = _STEP_BYTES // weight_NK.element_size()
    padded = F.pad(weight_NK, (0, 0, 0, -len(weight_NK) % _PANEL))
    return padded.view(-1, _PANEL, padded.shape[1] // together, together).transpose(1, 2).contiguous()


def _padded(of_N: Tensor) -> Tensor:
    return F.pad(of_N, (0, -len(of_N) % _PANEL)).contiguous()


def _checked(x: Tensor, weight: Tensor) -> Tensor:
    """In one piece. The kernel reads where it is told, whatever lies there."""
    assert x.dtype == torch.bfloat16
    assert x.shape[-1] == weight.shape[1] * weight.shape[3]
    return x.contiguous()


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@cache
def found_kernels() -> Kernels | None:
    """None where the CPU or a C++ compiler is missing, or the compiler fails: PyTorch's operations take their place."""
    try:
        if not available():
            raise ConfigError("not for this CPU")
        kernels = compiled_kernels(find_compiler(), kernel_folder())
    except (ConfigError, OSError, RuntimeError) as error:
        log.info("without kernels of our own", reason=(str(error).splitlines() or [type(error).__name__])[0])
        return None
    log.info("with kernels of our own", bfloat16=kernels.has_bfloat16)
    return kernels


def compiled_kernels(compiler: str, folder: Path) -> Kernels:
    """From the folder, or compiled into it. Raises OSError, and RuntimeError with what the compiler says."""
    # Not -march=native: the folder may be another machine's, too.
    instructions = [name for name in (*_INSTRUCTIONS, _BFLOAT16) if _has(name)]
    options = [*_OPTIONS, "-mfma", *(f"-m{name.replace('_', '')}" for name in instructions)]
    name = hashlib.sha256(_SOURCE.read_bytes() + repr([compiler, *options]).encode()).hexdigest()[:16]
    path = folder / f"kernels-{name}.so"
    if not path.exists():
        # Others may start at the same time, in containers that count processes alike.
        with tempfile.TemporaryDirectory(prefix=path.stem, dir=folder) as own:
            made = Path(own) / path.name
            command = [compiler, *options, "-o", str(made), str(_SOURCE)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(done.stderr.strip() or f"{compiler} ended with {done.returncode}")
            made.replace(path)
    return Kernels(path)


def _declared(function: Any, arguments: list[Any]) -> Any:
    function.argtypes, function.restype = arguments, None
    return function

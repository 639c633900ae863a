"""A pass whose small operations are compiled: Inductor makes one kernel of what stands between two matrix products.

A step of one token is 121 products and, in the decoder's own pass, some 900 other operations of a few microseconds.
Products over packed weights and the attention over slots stay calls that the compiler does not look into: an operator
of our own, which takes the call's number. Inductor writes C++, so a compiler is needed where the engine runs; it keeps
what it has compiled on disk, and the next start finds it there.
"""

from __future__ import annotations

import itertools
import os
import shutil
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from speculator.errors import ConfigError

_LIBRARY = torch.library.Library("slipstream", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("call(Tensor x, int number) -> Tensor")  # type: ignore[no-untyped-call]
_numbers = itertools.count()
_opaque: weakref.WeakValueDictionary[int, _Opaque] = weakref.WeakValueDictionary()


class _Opaque:
    def __init__(self, function: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype | None) -> None:
        self.function, self.width, self.dtype = function, width, dtype
        self._number = next(_numbers)
        _opaque[self._number] = self

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.slipstream.call(x, self._number)  # type: ignore[no-any-return]


def opaque(
    function: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype | None = None
) -> Callable[[Tensor], Tensor]:
    """The function, [M, …] → [M, width] of `dtype`, if given, as a call that a compiled pass makes as it is.

    The result is a new tensor. What else the function reads or writes must not be touched by the compiled pass.
    """
    return _Opaque(function, width, dtype)


def _call(x: Tensor, number: int) -> Tensor:
    return _opaque[number].function(x)


def _shape_of_call(x: Tensor, number: int) -> Tensor:
    call = _opaque[number]
    return x.new_empty(x.shape[0], call.width, dtype=call.dtype or x.dtype)  # len() would fix the size


_LIBRARY.impl("call", _call, "CPU")  # type: ignore[no-untyped-call]
_LIBRARY.impl("call", _shape_of_call, "Meta")  # type: ignore[no-untyped-call]


def compiled(run: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """`run` over tensors [M, …], compiled twice when it is first called: for M = 1, and for any other M.

    Raises ConfigError where there is no compiler.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ConfigError(f"--compile-target: there is no C++ compiler {compiler!r}: install g++, or leave it out")
    options: dict[str, str | int | bool | Callable[..., Any]] = {
        # In this process: a pool of compiling processes would stay for as long as the engine runs.
        "compile_threads": 1,
        # Both are looked at anew in every call, and neither can change: shapes of opaque calls, and of weights.
        "size_asserts": False,
        "guard_filter_fn": _needed,
    }
    return torch.compile(run, dynamic=True, fullgraph=True, options=options)


def _needed(guards: Sequence[Any]) -> list[bool]:
    return [guard.guard_type != "TENSOR_MATCH" or not guard.name.startswith("L['self']") for guard in guards]

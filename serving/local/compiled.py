"""A pass whose small operations are compiled: Inductor makes one kernel of what stands between two matrix products.

A step of one token has seven times as many other operations as products, of a few microseconds each. Products over
packed weights and the attention over slots stay calls that the compiler does not look into: an operator of our own,
which takes the call's number. Inductor writes C++, so a compiler is needed where the engine runs; what it has compiled
is kept on disk, and the next start finds it there.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speculator.cache import cache_root
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


def as_it_is(
    function: Callable[[Tensor], Tensor], _width: int, _dtype: torch.dtype | None = None
) -> Callable[..., Any]:
    """In the place of `opaque` where nothing is compiled."""
    return function


def _call(x: Tensor, number: int) -> Tensor:
    return _opaque[number].function(x)


def _shape_of_call(x: Tensor, number: int) -> Tensor:
    call = _opaque[number]
    return x.new_empty(x.shape[0], call.width, dtype=call.dtype or x.dtype)  # len() would fix the size


_LIBRARY.impl("call", _call, "CPU")  # type: ignore[no-untyped-call]
_LIBRARY.impl("call", _shape_of_call, "Meta")  # type: ignore[no-untyped-call]


def find_compiler() -> str:
    """Its name. Raises ConfigError where there is none."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ConfigError(f"there is no C++ compiler {compiler!r}: install g++")
    return compiler


def compiled(run: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """`run` over tensors [M, …], compiled at the first call with M = 1 and at the first with any other M."""
    with contextlib.suppress(OSError):  # Inductor finds out, too
        kernel_folder()
    options: dict[str, str | int | bool | Callable[..., Any]] = {
        # In this process: a pool of compiling processes would stay for as long as the engine runs.
        "compile_threads": 1,
        # Every call would compare the shapes that opaque calls return with those that they announced.
        "size_asserts": False,
        # And look at every tensor of the model, which change in place alone.
        "guard_filter_fn": _needed,
    }
    # Targets of one process do not count towards each other's limit of compilations.
    return torch.compile(  # type: ignore[call-overload, no-any-return]  # the last one is missing in PyTorch's overloads
        run, dynamic=True, fullgraph=True, options=options, isolate_recompiles=True
    )


def kernel_folder() -> Path:
    """Where compiled kernels are kept, Inductor's and ours. Its own choice is a folder in /tmp that any user may have
    made before, and it runs what it finds there. Raises OSError where the folder that was named cannot be made.
    """
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    # PyTorch sets the variable to its own choice, when some part of it is imported that has nothing to compile.
    if named and not named.startswith(str(Path(tempfile.gettempdir()) / "torchinductor_")):
        folder = Path(named)
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    folder = _own_folder()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    return folder


def _own_folder() -> Path:
    try:
        folder = cache_root() / "compiled"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError):  # no home, or none that can be written to, as in a container
        status = None
    if status is None or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        folder = Path(tempfile.mkdtemp(prefix="slipstream-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _needed(guards: Sequence[Any]) -> list[bool]:
    return [guard.guard_type != "TENSOR_MATCH" or not guard.name.startswith("L['self']") for guard in guards]

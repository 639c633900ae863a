"""Finds or compiles the library: compiled when an image is built, elsewhere at an engine's first start, in two seconds.

`python -m serving.local.kernels.build` compiles it for every instruction set, to be shipped with the package.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import structlog
import torch
from torch import nn

from serving.local.kernels.layers import KernelLinear
from serving.local.kernels.library import PANEL, Kernels
from speculator.errors import ConfigError
from speculator.host import cache_root

log = structlog.get_logger(__name__)
_FOLDER = Path(__file__).parent
_SOURCE = _FOLDER / "kernels.cpp"
SHIPPED = _FOLDER / "shipped"
"""Libraries that came with the package, if any."""
# Contracted products and sums would round differently from PyTorch's, and from those of another compiler.
# Of two libraries in one process each calls its own functions: GCC makes one of tables and buffers that others can see.
_OPTIONS = ("-std=c++17", "-O3", "-ffp-contract=off", "-pthread", "-shared", "-fPIC", "-fvisibility=hidden", "-mfma")
_WIDTH, _TOKENS, _TURNS = 256, 384, 9
_FASTER = 1.2


class Instructions(NamedTuple):
    """What a library is compiled for."""

    needed: tuple[str, ...]
    """As PyTorch names them."""
    options: tuple[str, ...]
    """Of the compiler; not -march=native: the folder may be another machine's, too."""


AVX512 = Instructions(
    ("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq"),
    (*_OPTIONS, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16"),
)
"""With bfloat16 in pairs for CPUs that have it; asked before it is used."""


AVX2 = Instructions(("avx2", "fma3"), (*_OPTIONS, "-mavx2"))


def available() -> list[Instructions]:
    """What this CPU has, the best first. One that multiplies tiles (AMX) is left to oneDNN: for many tokens that is
    likely faster there, and nobody has compared.
    """
    capabilities = torch.cpu.get_capabilities()
    if capabilities.get("amx_tile", False):
        return []
    return [one for one in (AVX512, AVX2) if all(capabilities.get(name, False) for name in one.needed)]


@cache
def found_kernels() -> Kernels | None:
    """Those that were shipped, or compiled ones. None where the CPU is another one, or there is no C++ compiler, or it
    fails: PyTorch's operations take their place.
    """
    try:
        if not (instructions := available()):
            raise ConfigError("not for this CPU")
        shipped = SHIPPED / _file_name(instructions[0])
        path = shipped if shipped.exists() else compile_library(find_compiler(), kernel_folder(), instructions[0])
        kernels = Kernels(path)
    except (ConfigError, OSError, RuntimeError) as error:
        log.info("without kernels of our own", reason=(str(error).splitlines() or [type(error).__name__])[0])
        return None
    kernels.in_pairs = faster_in_pairs(kernels)
    products = "in pairs" if kernels.in_pairs else "one by one"
    log.info("with kernels of our own", instructions=instructions[0].needed[0], products=products)
    return kernels


def compile_library(compiler: str, folder: Path, instructions: Instructions) -> Path:
    """The library in the folder; compiled where it is not there. Raises OSError, and RuntimeError with what the
    compiler says.
    """
    path = folder / _file_name(instructions)
    if not path.exists():
        # Others may start at the same time, in containers that count processes alike.
        with tempfile.TemporaryDirectory(prefix=path.stem, dir=folder) as own:
            made = Path(own) / path.name
            command = [compiler, *instructions.options, "-o", str(made), str(_SOURCE)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(done.stderr.strip() or f"{compiler} ended with {done.returncode}")
            made.replace(path)
    return path


def find_compiler() -> str:
    """Its name. Raises ConfigError where there is none."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ConfigError(f"there is no C++ compiler {compiler!r}: install g++")
    return compiler


def kernel_folder() -> Path:
    """Where compiled libraries are kept: in the cache; where nobody can write there, or others can too, in a folder
    that this process makes and removes, because what lies there is run.
    """
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


def _file_name(instructions: Instructions) -> str:
    """Of a library of just these sources and options."""
    sources = b"".join(path.read_bytes() for path in sorted([_SOURCE, *_FOLDER.glob("*.h")]))
    return f"kernels-{hashlib.sha256(sources + repr(instructions.options).encode()).hexdigest()[:16]}.so"


def faster_in_pairs(kernels: Kernels, *, clock: Callable[[], float] = time.perf_counter) -> bool:
    """Whether products take two inputs at a time on this CPU: measured, in a millisecond, as the best of some turns of
    either. The weight is one panel, and so for one thread, and in the nearest cache.

    AMD's CPUs do two with the instruction for pairs in the time of one in float; Intel's take longer for that
    instruction than for two in float. Neither is near the ratio that is asked for here, so that what is chosen, and
    with it a text's last bits, is the same at every start.
    """
    if not (kernels.has_pairs and torch.cpu.get_capabilities().get("avx512_bf16", False)):
        return False
    # Nobody else's random numbers are drawn.
    linear = nn.Linear(_WIDTH, PANEL, bias=False, dtype=torch.bfloat16, device="meta").to_empty(device="cpu")
    linear.requires_grad_(False).weight.fill_(1)
    ways = [KernelLinear(linear, kernels, in_pairs=in_pairs) for in_pairs in (False, True)]
    x = torch.ones(_TOKENS, _WIDTH, dtype=torch.bfloat16)
    seconds = [float("inf")] * len(ways)
    for _ in range(_TURNS):
        for way, module in enumerate(ways):
            began = clock()
            kernels.linear(module.layer, x)
            seconds[way] = min(seconds[way], clock() - began)
    return _FASTER * seconds[1] < seconds[0]


if __name__ == "__main__":
    SHIPPED.mkdir(exist_ok=True)
    # For other processors there is no code.
    for each in (AVX512, AVX2) if platform.machine() == "x86_64" else ():
        compile_library(find_compiler(), SHIPPED, each)

"""Find or compile the kernel library: compiled into images, elsewhere at an engine's first start, in two seconds.

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
from speculator.host import cache_root, sync

log = structlog.get_logger(__name__)
_FOLDER = Path(__file__).parent
_SOURCE = _FOLDER / "kernels.cpp"
SHIPPED = _FOLDER / "shipped"
"""Libraries shipped with the package, if any."""
# -ffp-contract=off: fused products and sums would round differently from PyTorch's, and between compilers.
# -fvisibility=hidden: otherwise two libraries in one process would share tables and buffers.
_OPTIONS = ("-std=c++17", "-O3", "-ffp-contract=off", "-pthread", "-shared", "-fPIC", "-fvisibility=hidden", "-mfma")
_WIDTH, _TOKENS, _TURNS = 256, 384, 9
_FASTER = 1.2


class Instructions(NamedTuple):
    """A CPU instruction set that a library is compiled for."""

    needed: tuple[str, ...]
    """CPU features, by PyTorch's names."""
    options: tuple[str, ...]
    """Compiler options; not -march=native, since several machines may share the folder."""


AVX512 = Instructions(
    ("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq"),
    (*_OPTIONS, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16"),
)
"""Has code for pairs in bfloat16, used only on CPUs with that instruction (AVX512-BF16)."""


AVX2 = Instructions(("avx2", "fma3"), (*_OPTIONS, "-mavx2"))


def available() -> list[Instructions]:
    """The instruction sets of this CPU, best first. Empty for one with AMX: oneDNN is likely faster there for many
    tokens (not measured).
    """
    capabilities = torch.cpu.get_capabilities()
    if capabilities.get("amx_tile", False):
        return []
    return [one for one in (AVX512, AVX2) if all(capabilities.get(name, False) for name in one.needed)]


@cache
def found_kernels() -> Kernels | None:
    """The shipped kernels, or compiled ones. None for an unsupported CPU, or without a working C++ compiler: PyTorch's
    operations are used then.
    """
    try:
        if not (instructions := available()):
            raise ConfigError("not for this CPU")
        shipped = SHIPPED / _file_name(instructions[0])
        kernels = Kernels(shipped) if shipped.exists() else _compiled(instructions[0])
    except (ConfigError, OSError, RuntimeError) as error:
        log.info("without kernels of our own", reason=(str(error).splitlines() or [type(error).__name__])[0])
        return None
    kernels.in_pairs = prefers_bf16_pairs(kernels)
    products = "in pairs" if kernels.in_pairs else "one by one"
    log.info("with kernels of our own", instructions=instructions[0].needed[0], products=products)
    return kernels


def _compiled(instructions: Instructions) -> Kernels:
    compiler, folder = find_compiler(), kernel_folder()
    path = compile_library(compiler, folder, instructions)
    try:
        return Kernels(path)
    except OSError:
        # Damaged, such as empty after a power cut.
        path.unlink(missing_ok=True)
        return Kernels(compile_library(compiler, folder, instructions))


def compile_library(compiler: str, folder: Path, instructions: Instructions) -> Path:
    """The library in the folder, compiled if it is missing. Raises OSError, and RuntimeError with the compiler's
    message.
    """
    path = folder / _file_name(instructions)
    if not path.exists():
        # Not named by pid: another process may compile at the same time, in a container, under the same pid.
        with tempfile.TemporaryDirectory(prefix=path.stem, dir=folder) as own:
            made = Path(own) / path.name
            command = [compiler, *instructions.options, "-o", str(made), str(_SOURCE)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(done.stderr.strip() or f"{compiler} ended with {done.returncode}")
            sync(made)
            made.replace(path)
    return path


def find_compiler() -> str:
    """The name of a C++ compiler. Raises ConfigError where there is none."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ConfigError(f"there is no C++ compiler {compiler!r}: install g++")
    return compiler


def kernel_folder() -> Path:
    """Folder of compiled libraries, in the cache. If that is not writable, or writable for other users, whose code
    would then run here: a temporary folder of this process.
    """
    try:
        folder = cache_root() / "compiled"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, ConfigError):  # no writable home, as in a container
        status = None
    if status is None or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        folder = Path(tempfile.mkdtemp(prefix="slipstream-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _file_name(instructions: Instructions) -> str:
    """Name of a library file, by hash of sources and options."""
    sources = b"".join(path.read_bytes() for path in sorted([_SOURCE, *_FOLDER.glob("*.h")]))
    return f"kernels-{hashlib.sha256(sources + repr(instructions.options).encode()).hexdigest()[:16]}.so"


def prefers_bf16_pairs(kernels: Kernels, *, clock: Callable[[], float] = time.perf_counter) -> bool:
    """Whether products should use the bfloat16 pair instruction on this CPU: measured in a millisecond, best of some
    turns each. The weight is one panel, so it takes one thread and stays in the nearest cache.

    AMD's CPUs run the pair instruction in the time of one float product; Intel's take longer for it than for two float
    products. The threshold lies far from both ratios, so the choice, and with it a text's last bits, is the same at
    every start.
    """
    if not (kernels.has_pairs and torch.cpu.get_capabilities().get("avx512_bf16", False)):
        return False
    # A generator of its own: the global one stays as it is.
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
    # Only x86-64 has kernels.
    for each in (AVX512, AVX2) if platform.machine() == "x86_64" else ():
        compile_library(find_compiler(), SHIPPED, each)

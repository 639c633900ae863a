"""Compiles the library at the first start of an engine where there is a C++ compiler: two seconds."""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

import structlog
import torch

from serving.local.compiled import find_compiler, kernel_folder
from serving.local.kernels.library import Kernels, Way
from serving.local.kernels.pairs import faster_in_pairs
from speculator.errors import ConfigError

log = structlog.get_logger(__name__)

_FOLDER = Path(__file__).parent
_SOURCE = _FOLDER / "kernels.cpp"
# Contracted products and sums would round differently from PyTorch's, and from those of another compiler.
# Of two libraries in one process each calls its own functions: GCC makes one of tables and buffers that others can see.
_OPTIONS = ("-std=c++17", "-O3", "-ffp-contract=off", "-pthread", "-shared", "-fPIC", "-fvisibility=hidden", "-mfma")


class Instructions(NamedTuple):
    """What a library is compiled for."""

    needed: tuple[str, ...]
    """As PyTorch names them."""
    options: tuple[str, ...]


AVX512 = Instructions(
    ("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq", "avx512_vnni"),
    ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mavx512bf16"),
)
"""With bfloat16 in pairs for CPUs that have it; asked before it is used."""
AVX2 = Instructions(("avx2", "fma3"), ("-mavx2",))


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
    """None where the CPU or a C++ compiler is missing, or the compiler fails: PyTorch's operations take their place."""
    try:
        if not (instructions := available()):
            raise ConfigError("not for this CPU")
        kernels = compiled_kernels(find_compiler(), kernel_folder(), instructions[0])
    except (ConfigError, OSError, RuntimeError) as error:
        log.info("without kernels of our own", reason=(str(error).splitlines() or [type(error).__name__])[0])
        return None
    if Way.SHARED_EXPONENTS in kernels.ways:
        kernels.way = Way.SHARED_EXPONENTS
    elif faster_in_pairs(kernels):
        kernels.way = Way.PAIRS
    log.info("with kernels of our own", instructions=instructions[0].needed[0], way=kernels.way.name.lower())
    return kernels


def compiled_kernels(compiler: str, folder: Path, instructions: Instructions) -> Kernels:
    """From the folder, or compiled into it. Raises OSError, and RuntimeError with what the compiler says."""
    # Not -march=native: the folder may be another machine's, too.
    options = [*_OPTIONS, *instructions.options]
    sources = b"".join(path.read_bytes() for path in sorted([_SOURCE, *_FOLDER.glob("*.h")]))
    name = hashlib.sha256(sources + repr([compiler, *options]).encode()).hexdigest()[:16]
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

"""Checks of the machine: Python, memory, disk, PyTorch, GPU, ports, the target, SGLang with the plugin.

Modules that import PyTorch are imported inside the check that needs them, so that a broken PyTorch fails that one only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from serving.gateway.server import bind
from serving.sglang.outside.launcher import check_interpreter, find_interpreter
from slipstream.doctor.finding import Finding, failed, ok
from slipstream.models import check_target, resolve_model
from speculator.errors import ConfigError
from speculator.host import CACHE_VARIABLE, cache_root, memory_bytes, num_cores

_NEEDED_DISK_GIB = 2.0
_NEEDED_MEMORY_GIB = 3.5
"""A machine sold with 4 GB has at least so much."""
_SGLANG_TIMEOUT_S = 300.0
_HOOKS = "from serving.sglang.plugin.contract import check_sglang; print(check_sglang())"


def check_python() -> Iterator[Finding]:
    yield ok("python", f"{sys.version.split()[0]} at {sys.executable}")


def check_memory(needed_gib: float = _NEEDED_MEMORY_GIB) -> Iterator[Finding]:
    total = memory_bytes() / 2**30
    detail = f"{total:.1f} GiB, {num_cores()} cores"
    if total < needed_gib:
        yield failed("memory", f"{detail}: the demo needs {needed_gib} GiB, choose a larger machine")
    else:
        yield ok("memory", detail)


def check_disk(needed_gib: float = _NEEDED_DISK_GIB) -> Iterator[Finding]:
    """The cache folder, for converted models and compiled kernels, is writable and has room."""
    place = existing(cache_root())
    free = shutil.disk_usage(place).free / 2**30
    detail = f"{free:.1f} GiB free at {place}"
    if not is_writable(place):
        yield failed("disk", f"{place} is not writable: set {CACHE_VARIABLE} to another folder")
    elif free < needed_gib:
        yield failed("disk", f"{detail}: free {needed_gib} GiB, or set {CACHE_VARIABLE} to another folder")
    else:
        yield ok("disk", detail)


def existing(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def is_writable(path: Path) -> bool:
    """Whether files can be created in a folder, or the folder itself where it does not exist."""
    try:
        tempfile.TemporaryFile(dir=existing(path)).close()
    except OSError:
        return False
    return True


def check_torch() -> Iterator[Finding]:
    import torch

    policy = os.environ.get("OMP_WAIT_POLICY", "").upper()
    hint = "" if policy == "PASSIVE" else "; where a trainer shares the cores, set OMP_WAIT_POLICY=PASSIVE for both"
    yield ok("torch", f"{torch.__version__}, {torch.get_num_threads()} threads{hint}")


def check_gpu(*, needed: bool) -> Iterator[Finding]:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        yield ok("gpu", ", ".join(names))
    elif needed:
        yield failed("gpu", "PyTorch finds no GPU, and SGLang needs one: check the driver, or use --engine local")
    else:
        yield ok("gpu", "none; the local engine does not need one")


def check_ports(ports: Sequence[int]) -> Iterator[Finding]:
    for port in ports:
        try:
            bind("127.0.0.1", port).close()
            yield ok("port", f"{port} is free")
        except ConfigError as error:
            version = _served_version(port)
            if version is None:
                yield failed("port", str(error))
            else:
                yield ok("port", f"{port}: a Slipstream gateway answers there with draft version {version}")


def _served_version(port: int) -> int | None:
    """The draft version of a Slipstream gateway on that port; None where another program uses the port."""
    try:
        version = httpx.get(f"http://127.0.0.1:{port}/ready", timeout=2, trust_env=False).json()["draft_version"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None
    return version if isinstance(version, int) else None


def check_model(name: str, *, local: bool) -> Iterator[Finding]:
    """The target is found (an id is downloaded first) and complete. No weights are loaded.

    With `local`, also check that the local engine can run it.
    """
    model_dir = resolve_model(name)
    yield ok("model", str(model_dir))

    from serving.local.target.forward import fusible
    from serving.local.target.loading import check_model, load_tokenizer
    from speculator.draft.eagle3 import aux_layer_ids

    config = check_target(model_dir)
    layers = ", ".join(map(str, aux_layer_ids(config["num_hidden_layers"])))
    yield ok("draft for it", f"width {config['hidden_size']}, features of layers {layers}")
    if local:
        model = check_model(model_dir)
        load_tokenizer(model_dir, vocab_size=model.config.vocab_size)
        way = "fused layers" if fusible(model) else "Hugging Face's code"
        yield ok("local engine", f"runs {type(model).__name__} with {way}")


def check_sglang(given: Path | None) -> Iterator[Finding]:
    """An interpreter has SGLang and the plugin, and SGLang has every function that the plugin hooks.

    Importing SGLang takes half a minute. A finding names the function that is missing.
    """
    python = find_interpreter(given)
    check_interpreter(python)
    yield ok("sglang", f"with the plugin at {python}")
    yield check_hooks(python)


def check_hooks(python: Path) -> Finding:
    try:
        done = subprocess.run(
            [python, "-c", _HOOKS], capture_output=True, text=True, timeout=_SGLANG_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return failed("sglang hooks", f"{python} took over {_SGLANG_TIMEOUT_S:.0f} s to import sglang: try it by hand")
    last = (done.stderr if done.returncode else done.stdout).strip().splitlines()[-1:] or ["no output"]
    return (failed if done.returncode else ok)("sglang hooks", last[0])

"""Pack the packages for `make gpu` on a machine without a network, in parts of limited size.

make gpu-wheels [ARGS="--folder DIR --part-mb 60"]

The machine has Python 3.12, PyTorch 2.11 for CUDA 13, and what comes with it; SGLang 0.5.17 is the last one for that
PyTorch. The parts hold it, its kernels for Hopper alone (the wheel has 1.2 GB for all), what both import, and the small
model. Over there: `cat part-* | tar xJ -C DIR`, then `. DIR/environment.sh` in the checkout.

SGLang imports some large libraries that none of the stages calls; stand-ins that raise when they are called take their
place. Wheels are downloaded by version, as locked in benchmarks/gpu/wheels.lock.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

_LOCK = Path(__file__).with_name("wheels.lock")
_UV_PLATFORM = ("--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_34")
_NOT_CALLED = {
    "flashinfer": ("sampling", "norm", "prefill", "decode", "cascade", "comm", "rope", "gemm", "fused_moe", "page"),
    "deep_gemm": (),
    "IPython": ("display",),
}
_STAND_IN = '''"""Stands in for a library that nothing here calls."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    class Absent:
        def __init__(self, *args, **kwargs):
            raise NotImplementedError(name)

    return Absent
'''
_LEFT_OUT = ("sglang/multimodal_gen", "xgrammar/lib", "bin", "zstandard/_cffi*")
_ENVIRONMENT = """here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PYTHONPATH="$PWD:$here${PYTHONPATH:+:$PYTHONPATH}" XDG_CACHE_HOME="$here/cache"
export SGLANG_IS_FLASHINFER_AVAILABLE=false SGLANG_ENABLE_JIT_DEEPGEMM=0 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
"""


def main() -> None:
    options = argparse.ArgumentParser(description="What a machine without a network needs for make gpu")
    options.add_argument("--uv", default="uv")
    options.add_argument("--folder", type=Path, default=Path("dist/gpu"))
    options.add_argument("--part-mb", type=int, default=60)
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        site = Path(name) / "site"
        install = [arguments.uv, "pip", "install", "--quiet", "--no-deps", "--link-mode", "copy", *_UV_PLATFORM]
        subprocess.run([*install, "--target", str(site), "--require-hashes", "-r", str(_LOCK)], check=True)
        _thin_out(site)
        _stand_in(site)
        _register(site)
        (site / "environment.sh").write_text(_ENVIRONMENT)
        parts = _pack(site, arguments.folder, arguments.part_mb)
    for part in parts:
        print(f"{part}  {part.stat().st_size / 1e6:.1f} MB")


def _thin_out(site: Path) -> None:
    for pattern in _LEFT_OUT:
        for path in site.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    kernels = site / "sgl_kernel"
    for path in kernels.rglob("*.so"):
        if path.parent.name != "sm90":
            path.unlink()
    for path in kernels.glob("*.py"):
        # It has kernels of its own for these two, and takes the stand-in for the library.
        path.write_text(path.read_text().replace("    _has_flashinfer = True", "    _has_flashinfer = False"))
    for path in site.rglob("*.so*"):
        if path.is_file():
            subprocess.run(["strip", "--strip-all", str(path)], check=False, stderr=subprocess.DEVNULL)


def _stand_in(site: Path) -> None:
    for library, modules in _NOT_CALLED.items():
        (site / library).mkdir()
        for module in ("__init__", *modules):
            (site / library / f"{module}.py").write_text(_STAND_IN)


def _register(site: Path) -> None:
    """Register the plugin's entry point: the project runs from its checkout there, uninstalled."""
    info = site / "slipstream_spec-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slipstream-spec\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nslipstream = serving.sglang.plugin:register\n")


def _pack(site: Path, folder: Path, part_mb: int) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("part-*"):
        old.unlink()
    parts: list[Path] = []
    with tempfile.TemporaryFile() as whole:
        with tarfile.open(fileobj=whole, mode="w:xz", preset=5) as archive:
            archive.add(site, arcname=".")
        whole.seek(0)
        while data := whole.read(part_mb * 1_000_000):
            parts.append(folder / f"part-{len(parts) + 1:02}")
            parts[-1].write_bytes(data)
    return parts


if __name__ == "__main__":
    main()

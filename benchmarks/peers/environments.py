"""Make virtual environments for `speculators` and `specforge`, and run scripts in them."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

PROJECTS = ("speculators", "specforge")
DEFAULT_TORCH = "torch==2.13.0+cpu"
_NEEDS = {
    # Without torchvision and torchaudio, which would bring another torch.
    "speculators": (
        *("transformers>=5,<=5.19", "datasets<=5.1.0", "numpy", "safetensors", "pydantic", "pydantic-settings"),
        *("openai", "click", "loguru", "protobuf", "psutil", "rich", "typer", "httpx", "aiohttp", "tqdm"),
    ),
    "specforge": (
        *("transformers==5.8.1", "numpy", "safetensors", "triton", "datasets", "tqdm", "pydantic", "pyyaml"),
    ),
}
_WITHOUT_THEIR_NEEDS = {
    "speculators": ("speculators==0.9.0", "hs-connectors==0.9.0"),
    "specforge": ("specforge==0.2.0",),
}


def environment(folder: Path, project: str, torch_build: str) -> Path:
    """The Python of an environment with the project; creates the environment where it does not exist."""
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"installing {project} …", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--no-cache-dir", "--disable-pip-version-check"]
        subprocess.run([*install, torch_build, *_NEEDS[project]], check=True)
        subprocess.run([*install, "--no-deps", *_WITHOUT_THEIR_NEEDS[project]], check=True)
    return python


def run_in(python: Path, script: Path, project: str, folder: Path, *, verbose: bool) -> None:
    """Run one of our scripts about the project in its environment, without a network, on one thread, with the settings
    of the allocator that this process has.

    Raises CalledProcessError where it fails.
    """
    output = None if verbose else subprocess.DEVNULL
    subprocess.run(
        [str(python), str(script), project, str(folder)],
        check=True,
        stdout=output,
        stderr=output,
        env={
            # SpecForge compiles its norms, which takes longer than all that they compute here.
            "TORCHDYNAMO_DISABLE": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PATH": "/usr/bin:/bin",
            "HOME": str(folder),
            **{name: value for name, value in os.environ.items() if name.startswith("MALLOC_")},
        },
    )

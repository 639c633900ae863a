"""A draft as a folder of its own, as SGLang and Hugging Face load it: `config.json` and `model.safetensors`."""

from __future__ import annotations

import json
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from speculator.errors import ConfigError


def check_can_write(out: Path) -> None:
    """Raise ConfigError unless a draft can be written there: nothing, or an empty folder."""
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"{out} is not an empty directory: choose another --out")
    except OSError as error:
        raise _unwritable(out, error) from error


def write_folder(out: Path, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
    """Write a draft and return its folder; it is there completely or not at all. Raises ConfigError."""
    out = out.absolute()
    check_can_write(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
            folder = Path(scratch) / "draft"
            folder.mkdir()
            write_tensors(folder / "model.safetensors", weights)
            (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
            folder.rename(out)
    except OSError as error:
        raise _unwritable(out, error) from error
    return out


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file with the rights of any other new one: the library's are for its owner alone."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(dict(tensors), path, {"format": "pt"})
    path.chmod(mode)


def _unwritable(out: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write {out} ({error.strerror}): choose another --out")

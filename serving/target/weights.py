"""New weights for a target that serves: read from a folder, and verified to be of the same architecture."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from speculator.draft.checkpoint import is_finite, target_essentials
from speculator.errors import ConfigError, TargetError
from speculator.target_folder import open_weights, reading, weight_files


@dataclass(frozen=True, kw_only=True)
class TargetLayout:
    """What two targets have in common where one may take the other's place."""

    essentials: Mapping[str, Any]
    """What config.json says about the computation."""
    shapes: Mapping[str, tuple[int, ...]]


def read_layout(model_dir: Path) -> TargetLayout:
    """Of a target that serves; weights are not read. Raises ConfigError where the folder has no safetensors model."""
    shapes: dict[str, tuple[int, ...]] = {}
    with reading(model_dir):
        for path in set(weight_files(model_dir).values()):
            with open_weights(path) as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a dict
    return TargetLayout(essentials=target_essentials(model_dir), shapes=shapes)


def read_weights(folder: Path, layout: TargetLayout) -> dict[str, Tensor]:
    """The tensors of the safetensors model in `folder`, in the types in which they lie there.

    A folder without a config.json is taken to be of the same architecture, as far as its shapes agree.
    Raises TargetError, with the reason, unless every tensor is there, has its shape and is finite.
    """
    if (folder / "config.json").exists() and _essentials(folder) != layout.essentials:
        raise TargetError(f"{folder.name}: config.json is of another architecture than the target in service")
    weights: dict[str, Tensor] = {}
    for path in _files(folder):
        weights |= _read(path, _most_bytes(layout))
    if difference := sorted(weights.keys() ^ layout.shapes.keys()):
        raise TargetError(f"{folder.name}: there are missing or extra tensors: {', '.join(difference[:5])}")
    for name, tensor in weights.items():
        if tuple(tensor.shape) != layout.shapes[name]:
            raise TargetError(f"{folder.name}: {name} has shape {tuple(tensor.shape)}, not {layout.shapes[name]}")
        if not tensor.is_floating_point() or not is_finite(tensor):
            raise TargetError(f"{folder.name}: {name} is not finite")
    return weights


def _essentials(folder: Path) -> dict[str, Any]:
    try:
        return target_essentials(folder)
    except ConfigError as error:
        raise TargetError(f"{folder.name} has no readable config.json") from error


def _files(folder: Path) -> list[Path]:
    try:
        paths = sorted(set(weight_files(folder).values()))
    except ConfigError as error:
        raise TargetError(f"{folder.name} has no readable safetensors weights") from error
    for path in paths:
        # An index may name any file, and a link may lead anywhere.
        if path.resolve().parent != folder.resolve():
            raise TargetError(f"{folder.name}: {path.name} lies outside the folder")
    return paths


def _read(path: Path, max_bytes: int) -> dict[str, Tensor]:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > max_bytes:
            raise TargetError(f"{path.name} is no file, or larger than the weights of such a target")
        # Not mapped: whoever writes to the file meanwhile would change what was verified, or end this process.
        return safetensors.torch.load(path.read_bytes())
    except (OSError, SafetensorError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise TargetError(f"{path.name} cannot be read: {error}") from error


def _most_bytes(layout: TargetLayout) -> int:
    """Every element counts as the widest type's; beside them there is a header."""
    return 16 * 1024 * 1024 + 8 * sum(torch.Size(shape).numel() for shape in layout.shapes.values())

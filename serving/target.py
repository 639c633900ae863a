"""New weights for the target while it serves: which folders are allowed, and whether the weights fit.

    announced ──▶ newer? ──▶ folder allowed? ──▶ engine: read, verified, copied in place
                    └────────────┴─── refused: the target in service stays ────┘

A lineage keeps the fingerprint of the target that it began with, which fixes the architecture, shapes and vocabulary
of its drafts. New weights keep all of these and get a higher version.
"""

from __future__ import annotations

import stat
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import structlog
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig

from serving.engine import TargetReport, UpdatableTarget
from serving.metrics import TargetMetrics
from speculator.draft.checkpoint import TARGET_ESSENTIALS, is_finite, target_essentials
from speculator.errors import ConfigError, EngineBusyError, RequestError, SlipstreamError, TargetError
from speculator.target_folder import INDEX, LM_HEAD, open_weights, reading, weight_files

log = structlog.get_logger(__name__)
_FIX = "check the path"


class TargetUpdater:
    """Changes one engine's target; for any thread, one change at a time.

    New weights must lie below `folder`; without it every path is refused.
    """

    def __init__(self, host: UpdatableTarget, metrics: TargetMetrics, *, folder: Path | None) -> None:
        self._host, self._metrics = host, metrics
        self._folder = None if folder is None else folder.resolve()
        self._moving = threading.Lock()

    def announce(self, version: int, path: str | None) -> TargetReport:
        """Move the target to `version`. Raises RequestError, TargetError, EngineBusyError and what the engine raises;
        the target in service then stays.
        """
        if path is None and version == self._host.target_version:
            return TargetReport(version=version, previous=version, stall_ms=0.0)
        if not self._moving.acquire(blocking=False):
            raise EngineBusyError("another update of the target runs: try again when it has ended")
        try:
            report = self._move(version, path)
        except SlipstreamError as error:
            self._metrics.moves.labels("refused").inc()
            log.warning("target refused", version=version, in_service=self._host.target_version, reason=str(error))
            raise
        finally:
            self._moving.release()
        self._metrics.installed(version, report.stall_ms / 1000)
        log.info("target in service", version=version, previous=report.previous, stall_ms=round(report.stall_ms, 2))
        return report

    def _move(self, version: int, path: str | None) -> TargetReport:
        in_service = self._host.target_version
        # The one in service may be repeated: the engine knows whether a server still lacks its weights.
        if version < in_service:
            raise TargetError(f"version {version} is not newer than {in_service}, which is in service")
        folder = None if path is None else self._allowed(path)
        return self._host.update_target(version, folder)

    def _allowed(self, path: str) -> Path:
        """The folder that a caller names, links resolved; it must lie below the allowed one."""
        if self._folder is None:
            raise RequestError("no path is taken here: set SLIPSTREAM_GATEWAY_TARGETS_DIR", param="path")
        try:
            folder = (self._folder / path).resolve()
            is_allowed = folder.is_relative_to(self._folder) and folder.is_dir()
        except (OSError, ValueError, RuntimeError):
            is_allowed = False
        if not is_allowed:
            raise RequestError("the path is no folder below the one that is allowed", param="path")
        return folder


@dataclass(frozen=True, kw_only=True)
class TargetLayout:
    """What new weights must share with the target in service: tensor shapes, and config fields that affect results."""

    essentials: Mapping[str, Any]
    """Fields of config.json that affect the computation, as transformers resolves them."""
    shapes: Mapping[str, tuple[int, ...]]


def read_layout(model_dir: Path) -> TargetLayout:
    """The layout of the target in service; reads no weights. Raises ConfigError without a safetensors model."""
    with reading(model_dir):
        shapes = _shapes(set(weight_files(model_dir).values()))
    return TargetLayout(essentials=_essentials(model_dir), shapes=shapes)


def check_weights(folder: Path, layout: TargetLayout) -> None:
    """Check that the safetensors model in `folder` has the layout's tensors and shapes, and that SGLang would load
    these alone; reads no values.

    Raises TargetError, with the reason, if not.
    """
    _check_essentials(folder, layout)
    files = _files(folder)
    # Without an index SGLang loads every file.
    if (others := sorted({*folder.glob("*.safetensors")}.difference(files))) and not (folder / INDEX).exists():
        raise TargetError(f"{folder.name}: SGLang would load {others[0].name}, too: move it out of the folder")
    with _refusing(folder):
        shapes = _shapes(files)
    _check_shapes(folder, shapes, layout)


def read_weights(folder: Path, layout: TargetLayout) -> dict[str, Tensor]:
    """The tensors of the safetensors model in `folder`, in the stored types.

    A folder without a config.json counts as the same architecture if its shapes agree.
    Raises TargetError, with the reason, unless every tensor is there, has its shape and is finite.
    """
    _check_essentials(folder, layout)
    weights: dict[str, Tensor] = {}
    for path in _files(folder):
        weights |= _read(path, _most_bytes(layout))
    _check_shapes(folder, {name: tuple(tensor.shape) for name, tensor in weights.items()}, layout)
    for name, tensor in weights.items():
        if not tensor.is_floating_point() or not is_finite(tensor):
            raise TargetError(f"{folder.name}: {name} is not finite")
    return weights


def _shapes(paths: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for path in paths:
        with open_weights(path) as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a dict
    return shapes


def _check_shapes(folder: Path, shapes: Mapping[str, tuple[int, ...]], layout: TargetLayout) -> None:
    # A tied output layer is the embedding; transformers does not store it again.
    optional = {LM_HEAD} if layout.essentials.get("tie_word_embeddings") else set()
    if difference := sorted((shapes.keys() ^ layout.shapes.keys()) - optional):
        raise TargetError(f"{folder.name}: there are missing or extra tensors: {', '.join(difference[:5])}")
    for name, shape in shapes.items():
        if shape != layout.shapes.get(name, shape):
            raise TargetError(f"{folder.name}: {name} has shape {shape}, not {layout.shapes[name]}")


def _check_essentials(folder: Path, layout: TargetLayout) -> None:
    if not (folder / "config.json").exists():
        return
    try:
        essentials = _essentials(folder)
    except ConfigError as error:
        raise TargetError(f"{folder.name} has no readable config.json") from error
    if essentials != layout.essentials:
        raise TargetError(f"{folder.name}: config.json is of another architecture than the target in service")


def _essentials(model_dir: Path) -> dict[str, Any]:
    """`target_essentials` with defaults, in the form of transformers 5. What saves a model may be of another version
    than what saved the one in service: the two write different fields for the same architecture. Raises ConfigError.
    """
    stored = target_essentials(model_dir)
    try:
        with reading(model_dir):
            config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False).to_dict()
    except ConfigError:
        # An architecture that is unknown to transformers.
        return stored
    return {name: config[name] for name in TARGET_ESSENTIALS if config.get(name) is not None}


@contextmanager
def _refusing(folder: Path) -> Iterator[None]:
    """Convert any exception of a library that reads weights into a TargetError with what to do."""
    try:
        with reading(folder, fix=_FIX):
            yield
    except ConfigError as error:
        raise TargetError(f"{folder.name} has no usable safetensors weights: {error}") from error


def _files(folder: Path) -> list[Path]:
    with _refusing(folder):
        paths = sorted(set(weight_files(folder, fix=_FIX).values()))
    for path in paths:
        # An index may name any file, and a link may point anywhere.
        if path.resolve().parent != folder.resolve():
            raise TargetError(f"{folder.name}: {path.name} lies outside the folder")
    return paths


def _read(path: Path, max_bytes: int) -> dict[str, Tensor]:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > max_bytes:
            raise TargetError(f"{path.name} is not a file, or larger than weights of this layout can be")
        # Not memory-mapped: a later write to the file would change what was verified, or crash this process.
        return safetensors.torch.load(path.read_bytes())
    except (OSError, SafetensorError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise TargetError(f"{path.name} cannot be read: {error}") from error


def _most_bytes(layout: TargetLayout) -> int:
    """Upper bound of a weights file's size: every element in the widest type, plus the header."""
    return 16 * 1024 * 1024 + 8 * sum(torch.Size(shape).numel() for shape in layout.shapes.values())

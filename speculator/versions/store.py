"""The draft store: a folder of immutable versions, each with tensors, config and a manifest.

    versions/000042/{model.safetensors, config.json, manifest.json}

A version is written atomically: under a temporary name, fsynced, renamed. Its files never change afterwards; the store
can be shared over NFS by one trainer and many engines. The state of a version is kept apart
(speculator/versions/lifecycle.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import math
import os
import re
import secrets
import shutil
import socket
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

from speculator.draft.checkpoint import is_finite, write_tensors
from speculator.errors import (
    DraftFileError,
    DraftMismatchError,
    LifecycleError,
    StoreError,
    UnknownDraftError,
    VersionTakenError,
)
from speculator.host import now_ms, sync, write_synced
from speculator.versions.lifecycle import Lifecycle, VersionState, store_errors

ANOTHER_STORE = "choose another --store or, if you pass one, --data-dir"
"""What to do where the drafts there do not fit."""
_WEIGHTS, _CONFIG, _MANIFEST = "model.safetensors", "config.json", "manifest.json"
_VERSION_NAME = re.compile(r"\d{6,}")
_TEMPORARY = ".tmp-"
_CODE = Path(__file__).resolve().parents[2]
# A temporary folder of another process is removed after this time; that process may still use a newer one.
_ABANDONED_AFTER_S = 24 * 3600.0
_STARTED_S = time.time()
"""When this process imported the module, before it wrote any version."""
_DTYPES = {"d2t": torch.int64, "t2d": torch.bool}
_MAX_DOCUMENT_BYTES = 16 * 1024 * 1024
"""Most bytes of a manifest or config, and of the header of a tensors file."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A version's origin, and the hashes of its files."""

    version: int
    parent: int | None
    created_ms: int
    source: str
    """Git commit or version of the code."""
    target_fingerprint: str
    target_version: int = 0
    """Newest that it learned from; 0 is the fingerprint's target."""
    weights_sha256: str
    config_sha256: str
    d2t_sha256: str
    info: dict[str, Any]
    """From the trainer: number of traces, trained tokens, gate figures."""


class DraftStore:
    """Draft versions in one folder; reading needs no write access. File-system errors are raised as StoreError."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self.lifecycle = Lifecycle(self.root)
        self._versions = self.root / "versions"

    def write(
        self,
        weights: dict[str, Tensor],
        config: dict[str, Any],
        *,
        parent: int | None,
        target_fingerprint: str,
        info: dict[str, Any],
        target_version: int = 0,
        actor: str = "trainer",
        number: int | None = None,
    ) -> Manifest:
        """Store a new version in the state `written`, as `number` or the next free one; safe beside other writers.

        Raises DraftFileError for tensors that no engine may load, VersionTakenError where `number` is not free,
        StoreError when the folder cannot be written.
        """
        check_tensors(weights)
        with store_errors(self.root):
            self._versions.mkdir(parents=True, exist_ok=True)
            self._clean()
            with self._temporary() as folder:
                write_tensors(folder / _WEIGHTS, weights)
                sync(folder / _WEIGHTS)
                write_synced(folder / _CONFIG, json.dumps(config, indent=2).encode())
                manifest = Manifest(
                    version=0,
                    parent=parent,
                    created_ms=now_ms(),
                    source=code_source(),
                    target_fingerprint=target_fingerprint,
                    target_version=target_version,
                    weights_sha256=_sha256(folder / _WEIGHTS),
                    config_sha256=_sha256(folder / _CONFIG),
                    d2t_sha256=d2t_sha256(weights["d2t"]),
                    info=info,
                )
                manifest = self._commit(folder, manifest, number)
        try:
            # Another process may have found the version already, and moved it on.
            with contextlib.suppress(LifecycleError):
                self.lifecycle.move(manifest.version, VersionState.WRITTEN, actor=actor)
        except StoreError:
            # Else each attempt would leave a draft that pruning does not find.
            self._take_back(manifest.version)
            raise
        return manifest

    def manifest(self, version: int) -> Manifest:
        """The manifest of a version. Raises StoreError when it is missing, DraftFileError when it is damaged."""
        try:
            manifest = msgspec.json.decode(self._read(version, _MANIFEST), type=Manifest)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            remedy = "restore it from a backup, or bar the version"
            raise DraftFileError(f"draft version {version}: the manifest is damaged ({error}): {remedy}") from error
        if manifest.version != version:
            raise DraftFileError(f"draft version {version}: the manifest belongs to version {manifest.version}")
        return manifest

    def check_target(self, version: int, fingerprint: str) -> None:
        """Raise DraftMismatchError for a version that was trained for another target."""
        trained_for = self.manifest(version).target_fingerprint
        if trained_for != fingerprint:
            raise DraftMismatchError(
                f"draft version {version} in {self.root} was trained for target {trained_for[:12]}, this one is "
                f"{fingerprint[:12]}: check --model, or {ANOTHER_STORE}"
            )

    def config(self, version: int) -> dict[str, Any]:
        """The verified `config.json` of a version; raises StoreError or DraftFileError."""
        data = self._read(version, _CONFIG)
        if hashlib.sha256(data).hexdigest() != self.manifest(version).config_sha256:
            raise DraftFileError(f"draft version {version}: config.json was altered")
        try:
            config = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise DraftFileError(f"draft version {version}: config.json cannot be read ({error})") from error
        if not isinstance(config, dict):
            raise DraftFileError(f"draft version {version}: config.json is not an object")
        return config

    def versions(self) -> list[int]:
        """All versions, oldest first; [] where nothing was written yet."""
        with store_errors(self.root):
            if not self._versions.exists():
                return []
            return sorted(int(path.name) for path in self._versions.iterdir() if _VERSION_NAME.fullmatch(path.name))

    def latest(self) -> int | None:
        return max(self.versions(), default=None)

    def load(
        self,
        version: int,
        *,
        expected_fingerprint: str | None = None,
        expected_d2t: Tensor | None = None,
        expected_shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> dict[str, Tensor]:
        """Read a version's tensors and verify them: hashes, types, finite values, and what is expected of them.

        Raises DraftMismatchError for another target or draft vocabulary, DraftFileError for a file that is damaged or
        has other names, shapes or types, StoreError when the version cannot be read.
        """
        if expected_fingerprint is not None:
            self.check_target(version, expected_fingerprint)
        manifest = self.manifest(version)
        self.config(version)  # checks its hash, since SGLang reads it
        data = self._read(version, _WEIGHTS, max_bytes=_most_bytes(expected_shapes))
        if hashlib.sha256(data).hexdigest() != manifest.weights_sha256:
            raise DraftFileError(f"draft version {version}: the weights are truncated or altered (sha256 differs)")
        try:
            weights = tensors_of(data)
        except (SafetensorError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise DraftFileError(f"draft version {version}: the weights cannot be read ({error})") from error
        try:
            check_tensors(weights, expected_shapes)
        except DraftFileError as error:
            raise DraftFileError(f"draft version {version}: {error}") from error
        if expected_d2t is not None and not torch.equal(weights["d2t"], expected_d2t.cpu()):
            raise DraftMismatchError(f"draft version {version} has another draft vocabulary (d2t)")
        return weights

    def prune(self, keep: int, *, pinned: int | None = None) -> list[int]:
        """Remove all but the newest `keep` versions and return the removed ones.

        The last good one, the two that went live last after it, and the pinned one stay. Raises StoreError.
        """
        removed = []
        for version in self.versions()[: -max(keep, 1)]:
            # Remove the state first, so that no version without files may be served.
            if version == pinned or not self.lifecycle.forget(version):
                continue
            self._remove(version)
            removed.append(version)
        return removed

    def _take_back(self, version: int) -> None:
        """Remove a version that was just written, with its state, if it has one."""
        with contextlib.suppress(StoreError):
            self.lifecycle.forget(version)
        with contextlib.suppress(StoreError):
            if self.lifecycle.state(version) is None:
                self._remove(version)

    def _remove(self, version: int) -> None:
        with store_errors(self.root), self._temporary() as folder:
            # Rename before removing: a reader finds the version complete or not at all.
            self.folder(version).rename(folder / "pruned")

    def _commit(self, folder: Path, manifest: Manifest, number: int | None) -> Manifest:
        """Rename the finished folder to `number`, or to the next free one, even if other writers take numbers."""
        # Above all known states, too, whose files may be gone: a number never names two drafts.
        version = max([*self.versions(), *self.lifecycle.states()], default=0)
        while True:
            version += 1
            if number not in (None, version):
                raise VersionTakenError(f"{self.root} has a version {number} already")
            manifest = msgspec.structs.replace(manifest, version=version)
            write_synced(folder / _MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
            sync(folder)
            try:
                # Fails if the version exists, since its folder is not empty.
                folder.rename(self.folder(version))
            except OSError:
                if not self.folder(version).exists():
                    raise
                continue
            sync(self._versions)
            return manifest

    @contextlib.contextmanager
    def _temporary(self) -> Iterator[Path]:
        folder = self._versions / f"{_TEMPORARY}{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _clean(self) -> None:
        """Remove the temporary folders that a crash left behind."""
        for folder in self._versions.glob(f"{_TEMPORARY}*"):
            if _is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)

    def folder(self, version: int) -> Path:
        """Folder of a version's files, from which SGLang loads it."""
        return self._versions / f"{version:06d}"

    def _read(self, version: int, name: str, *, max_bytes: int = _MAX_DOCUMENT_BYTES) -> bytes:
        with store_errors(self.root):
            try:
                # A pipe in the file's place must not block the reader, nor an endless device fill the memory.
                with open(self.folder(version) / name, "rb", opener=_open_at_once) as file:
                    status = os.fstat(file.fileno())
                    if not stat.S_ISREG(status.st_mode):
                        raise DraftFileError(f"draft version {version}: {name} is a folder, pipe or device, not a file")
                    if status.st_size > max_bytes:
                        raise DraftFileError(f"draft version {version}: {name} is larger than this draft's can be")
                    return file.read()
            except FileNotFoundError as error:
                raise UnknownDraftError(f"draft version {version} is not in {self.root} ({name} is missing)") from error


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def tensors_of(data: bytes) -> dict[str, Tensor]:
    """Parse the bytes of a safetensors file, as a memory-mapped file. Raises the library's errors.

    Not the library's `load`, which copies all tensors while it holds the interpreter's lock: for an 8B target's draft,
    decoding would stop for 0.6 s.
    """
    try:
        memory = os.memfd_create("draft")
    except OSError:
        # Hardened kernels (`vm.memfd_noexec=2`) and some sandboxes refuse it.
        return load(data)
    try:
        with open(memory, "wb", closefd=False) as file:
            file.write(data)
        with safe_open(f"/proc/self/fd/{memory}", framework="pt") as mapped:
            return {name: mapped.get_tensor(name) for name in mapped.keys()}  # noqa: SIM118 - it is no mapping
    finally:
        os.close(memory)


def _most_bytes(shapes: Mapping[str, tuple[int, ...]] | None) -> int:
    """Upper bound of the size of a file with tensors of these shapes: every element in the widest type."""
    return _MAX_DOCUMENT_BYTES + 8 * sum(math.prod(shape) for shape in shapes.values()) if shapes else sys.maxsize


def check_tensors(weights: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]] | None = None) -> None:
    """Raise DraftFileError, with the reason, unless an engine may load these tensors."""
    for name in weights:
        if "embed_tokens" in name:
            raise DraftFileError(f"{name} would overwrite the target's embedding")
    if shapes is not None and weights.keys() != shapes.keys():
        difference = ", ".join(sorted(weights.keys() ^ shapes.keys()))
        raise DraftFileError(f"there are missing or extra tensors: {difference}")
    if "d2t" not in weights:
        raise DraftFileError("d2t is missing")
    for name, tensor in weights.items():
        dtype = _DTYPES.get(name, torch.bfloat16)
        if tensor.dtype != dtype:
            raise DraftFileError(f"{name} is {tensor.dtype}, expected {dtype}")
        if shapes is not None and tuple(tensor.shape) != tuple(shapes[name]):
            raise DraftFileError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(shapes[name])}")
        if not is_finite(tensor):
            raise DraftFileError(f"{name} is not finite")


def d2t_sha256(d2t: Tensor) -> str:
    return hashlib.sha256(d2t.cpu().contiguous().numpy().tobytes()).hexdigest()


def _is_abandoned(folder: Path) -> bool:
    host, _, pid = folder.name.removeprefix(_TEMPORARY).rpartition("-")[0].rpartition("-")
    try:
        if host == socket.gethostname() and pid.isdigit():
            os.kill(int(pid), 0)
            # A restarted container has the same name, and its process often the same number.
            if int(pid) == os.getpid():
                return folder.stat().st_mtime < _STARTED_S
        # The number may also be that of another process by now.
        return time.time() - folder.stat().st_mtime > _ABANDONED_AFTER_S
    except ProcessLookupError:
        return True
    except OSError:
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def code_source(root: Path = _CODE) -> str:
    """The Git commit of the code in `root`, or the version of the installed package."""
    git = root / ".git"
    try:
        head = (git / "HEAD").read_text().strip()
        return (git / head.removeprefix("ref: ")).read_text().strip() if head.startswith("ref: ") else head
    except OSError:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version("slipstream-spec")
        return "unknown"

"""Draft versions that were damaged, or forged with a manifest that vouches for them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from speculator.draft.checkpoint import config_from_json, draft_config_json, draft_state, expected_shapes
from speculator.draft.eagle3 import Eagle3Draft
from speculator.errors import DraftError, StoreError
from speculator.versions.store import DraftStore
from tests.hostile import forgeries
from tests.hostile.judge import FailureError, Outcome

WEIGHTS, CONFIG, MANIFEST = "model.safetensors", "config.json", "manifest.json"
FINGERPRINT = "a" * 64

Files = dict[str, bytes]


@dataclass(frozen=True)
class Original:
    """A version as it was written, and what an engine expects of it."""

    files: Files
    state: dict[str, Tensor]
    config: dict[str, Any]

    @classmethod
    def of(cls, draft: Eagle3Draft, folder: Path) -> Original:
        store, state, config = DraftStore(folder), draft_state(draft), draft_config_json(draft.config)
        version = store.write(state, config, parent=None, target_fingerprint=FINGERPRINT, info={"note": "original"})
        place = folder / "versions" / f"{version.version:06d}"
        return cls({name: (place / name).read_bytes() for name in (WEIGHTS, CONFIG, MANIFEST)}, state, config)


def vouched(files: Files, **manifest: Any) -> Files:
    """The files with a manifest that has their hashes, so that only what they say can give them away."""
    hashes = {"weights_sha256": files[WEIGHTS], "config_sha256": files[CONFIG]}
    fields = json.loads(files[MANIFEST]) | {name: hashlib.sha256(raw).hexdigest() for name, raw in hashes.items()}
    return {**files, MANIFEST: json.dumps(fields | manifest).encode()}


def corpus(original: Original) -> Iterator[tuple[str, Files]]:
    """Each must be refused, whether its manifest vouches for it or not."""
    for name, raw in forgeries.damaged(original.files[WEIGHTS]).items():
        yield f"weights: {name}", {**original.files, WEIGHTS: raw}
    for name, raw in {**forgeries.damaged(original.files[WEIGHTS]), **forgeries.lies(original.state)}.items():
        yield f"vouched weights: {name}", vouched({**original.files, WEIGHTS: raw})
    for name, change in forgeries.forged(original.state).items():
        weights = {key: tensor.contiguous() for key, tensor in (original.state | change).items() if tensor is not None}
        yield f"vouched tensors: {name}", vouched({**original.files, WEIGHTS: safetensors.torch.save(weights)})
    for name, raw in forgeries.odd_documents().items():
        yield f"vouched config: {name}", vouched({**original.files, CONFIG: raw})
        yield f"manifest: {name}", {**original.files, MANIFEST: raw}
    for name, fields in forgeries.odd_configs().items():
        yield (
            f"vouched config: {name}",
            vouched({**original.files, CONFIG: json.dumps(original.config | fields).encode()}),
        )
    for name, fields in forgeries.odd_manifests().items():
        yield f"manifest: {name}", vouched(original.files, **fields)


def mutate(original: Original, choose: Callable[[int], int]) -> Files:
    """A file with a few bits flipped, cut or moved; half of the time the manifest vouches for what came out."""
    name = (WEIGHTS, WEIGHTS, CONFIG, MANIFEST)[choose(4)]
    raw = bytearray(original.files[name])
    for _ in range(1 + choose(4)):
        # Headers are where the harm is: half of all changes go to the first two thousand bytes.
        at = choose(min(len(raw), 2000)) if choose(2) else choose(len(raw))
        match choose(4):
            case 0:
                raw[at] ^= 1 << choose(8)
            case 1:
                del raw[at : at + 1 + choose(16)]
            case 2:
                raw[at:at] = raw[at : at + 1 + choose(16)]
            case _:
                raw[at] = choose(256)
        raw = raw or bytearray(b"{")
    files = {**original.files, name: bytes(raw)}
    return vouched(files) if name != MANIFEST and choose(2) else files


def put(root: Path, files: Files, version: int = 1) -> DraftStore:
    """A store that holds these files as a version, whatever they are."""
    place = root / "versions" / f"{version:06d}"
    place.mkdir(parents=True, exist_ok=True)
    for name, raw in files.items():
        (place / name).write_bytes(raw)
    return DraftStore(root)


def load(store: DraftStore, original: Original, version: int = 1) -> Outcome:
    """As an engine does it at its start, then at a swap; raises FailureError where one gets what none may have."""
    try:
        config = config_from_json(store.config(version))
        store.load(version, expected_fingerprint=FINGERPRINT, expected_shapes=expected_shapes(config))
        shapes = expected_shapes(config_from_json(original.config))
        d2t = original.state["d2t"]
        loaded = store.load(version, expected_fingerprint=FINGERPRINT, expected_d2t=d2t, expected_shapes=shapes)
    except (DraftError, StoreError) as refusal:
        return type(refusal).__name__
    place = store.root / "versions" / f"{version:06d}"
    changed = [name for name, raw in original.files.items() if (place / name).read_bytes() != raw]
    if changed and MANIFEST not in changed:
        raise FailureError(f"{changed} are not what the manifest vouches for, and were loaded")
    if config != config_from_json(original.config):
        return "loaded, with another config"
    for name, tensor in loaded.items():
        if tensor.shape != original.state[name].shape or tensor.dtype != original.state[name].dtype:
            raise FailureError(f"{name} came in as {tensor.shape} {tensor.dtype}")
        if not bool(torch.isfinite(tensor).all()):
            raise FailureError(f"{name} is not finite")
    same = all(torch.equal(loaded[name], tensor) for name, tensor in original.state.items())
    return "loaded, the same" if same else "loaded, other weights, as vouched for"


def odd_places(root: Path, original: Original) -> Iterator[tuple[str, DraftStore]]:
    """Versions whose files are no files: links to where they should not lead, pipes, devices, folders."""

    def version(number: int, place: Callable[[Path], object]) -> DraftStore:
        folder = root / str(number)
        store = put(folder, original.files)
        weights = folder / "versions" / "000001" / WEIGHTS
        weights.unlink()
        place(weights)
        return store

    yield "link to another file", version(0, lambda path: path.symlink_to("/etc/passwd"))
    yield "link to itself", version(1, lambda path: path.symlink_to(path))
    yield "link to nothing", version(2, lambda path: path.symlink_to(root / "nowhere"))
    yield "link to a folder", version(3, lambda path: path.symlink_to("/"))
    yield "link to an endless device", version(4, lambda path: path.symlink_to("/dev/zero"))
    yield "pipe", version(5, lambda path: os.mkfifo(path))
    yield "folder", version(6, lambda path: path.mkdir())
    yield "a terabyte of nothing", version(7, _sparse)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)

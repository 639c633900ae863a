"""Draft versions that were damaged, or forged with a manifest that vouches for them."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from speculator.draft.checkpoint import config_from_json, draft_config_json, draft_state, expected_shapes
from speculator.draft.eagle3 import Eagle3Draft
from speculator.errors import DraftError, StoreError
from speculator.versions.store import DraftStore
from tests.hostile.judge import Choose, FailureError, Inputs, Outcome, garbled

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
    for name, raw in _damaged(original.files[WEIGHTS]).items():
        yield f"weights: {name}", {**original.files, WEIGHTS: raw}
    for name, raw in {**_damaged(original.files[WEIGHTS]), **_lies(original.state)}.items():
        yield f"vouched weights: {name}", vouched({**original.files, WEIGHTS: raw})
    for name, change in _forged(original.state).items():
        weights = {key: tensor.contiguous() for key, tensor in (original.state | change).items() if tensor is not None}
        yield f"vouched tensors: {name}", vouched({**original.files, WEIGHTS: safetensors.torch.save(weights)})
    for name, raw in _odd_documents().items():
        yield f"vouched config: {name}", vouched({**original.files, CONFIG: raw})
        yield f"manifest: {name}", {**original.files, MANIFEST: raw}
    for name, fields in _odd_configs().items():
        yield (
            f"vouched config: {name}",
            vouched({**original.files, CONFIG: json.dumps(original.config | fields).encode()}),
        )
    for name, fields in _odd_manifests().items():
        yield f"manifest: {name}", vouched(original.files, **fields)


def mutate(original: Original, choose: Choose) -> Files:
    """One file changed in a few places, mostly in its header; the manifest may vouch for what came out."""
    name = (WEIGHTS, WEIGHTS, CONFIG, MANIFEST)[choose(4)]
    files = {**original.files, name: garbled(original.files[name], choose, head=2000)}
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


def corpus_inputs(root: Path, original: Original) -> Inputs:
    for name, files in corpus(original):
        yield name, partial(load, put(root, files), original)


def mutated_inputs(root: Path, original: Original, choose: Choose, count: int) -> Inputs:
    for number in range(count):
        yield str(number), partial(load, put(root, mutate(original, choose)), original)


def odd_places(root: Path, original: Original) -> Inputs:
    """Versions whose files are no files: links to where they should not lead, pipes, devices, folders."""
    ways: dict[str, Callable[[Path], object]] = {
        "link to another file": lambda path: path.symlink_to("/etc/passwd"),
        "link to itself": lambda path: path.symlink_to(path),
        "link to nothing": lambda path: path.symlink_to(root / "nowhere"),
        "link to a folder": lambda path: path.symlink_to("/"),
        "link to an endless device": lambda path: path.symlink_to("/dev/zero"),
        "pipe": os.mkfifo,
        "folder": Path.mkdir,
        "a terabyte of nothing": _sparse,
    }
    for number, (name, place) in enumerate(ways.items()):
        store = put(root / str(number), original.files)
        weights = store.root / "versions" / "000001" / WEIGHTS
        weights.unlink()
        place(weights)
        yield name, partial(load, store, original)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


# -- what a file may hold in place of a draft: by file, a name and the bytes, tensors or fields


def _damaged(raw: bytes) -> dict[str, bytes]:
    return {
        "empty": b"",
        "one byte": raw[:1],
        "header alone": raw[:8],
        "half": raw[: len(raw) // 2],
        "last byte missing": raw[:-1],
        "one byte more": raw + b"\0",
        "twice": raw + raw,
        "zeros": bytes(len(raw)),
        "zip": b"PK\x03\x04" + raw,
        "pickle": b"\x80\x04\x95\x1e\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x8c\x02id\x85R.",
        "length of the header: all": b"\xff" * 8 + raw[8:],
        "length of the header: a terabyte": struct.pack("<Q", 1 << 40) + raw[8:],
        "length of the header: 100 MB": struct.pack("<Q", 100_000_000) + raw[8:],
        "length of the header: 0": bytes(8) + raw[8:],
        "length of the header: one less": struct.pack("<Q", struct.unpack("<Q", raw[:8])[0] - 1) + raw[8:],
    }


def _header_of(fields: Any) -> bytes:
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return struct.pack("<Q", len(text)) + text


def _lies(state: dict[str, Tensor]) -> dict[str, bytes]:
    raw = safetensors.torch.save(state)
    length = struct.unpack("<Q", raw[:8])[0]
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]

    def lying(**entries: Any) -> bytes:
        return _header_of(header | entries) + data

    norm = header["norm.weight"]
    nothing = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    return {
        "a type that there is not": lying(**{"norm.weight": norm | {"dtype": "BF17"}}),
        "another type of the same size": lying(**{"norm.weight": norm | {"dtype": "F16"}}),
        "a negative size": lying(**{"norm.weight": norm | {"shape": [-8]}}),
        "a huge size": lying(**{"norm.weight": norm | {"shape": [1 << 62, 4]}}),
        "a size that overflows": lying(**{"norm.weight": norm | {"shape": [1 << 33, 1 << 33]}}),
        "a size of nothing": lying(**{"norm.weight": norm | {"shape": [0, 1 << 60]}}),
        "offsets beyond the end": lying(**{"norm.weight": norm | {"data_offsets": [len(data), 2 * len(data)]}}),
        "offsets in reverse": lying(**{"norm.weight": norm | {"data_offsets": norm["data_offsets"][::-1]}}),
        "overlapping tensors": lying(**{"norm.weight": header["fc.weight"] | {"shape": norm["shape"]}}),
        "a tensor that is a list": lying(**{"norm.weight": []}),
        "deep header": _header_of(b'{"a":' * 50_000),
        "many empty tensors": _header_of({f"t{number}": nothing for number in range(50_000)}),
        "metadata of numbers": lying(__metadata__={"format": 7}),
        "header of a list": _header_of([]),
    }


def _forged(state: dict[str, Tensor]) -> dict[str, dict[str, Any]]:
    fc, norm, d2t = (state[name] for name in ("fc.weight", "norm.weight", "d2t"))
    spoilt = fc.clone()
    spoilt[0, 0] = torch.nan
    endless = fc.clone()
    endless[-1, -1] = torch.inf
    return {
        "not a number": {"fc.weight": spoilt},
        "infinite": {"fc.weight": endless},
        "missing": {"norm.weight": None},
        "no d2t": {"d2t": None},
        "extra": {"extra.weight": torch.zeros(3)},
        "embed_tokens": {"embed_tokens.weight": torch.zeros(4, 4, dtype=torch.bfloat16)},
        "model.embed_tokens": {"model.embed_tokens.weight": torch.zeros(4, 4, dtype=torch.bfloat16)},
        "transposed": {"fc.weight": fc.T},
        "one row less": {"fc.weight": fc[1:]},
        "scalar": {"norm.weight": norm[0]},
        "empty": {"norm.weight": norm[:0]},
        "float32": {"norm.weight": norm.float()},
        "float64": {"norm.weight": norm.double()},
        "integers": {"norm.weight": norm.to(torch.int16)},
        "complex": {"norm.weight": norm.to(torch.complex64)},
        "d2t in int32": {"d2t": d2t.int()},
        "d2t of another vocabulary": {"d2t": d2t + 1},
        "d2t beyond the vocabulary": {"d2t": d2t + (1 << 40)},
        "d2t below the vocabulary": {"d2t": d2t - (1 << 40)},
    }


def _odd_documents() -> dict[str, bytes]:
    return {
        "empty": b"",
        "null": b"null",
        "list": b"[]",
        "string": b'"x"',
        "no fields": b"{}",
        "cut off": b'{"version": 1',
        "deep": b"[" * 100_000,
        "bytes": b"\xff\xfe\x00",
        "byte order mark": b"\xef\xbb\xbf{}",
        "not a number": b"NaN",
    }


def _odd_configs() -> dict[str, dict[str, Any]]:
    return {
        "another architecture": {"architectures": ["LlamaForCausalLM"]},
        "architectures of null": {"architectures": None},
        "code": {"auto_map": {"AutoModel": "evil--Model"}, "architectures": ["Evil"]},
        "sizes as text": {"hidden_size": "8"},
        "sizes of null": {"hidden_size": None},
        "no heads": {"num_attention_heads": 0, "head_dim": None},
        "negative heads": {"num_attention_heads": -4},
        "negative size": {"hidden_size": -8},
        "huge size": {"hidden_size": 1 << 62},
        "huge vocabulary": {"vocab_size": 1 << 62, "draft_vocab_size": 1 << 62},
        "infinite vocabulary": {"draft_vocab_size": float("inf")},
        "fractions": {"intermediate_size": 12.5},
        "lists": {"vocab_size": [20]},
        "truth": {"num_key_value_heads": True},
        "rope of text": {"rope_theta": "fast"},
        "rope parameters of text": {"rope_parameters": "x"},
    }


def _odd_manifests() -> dict[str, dict[str, Any]]:
    return {
        "another version": {"version": 7},
        "version as text": {"version": "1"},
        "another target": {"target_fingerprint": "b" * 64},
        "another hash": {"weights_sha256": "0" * 64},
        "no hash": {"weights_sha256": None},
        "hash of a list": {"config_sha256": []},
        "info of null": {"info": None},
    }

"""The trace codec: one trace ↔ safetensors bytes with a JSON header in the metadata; never pickle.

Two things keep a trace small. Features travel as float8_e4m3 with one float16 scale a token, and the leading rows
without a target distribution (the prompt) do not travel at all: decoding puts the −1 and −inf rows back.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec
import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError, TensorSpec, serialize
from torch import Tensor

from speculator.errors import TraceError
from speculator.trace.schema import MAX_TOP_K, Trace, TraceHeader, VerifyRounds, check_schema, check_trace

Features = Literal["float8", "bfloat16"]

_NOTHING = torch.zeros(1)
_FLOAT8_MAX = 448.0
# Below the smallest normal float16 a scale would lose its own precision; float8 still resolves such a row.
_MIN_SCALE = 2.0**-14
_MAX_SCALE = 65504.0

_DTYPES = {
    "token_ids": torch.int32,
    "constrained": torch.bool,
    "target_topk_ids": torch.int32,
    "target_topk_logprobs": torch.float16,
    "position": torch.int32,
    "draft_tokens": torch.int32,
    "draft_logprobs": torch.float16,
    "draft_parents": torch.int8,
    "num_accepted": torch.int8,
    "draft_version": torch.int32,
}
_FEATURE_DTYPES: dict[str, dict[str, torch.dtype]] = {
    "float8": {"aux_hidden": torch.float8_e4m3fn, "aux_scale": torch.float16},
    "bfloat16": {"aux_hidden": torch.bfloat16},
}


# What the readers of hostile bytes raise: a header may name any type, any shape and any depth.
_NOT_A_TRACE = (
    SafetensorError,
    msgspec.MsgspecError,
    ArithmeticError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


class _SchemaVersion(msgspec.Struct):
    schema_version: int


def encode_trace(trace: Trace, *, features: Features = "float8") -> bytes:
    """Check the trace and encode it. Raises TraceError where it is not well-formed."""
    check_trace(trace)
    labelled = _first_labelled_row(trace.target_topk_ids)
    rounds = trace.rounds
    arrays = {
        "token_ids": trace.token_ids,
        "constrained": trace.constrained,
        "target_topk_ids": trace.target_topk_ids[labelled:],
        "target_topk_logprobs": trace.target_topk_logprobs[labelled:],
        "position": rounds.position,
        "draft_tokens": rounds.draft_tokens,
        "draft_logprobs": rounds.draft_logprobs,
        "draft_parents": rounds.draft_parents,
        "num_accepted": rounds.num_accepted,
        "draft_version": rounds.draft_version,
    }
    tensors = {name: torch.from_numpy(np.require(array, requirements=["C", "W"])) for name, array in arrays.items()}
    if features == "float8":
        tensors["aux_hidden"], tensors["aux_scale"] = _quantise(trace.aux_hidden)
    else:
        tensors["aux_hidden"] = trace.aux_hidden.detach().cpu().contiguous()
    try:
        header = msgspec.json.encode(trace.header).decode()
    except UnicodeEncodeError as error:
        raise TraceError("the trace header is not valid text") from error
    return _serialised(tensors, {"header": header, "features": features})


def _serialised(tensors: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    """What `safetensors.torch.save` makes. That has ctypes make a type for each size of an array, and keep it for ever:
    several kilobytes for every length that an answer ever had.
    """
    held = {name: tensor.contiguous() for name, tensor in tensors.items()}
    specs = {
        name: TensorSpec(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=list(tensor.shape),
            # An empty one has no address.
            data_ptr=tensor.data_ptr() or _NOTHING.data_ptr(),
            data_len=tensor.nbytes,
        )
        for name, tensor in held.items()
    }
    return bytes(serialize(specs, metadata=metadata))


def decode_trace(data: bytes) -> Trace:
    """Decode and check one trace.

    Raises UnknownSchemaError for a trace of another schema version, TraceError for everything else that is not what
    `encode_trace` writes: damaged bytes, missing or extra tensors, wrong types, shapes or values.
    """
    try:
        tensors = safetensors.torch.load(data)
        metadata = _metadata(data)
    except _NOT_A_TRACE as error:
        raise TraceError(f"the bytes are not a trace: {error}") from error
    header = _decode_header(metadata)
    features = metadata.get("features", "")
    if features not in get_args(Features):
        raise TraceError(f"the trace has features in the unknown form {features!r}")
    _check_tensors(tensors, _DTYPES | _FEATURE_DTYPES[features])
    trace = _assemble(header, tensors)
    check_trace(trace)
    return trace


def read_header(data: bytes) -> TraceHeader:
    """The header alone, also of a trace whose arrays are damaged. Raises TraceError where there is none."""
    try:
        metadata = _metadata(data)
    except _NOT_A_TRACE as error:
        raise TraceError(f"the bytes are not a trace: {error}") from error
    return _decode_header(metadata)


def _first_labelled_row(target_topk_ids: np.ndarray) -> int:
    labelled = np.flatnonzero((target_topk_ids >= 0).any(1))
    return int(labelled[0]) if labelled.size else len(target_topk_ids)


def _quantise(aux: Tensor) -> tuple[Tensor, Tensor]:
    """Features [T, 3d] as float8_e4m3 and a float16 scale [T], so that each token's largest value becomes 448."""
    # In place from here on: fresh memory of this size costs more than the arithmetic.
    wide = aux.detach().to(torch.float32, copy=True)
    scale = torch.maximum(wide.amax(1), -wide.amin(1)) / _FLOAT8_MAX
    if bool((scale > _MAX_SCALE).any()):
        raise TraceError("aux_hidden is too large for float8 with a float16 scale; record with features='bfloat16'")
    scale = scale.clamp_min(_MIN_SCALE).half()
    scaled = wide.div_(scale.float()[:, None]).clamp_(-_FLOAT8_MAX, _FLOAT8_MAX)
    return scaled.to(torch.float8_e4m3fn).cpu(), scale.cpu()


def _metadata(data: bytes) -> dict[str, str]:
    """The metadata, which the safetensors reader keeps to itself."""
    header_end = 8 + int.from_bytes(data[:8], "little")
    header = msgspec.json.decode(data[8:header_end], type=dict[str, msgspec.Raw])
    return msgspec.json.decode(header.get("__metadata__", b"{}"), type=dict[str, str])


def _decode_header(metadata: dict[str, str]) -> TraceHeader:
    text = metadata.get("header", "")
    try:
        check_schema(msgspec.json.decode(text, type=_SchemaVersion).schema_version)
        return msgspec.json.decode(text, type=TraceHeader)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise TraceError(f"the trace header is not valid: {error}") from error


def _check_tensors(tensors: dict[str, Tensor], dtypes: dict[str, torch.dtype]) -> None:
    if tensors.keys() != dtypes.keys():
        difference = sorted(tensors.keys() ^ dtypes.keys())
        raise TraceError(f"the trace has missing or extra tensors: {', '.join(difference)}")
    for name, dtype in dtypes.items():
        if tensors[name].dtype != dtype:
            raise TraceError(f"{name} is stored as {tensors[name].dtype}, expected {dtype}")


def _assemble(header: TraceHeader, tensors: dict[str, Tensor]) -> Trace:
    aux = tensors["aux_hidden"]
    T = tensors["token_ids"].numel()
    if aux.dim() != 2:
        raise TraceError(f"aux_hidden has shape {tuple(aux.shape)}, expected [T, 3d]")
    if "aux_scale" in tensors:
        scale = tensors["aux_scale"]
        if scale.shape != aux.shape[:1]:
            raise TraceError(f"aux_scale has shape {tuple(scale.shape)}, expected {tuple(aux.shape[:1])}")
        aux = (aux.float() * scale.float()[:, None]).bfloat16()
    arrays = {name: tensors[name].numpy() for name in _DTYPES}
    names = ("position", "draft_tokens", "draft_logprobs", "draft_parents", "num_accepted", "draft_version")
    return Trace(
        header=header,
        token_ids=arrays["token_ids"],
        aux_hidden=aux,
        target_topk_ids=_restore_rows(arrays["target_topk_ids"], T, -1),
        target_topk_logprobs=_restore_rows(arrays["target_topk_logprobs"], T, -np.inf),
        constrained=arrays["constrained"],
        rounds=VerifyRounds(**{name: arrays[name] for name in names}),
    )


def _restore_rows(labelled: np.ndarray, T: int, fill: float) -> np.ndarray:
    """Put the unlabelled rows in front of the labelled ones, so that there are T."""
    if labelled.ndim != 2 or len(labelled) > T or labelled.shape[1] > MAX_TOP_K:
        raise TraceError(f"a target_topk array has shape {labelled.shape}, expected at most [{T}, {MAX_TOP_K}]")
    missing = np.full((T - len(labelled), labelled.shape[1]), fill, labelled.dtype)
    return np.concatenate([missing, labelled])

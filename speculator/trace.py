"""Traces: the record of one finished generation for the trainer, its validation and its encoding.

A trace is one contiguous span of one request: the kept tail of the prompt, then the completion. It is encoded as
safetensors with a JSON header in the metadata; never pickle. To save bytes, features are stored as float8_e4m3 with one
float16 scale a token, and leading rows without a target distribution (the prompt) are left out: decoding restores them
as −1 and −inf.

Shape letters: T tokens of the span, R verify rounds, d target hidden size, K kept target tokens, P proposals a round,
N rows behind rejections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

import msgspec
import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError, TensorSpec, serialize
from torch import Tensor

from speculator.draft.eagle3 import NUM_AUX_LAYERS
from speculator.draft.sampling_params import SamplingParams
from speculator.errors import TraceError, UnknownSchemaError

SCHEMA_VERSION = 3
READABLE_SCHEMAS = (1, 2, SCHEMA_VERSION)
"""Version 1 has no target versions: its traces are of version 0, the target that the lineage began with. Version 2 has
no rows behind rejections.
"""
# Bounds sizes in a damaged header: an array of no rows takes no bytes in the file, but its width could take memory.
MAX_TOP_K = 4096
NO_DRAFT = 0
"""Instead of a draft version: suffix text proposed. Drafts do not learn from such proposals."""
MAX_PROPOSALS = 127


Verification = Literal["coupled", "target_only", "rejection", "block"]
"""How an engine decides about the proposals of sampled requests.

coupled      the target's draw and the draft's share their noise (speculator/draft/verification.py)
target_only  the draft proposes its likeliest token, the target draws by itself
rejection    the draft draws x from q, which is accepted with probability min(1, p(x) / q(x)), and else the target draws
             from what q lacks of p (Leviathan et al., arXiv 2211.17192)
block        the same for all of a chain at once, which accepts as many proposals or more (Sun et al., arXiv 2403.10444)
"""


class TraceHeader(msgspec.Struct, frozen=True, kw_only=True):
    trace_id: str
    request_id: str
    engine_id: str
    target_fingerprint: str
    num_prompt_tokens: int
    """Of the whole prompt; the span may keep less."""
    first_position: int
    """Absolute position of the span's first token."""
    created_ms: int
    """When the request came."""
    # Not when its answer ended: an order to erase a tenant covers answers under way, too.
    sampling: SamplingParams
    """`temperature`, `top_p`, `top_k`."""
    verification: Verification = "coupled"
    """How proposals of sampled requests are judged: see above."""
    tenant: str = "default"
    group_id: str = ""
    domain: str = ""
    target_version: int = 0
    """Of the whole trace; a new one ends the span."""
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, kw_only=True)
class VerifyRounds:
    """The R verifications that fell into the span, in order."""

    position: np.ndarray
    """[R] int32: absolute position of the last token committed before the round."""
    draft_tokens: np.ndarray
    """[R, P] int32: proposals; −1 where a round has fewer than P."""
    draft_logprobs: np.ndarray
    """[R, P] float16: at the draft's temperature."""
    draft_parents: np.ndarray
    """[R, P] int8: parent proposal, −1 for the root; a chain is −1, 0, 1, …"""
    num_accepted: np.ndarray
    """[R] int8: accepted proposals, without the bonus token."""
    draft_version: np.ndarray
    """[R] int32: 0 where earlier text proposed."""

    def __getitem__(self, chosen: np.ndarray) -> VerifyRounds:
        """Select rounds by index or mask; a copy."""
        return VerifyRounds(**{name: array[chosen] for name, array in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class BranchRows:
    """Rows behind rejections: what the target computed after reading N rejected proposals, at least one.

    `round` [N] int32 the verification's row in `VerifyRounds`, and `node` [N] int8 the proposal in it, in this order.
    Its parent is the root, accepted and inside the span, or kept as well. `topk_ids` and `topk_logprobs` [N, K],
    `hidden` [N, 3d] and its `scale` [N] are as `target_topk_*` and `aux_*` of the span's own tokens.
    """

    round: np.ndarray
    node: np.ndarray
    topk_ids: np.ndarray
    topk_logprobs: np.ndarray
    hidden: Tensor
    scale: Tensor | None = None

    def __len__(self) -> int:
        return len(self.round)

    def __getitem__(self, chosen: np.ndarray) -> BranchRows:
        """Select rows by index."""
        picked: dict[str, Any] = {name: None if v is None else v[chosen] for name, v in vars(self).items()}
        return BranchRows(**picked)

    @property
    def num_bytes(self) -> int:
        """Size of the arrays in memory."""
        return sum(array.nbytes for array in vars(self).values() if array is not None)

    @classmethod
    def within(cls, parts: Sequence[BranchRows], rounds: VerifyRounds, end: int) -> BranchRows | None:
        """Join the rows that are valid in a trace whose span ends before position `end`; None where there are none.
        Left out: rows of later rounds, rows behind accepted proposals after `end`, rows of padding.
        """
        if not parts:
            return None
        arrays = [{name: array for name, array in vars(part).items() if array is not None} for part in parts]
        join = {name: torch.cat if isinstance(one, Tensor) else np.concatenate for name, one in arrays[0].items()}
        joined: dict[str, Any] = {name: of_all([part[name] for part in arrays]) for name, of_all in join.items()}
        rows = cls(**joined)
        kept_N = np.flatnonzero(rows.round < len(rounds.position))
        at_N = rows.round[kept_N], rows.node[kept_N]
        has_parent_N = (rounds.position + rounds.num_accepted)[at_N[0]] < end
        kept_N = kept_N[has_parent_N & (rounds.draft_tokens[at_N] >= 0)]
        return rows[kept_N] if len(kept_N) else None


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One span of T tokens. `target_topk_*` row t is the target's distribution *after* token t, at temperature 1, with
    the request's penalties.

    A float8 feature means its product with `aux_scale`. Decoded features are bfloat16, without a scale.
    """

    header: TraceHeader
    token_ids: np.ndarray = field(repr=False)
    """[T] int32: end of the prompt, then the completion."""
    aux_hidden: Tensor = field(repr=False)
    """[T, 3d] float8_e4m3 or bfloat16: features, the hidden states that enter three of the target's layers."""
    target_topk_ids: np.ndarray = field(repr=False)
    """[T, K] int32: likeliest first; −1 without a distribution (leading prompt positions)."""
    target_topk_logprobs: np.ndarray = field(repr=False)
    """[T, K] float16: their logprobs; −inf without a distribution."""
    constrained: np.ndarray = field(repr=False)
    """[T] bool: a grammar, a bias or the like changed the distribution; no distillation."""
    rounds: VerifyRounds = field(repr=False)
    aux_scale: Tensor | None = field(default=None, repr=False)
    """[T] float16: with float8 features, their factor."""
    branches: BranchRows | None = field(default=None, repr=False)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_branches(self) -> int:
        """Rows behind rejections."""
        return 0 if self.branches is None else len(self.branches)

    @property
    def has_label(self) -> bool:
        """Whether a draft can learn from it: a position with the target's own distribution lies between two others."""
        is_label_T = (self.target_topk_ids[:, 0] >= 0) & ~self.constrained
        return bool(is_label_T[1:-1].any())

    @property
    def num_completion_tokens(self) -> int:
        """Completion tokens inside the span."""
        return self.header.first_position + self.num_tokens - self.header.num_prompt_tokens


def judge_proposals(trace: Trace) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compare the proposals of a trace, chains and trees, with its text. Returns three arrays [R, P]: int64 depth, 0
    for the root's children; bool, whether the proposal's position is inside the span and its parent committed; bool,
    whether it also is the committed token.
    """
    rounds, tokens_T = trace.rounds, trace.token_ids
    R, P = rounds.draft_tokens.shape
    start_R = rounds.position.astype(np.int64) - trace.header.first_position
    depth_RP, judged_RP, accepted_RP = np.zeros((R, P), np.int64), np.zeros((R, P), bool), np.zeros((R, P), bool)
    every = np.arange(R)
    for node in range(P):
        # Parents come before their children. The root is the last committed token.
        parent_R = rounds.draft_parents[:, node].astype(np.int64)
        is_root_R = parent_R < 0
        depth_RP[:, node] = np.where(is_root_R, 0, depth_RP[every, parent_R] + 1)
        at_R = start_R + 1 + depth_RP[:, node]
        proposed_R = rounds.draft_tokens[:, node]
        inside_R = at_R < len(tokens_T)
        judged_RP[:, node] = inside_R & (proposed_R >= 0) & (is_root_R | accepted_RP[every, parent_R])
        committed_R = tokens_T[np.minimum(at_R, len(tokens_T) - 1)]
        accepted_RP[:, node] = judged_RP[:, node] & (proposed_R == committed_R)
    return depth_RP, judged_RP, accepted_RP


# A log-probability of a certain token may come out a rounding step above zero.
_LOGPROB_SLACK = 1e-3
_INT32_END = 1 << 31
_MOST_TEMPERATURE = 1e30
"""float32 must hold it, and logits divided by it."""
_CREATED_END_MS = 1 << 53
_FLOAT8_NAN = 0x7F
"""NaN of float8_e4m3 without the sign bit; the format has no infinity."""
_TOO_LARGE = "{}_hidden is too large for float8 with a float16 scale; record with features='bfloat16'"
_FIRST_WITH_BRANCHES = 3
"""First schema version with rows behind rejections."""


def check_trace(trace: Trace) -> None:
    """Raise TraceError, with the reason, unless the trace is as the classes above say."""
    header = trace.header
    check_schema(header.schema_version)
    _check_header(header)
    _check_arrays(trace)
    _check_rounds(trace)
    if trace.branches is not None:
        _check_branches(trace, trace.branches)


def check_schema(version: int) -> None:
    """Raise UnknownSchemaError for a schema version that this code does not read."""
    if version not in READABLE_SCHEMAS:
        readable = ", ".join(map(str, READABLE_SCHEMAS))
        raise UnknownSchemaError(f"the trace has schema version {version}; this code reads versions {readable}")


def _require(ok: bool | np.bool_, message: str) -> None:
    if not ok:
        raise TraceError(message)


def _check_array(array: np.ndarray, name: str, dtype: type, shape: tuple[int, ...]) -> None:
    _require(array.dtype == dtype, f"{name} is {array.dtype}, expected {np.dtype(dtype)}")
    _require(array.shape == shape, f"{name} has shape {array.shape}, expected {shape}")


def _check_header(header: TraceHeader) -> None:
    _require(bool(header.trace_id), "trace_id is empty")
    _require(header.num_prompt_tokens >= 0, "num_prompt_tokens is negative")
    _require(0 <= header.first_position < _INT32_END, "first_position is out of range")
    _require(0 <= header.created_ms < _CREATED_END_MS, "created_ms is out of range")
    _require(0 <= header.target_version < _INT32_END, "target_version is out of range")
    sampling = header.sampling
    _require(0 <= sampling.temperature <= _MOST_TEMPERATURE, "temperature is out of range")
    _require(0 < sampling.top_p <= 1, "top_p is not in (0, 1]")
    _require(0 <= sampling.top_k < _INT32_END, "top_k is out of range")


def _check_arrays(trace: Trace) -> None:
    T = len(trace.token_ids)
    _require(T > 0, "the trace has no tokens")
    _check_array(trace.token_ids, "token_ids", np.int32, (T,))
    _require((trace.token_ids >= 0).all(), "token_ids has a negative id")
    _require(trace.header.first_position + T <= _INT32_END, "the span ends beyond the last position")
    _require(trace.num_completion_tokens >= 0, "the span ends before the prompt does")

    _check_features(trace.aux_hidden, trace.aux_scale, "aux", T)
    _check_distributions(trace.target_topk_ids, trace.target_topk_logprobs, "target_topk", T)
    _check_array(trace.constrained, "constrained", np.bool_, (T,))
    _require((trace.constrained.view(np.uint8) <= 1).all(), "constrained has a value other than 0 and 1")


def _check_features(hidden: Tensor, scale: Tensor | None, name: str, num_rows: int) -> None:
    expected = torch.bfloat16 if scale is None else torch.float8_e4m3fn
    _require(hidden.dtype == expected, f"{name}_hidden is {hidden.dtype}, expected {expected}")
    _require(
        hidden.dim() == 2 and hidden.shape[0] == num_rows,
        f"{name}_hidden has shape {tuple(hidden.shape)}, expected {num_rows} rows",
    )
    width = hidden.shape[1]
    _require(width > 0 and width % NUM_AUX_LAYERS == 0, f"{name}_hidden is {width} wide, not {NUM_AUX_LAYERS} × hidden")
    if scale is None:
        _require(bool(torch.isfinite(hidden).all()), f"{name}_hidden is not finite")
        return
    has_scale = scale.dtype == torch.float16 and scale.shape == (num_rows,)
    _require(has_scale, f"{name}_scale is {scale.dtype} {tuple(scale.shape)}")
    _require(not bool(scale.isinf().any()), _TOO_LARGE.format(name))
    is_number = (hidden.view(torch.uint8) & _FLOAT8_NAN) != _FLOAT8_NAN
    _require(not bool(scale.isnan().any()) and bool(is_number.all()), f"{name}_hidden is not finite")


def _check_distributions(ids: np.ndarray, logprobs: np.ndarray, name: str, num_rows: int) -> None:
    _require(
        ids.ndim == 2 and 0 < ids.shape[1] <= MAX_TOP_K,
        f"{name}_ids has shape {ids.shape}, expected [{num_rows}, K] with K from 1 to {MAX_TOP_K}",
    )
    _check_array(ids, f"{name}_ids", np.int32, (num_rows, ids.shape[1]))
    _check_array(logprobs, f"{name}_logprobs", np.float16, ids.shape)
    _require((ids >= -1).all(), f"{name}_ids has an id below −1")
    # NaN compares false, so it fails here too.
    _require((logprobs <= _LOGPROB_SLACK).all(), f"{name}_logprobs is above zero or not a number")
    _require((logprobs[:, :-1] >= logprobs[:, 1:]).all(), f"{name}_logprobs is not sorted from the likeliest")
    _require(np.isneginf(logprobs[ids == -1]).all(), f"{name}_logprobs has a value where there is no token")


def _check_rounds(trace: Trace) -> None:
    rounds, start = trace.rounds, trace.header.first_position
    tokens = rounds.draft_tokens
    _require(
        tokens.ndim == 2 and tokens.shape[1] <= MAX_PROPOSALS,
        f"draft_tokens has shape {tokens.shape}, expected [R, P] with P up to {MAX_PROPOSALS}",
    )
    R, P = tokens.shape
    _check_array(tokens, "draft_tokens", np.int32, (R, P))
    _check_array(rounds.draft_logprobs, "draft_logprobs", np.float16, (R, P))
    _check_array(rounds.draft_parents, "draft_parents", np.int8, (R, P))
    _check_array(rounds.position, "round position", np.int32, (R,))
    _check_array(rounds.num_accepted, "num_accepted", np.int8, (R,))
    _check_array(rounds.draft_version, "draft_version", np.int32, (R,))

    position = rounds.position
    _require(((position >= start) & (position < start + trace.num_tokens)).all(), "a round lies outside the span")
    _require((position[:-1] < position[1:]).all(), "rounds are not in the order of their positions")
    _require((tokens >= -1).all(), "draft_tokens has an id below −1")
    proposed = tokens >= 0
    accepted = rounds.num_accepted
    _require(((accepted >= 0) & (accepted <= proposed.sum(1))).all(), "num_accepted does not fit the proposals")
    _require((rounds.draft_version >= 0).all(), "draft_version is negative")
    logprobs = rounds.draft_logprobs[proposed]
    _require((np.isfinite(logprobs) & (logprobs <= _LOGPROB_SLACK)).all(), "a proposal has no valid draft_logprobs")
    parents = rounds.draft_parents
    _require(((parents >= -1) & (parents < np.arange(P))).all(), "a proposal's parent does not precede it")


def _check_branches(trace: Trace, branches: BranchRows) -> None:
    version, N = trace.header.schema_version, len(branches)
    _require(version >= _FIRST_WITH_BRANCHES, f"a trace of schema version {version} has no rows behind rejections")
    _require(N > 0, "branch_round is empty: leave the rows behind rejections out")
    _check_array(branches.round, "branch_round", np.int32, (N,))
    _check_array(branches.node, "branch_node", np.int8, (N,))
    _check_features(branches.hidden, branches.scale, "branch", N)
    _require(branches.hidden.shape[1] == trace.aux_hidden.shape[1], "branch_hidden is not as wide as aux_hidden")
    _check_distributions(branches.topk_ids, branches.topk_logprobs, "branch_topk", N)
    _require(branches.topk_ids.shape[1] == trace.target_topk_ids.shape[1], "branch_topk_ids has another K")
    _require((branches.topk_ids[:, 0] >= 0).all(), "branch_topk_ids has a row without a token")

    R, P = trace.rounds.draft_tokens.shape
    at_N = branches.round.astype(np.int64), branches.node.astype(np.int64)
    _require(((at_N[0] >= 0) & (at_N[0] < R)).all(), "branch_round is not a row of the rounds")
    _require(((at_N[1] >= 0) & (at_N[1] < P)).all(), "branch_node is no proposal of its round")
    _require((np.diff(at_N[0] * P + at_N[1]) > 0).all(), "the rows behind rejections are not in order")
    _require((trace.rounds.draft_tokens[at_N] >= 0).all(), "branch_node is no proposal of its round")
    _, _, known_RP = judge_proposals(trace)
    known_RP[at_N] = True
    parent_N = trace.rounds.draft_parents[at_N].astype(np.int64)
    _require(((parent_N < 0) | known_RP[at_N[0], parent_N]).all(), "a row behind a rejection has no known parent")


Features = Literal["float8", "bfloat16"]
_NOTHING = torch.zeros(1)
_FLOAT8_MAX = 448.0
# The smallest normal float16: smaller scales would lose precision, and float8 still represents such a row.
_MIN_SCALE = 2.0**-14
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
    "float8": {"hidden": torch.float8_e4m3fn, "scale": torch.float16},
    "bfloat16": {"hidden": torch.bfloat16},
}
_BRANCH_DTYPES = {
    "branch_round": torch.int32,
    "branch_node": torch.int8,
    "branch_topk_ids": torch.int32,
    "branch_topk_logprobs": torch.float16,
}
# Exceptions of parsers on malformed bytes, whose header may name any type, shape or nesting.
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
    arrays = {
        "token_ids": trace.token_ids,
        "constrained": trace.constrained,
        "target_topk_ids": trace.target_topk_ids[labelled:],
        "target_topk_logprobs": trace.target_topk_logprobs[labelled:],
        **vars(trace.rounds),
    }
    branches = trace.branches
    if branches is not None:
        arrays |= {name: getattr(branches, name.removeprefix("branch_")) for name in _BRANCH_DTYPES}
    tensors = {name: torch.from_numpy(np.require(array, requirements=["C", "W"])) for name, array in arrays.items()}
    tensors |= _stored("aux", trace.aux_hidden, trace.aux_scale, features)
    if branches is not None:
        tensors |= _stored("branch", branches.hidden, branches.scale, features)
    try:
        header = msgspec.json.encode(trace.header).decode()
    except UnicodeEncodeError as error:
        raise TraceError("the trace header has characters that UTF-8 cannot encode") from error
    return _serialised(tensors, {"header": header, "features": features})


def _stored(name: str, hidden: Tensor, scale: Tensor | None, features: Features) -> dict[str, Tensor]:
    """Features as tensors of the encoded trace."""
    hidden = hidden.detach().cpu()
    if features == "bfloat16":
        return {f"{name}_hidden": (hidden if scale is None else _restored(hidden, scale)).contiguous()}
    if scale is None:
        hidden, scale = quantised(hidden)
        _require(not bool(scale.isinf().any()), _TOO_LARGE.format(name))
    return {f"{name}_hidden": hidden.contiguous(), f"{name}_scale": scale}


def _serialised(tensors: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    """As `safetensors.torch.save`, without its leak: that keeps a ctypes type for each array size for ever, several
    kilobytes for each length of an answer.
    """
    held = {name: tensor.contiguous() for name, tensor in tensors.items()}
    specs = {
        name: TensorSpec(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=list(tensor.shape),
            # An empty tensor has no address.
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
    dtypes = _DTYPES | {f"aux_{name}": dtype for name, dtype in _FEATURE_DTYPES[features].items()}
    if header.schema_version >= _FIRST_WITH_BRANCHES and "branch_round" in tensors:
        dtypes |= _BRANCH_DTYPES | {f"branch_{name}": dtype for name, dtype in _FEATURE_DTYPES[features].items()}
    _check_tensors(tensors, dtypes)
    trace = _assemble(header, tensors)
    check_trace(trace)
    return trace


def read_header(data: bytes) -> TraceHeader:
    """Decode the header alone, even if the arrays are damaged. Raises TraceError without a valid header."""
    try:
        metadata = _metadata(data)
    except _NOT_A_TRACE as error:
        raise TraceError(f"the bytes are not a trace: {error}") from error
    return _decode_header(metadata)


def _first_labelled_row(target_topk_ids: np.ndarray) -> int:
    labelled = np.flatnonzero((target_topk_ids >= 0).any(1))
    return int(labelled[0]) if labelled.size else len(target_topk_ids)


def quantised(aux: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise features [T, 3d] to float8_e4m3 with a float16 scale [T]; each token's largest value becomes 448.

    Runs on any device without synchronising: the scale of a token with too large values is infinite.
    """
    # In place: allocating memory of this size costs more than the arithmetic.
    wide = aux.detach().to(torch.float32, copy=True)
    largest = torch.linalg.vector_norm(wide, torch.inf, dim=1)
    scale = (largest / _FLOAT8_MAX).clamp_min(_MIN_SCALE).half()
    # If the scale was rounded down, values reach 448.3 at most, which float8 rounds to 448.
    return wide.div_(scale[:, None]).to(torch.float8_e4m3fn), scale


def _restored(aux: Tensor, scale: Tensor) -> Tensor:
    return (aux.float() * scale.float()[:, None]).bfloat16()


def _metadata(data: bytes) -> dict[str, str]:
    """The safetensors metadata, which the library's `load` does not return."""
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
    T = tensors["token_ids"].numel()
    aux = _read_features(tensors, "aux")
    arrays = {name: tensors[name].numpy() for name in _DTYPES}
    return Trace(
        header=header,
        token_ids=arrays["token_ids"],
        aux_hidden=aux,
        branches=None if "branch_round" not in tensors else _assemble_branches(tensors),
        target_topk_ids=_restore_rows(arrays["target_topk_ids"], T, -1),
        target_topk_logprobs=_restore_rows(arrays["target_topk_logprobs"], T, -np.inf),
        constrained=arrays["constrained"],
        rounds=VerifyRounds(**{one.name: arrays[one.name] for one in fields(VerifyRounds)}),
    )


def _assemble_branches(tensors: dict[str, Tensor]) -> BranchRows:
    arrays: dict[str, Any] = {name.removeprefix("branch_"): tensors[name].numpy() for name in _BRANCH_DTYPES}
    if arrays["round"].ndim != 1 or arrays["topk_ids"].ndim != 2 or arrays["topk_ids"].shape[1] > MAX_TOP_K:
        raise TraceError(f"branch_topk_ids has shape {arrays['topk_ids'].shape}, expected [N, K]")
    return BranchRows(hidden=_read_features(tensors, "branch"), **arrays)


def _read_features(tensors: dict[str, Tensor], name: str) -> Tensor:
    """The features of a decoded trace, as bfloat16."""
    hidden, scale = tensors[f"{name}_hidden"], tensors.get(f"{name}_scale")
    if hidden.dim() != 2:
        raise TraceError(f"{name}_hidden has shape {tuple(hidden.shape)}, expected rows of 3d")
    if scale is None:
        return hidden
    if scale.shape != hidden.shape[:1]:
        raise TraceError(f"{name}_scale has shape {tuple(scale.shape)}, expected {tuple(hidden.shape[:1])}")
    return _restored(hidden, scale)


def _restore_rows(labelled: np.ndarray, T: int, fill: float) -> np.ndarray:
    """Put rows of `fill` before the labelled ones, so that there are T rows."""
    if labelled.ndim != 2 or len(labelled) > T or labelled.shape[1] > MAX_TOP_K:
        raise TraceError(f"a target_topk array has shape {labelled.shape}, expected at most [{T}, {MAX_TOP_K}]")
    missing = np.full((T - len(labelled), labelled.shape[1]), fill, labelled.dtype)
    return np.concatenate([missing, labelled])

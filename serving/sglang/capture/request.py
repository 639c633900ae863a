"""One captured request: its metadata, its captured rows and rounds, and the trace that they make.

A `RequestSpan` begins with a prefill and grows by verify rounds. Positions are absolute, so chunks of a prompt, a
prefix that the radix cache already had, and rounds of any depth fall into place. The features of position t exist once
the target has read token t, so the last committed token of an answer has none and stays outside.

Shape letters: n rows, w = 3d feature width, K kept tokens, N nodes of a verification (the last committed token first,
then the proposals), P = N − 1 proposals.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from serving.engine import CapturePolicy
from serving.request_metadata import POLICY_KEY, TARGET_KEY, TARGET_VERSION_KEY, RequestMetadata, version_of_label
from speculator.draft.sampling_params import SamplingParams
from speculator.host import now_ms
from speculator.trace import BranchRows, Trace, TraceHeader, Verification, VerifyRounds
from speculator.tracing import Parent, remote_parent

_GREEDY_TOP_K = 1
_HEALTH_CHECK = "HEALTH_CHECK"
"""How the ids of SGLang's requests to itself begin, one token each (`sglang.srt.constants`)."""


class Origin(NamedTuple):
    """What is true of every trace of one server."""

    engine_id: str
    target_fingerprint: str
    verification: Verification


def attach_metadata(request: Any, header: str) -> None:
    """Copy the gateway's header into SGLang's model of the body, whose own copy a router may have dropped.

    Raises ValueError for a header that the gateway did not write.
    """
    marks = RequestMetadata.of_header(header)
    request.rid, request.cache_salt = marks.rid, marks.cache_salt
    request.custom_params = {**(request.custom_params or {}), POLICY_KEY: marks.policy}


def attach_metadata_to_generation(generation: Any, header: str) -> None:
    """As `attach_metadata`, for a generation whose request body has no field for it."""
    marks = RequestMetadata.of_header(header)
    generation.rid = marks.rid
    # SGLang 0.5.17 has no cache_salt, only extra_key.
    setattr(generation, "cache_salt" if hasattr(generation, "cache_salt") else "extra_key", marks.cache_salt)
    params = generation.sampling_params
    params["custom_params"] = {**(params.get("custom_params") or {}), POLICY_KEY: marks.policy}


def is_health_check(request: Any) -> bool:
    id_: str = request.rid
    return id_.startswith(_HEALTH_CHECK)


def has_metadata(custom_params: Mapping[str, Any] | None) -> bool:
    """Whether the request carries what the gateway adds to each."""
    return bool(_ours(custom_params))


def is_for_another_target(
    custom_params: Mapping[str, Any] | None, fingerprint: str, weight_version: Callable[[], str]
) -> bool:
    """Whether the gateway asks for a target other than that of `fingerprint`, or for newer weights than this label
    names.

    False where the gateway asks for neither.
    """
    policy = _ours(custom_params)
    meant, least = policy.get(TARGET_KEY, ""), policy.get(TARGET_VERSION_KEY, 0)
    if meant and fingerprint and meant != fingerprint:
        return True
    return bool(least and least > (version_of_label(weight_version()) or 0))


def policy_of(custom_params: Mapping[str, Any] | None) -> CapturePolicy:
    """The capture policy that the gateway put into the request; without one it is captured (but see `has_metadata`)."""
    values = _ours(custom_params)
    return CapturePolicy(
        capture=bool(values.get("capture", True)),
        tenant=str(values.get("tenant", "default")),
        group_id=str(values.get("group_id", "")),
        domain=str(values.get("domain", "")),
    )


def parent_of(custom_params: Mapping[str, Any] | None) -> Parent | None:
    """The gateway's span of the request; None where spans are off, or it is not sampled."""
    return remote_parent({"traceparent": str(_ours(custom_params).get("traceparent", ""))})


def sampling_of(params: Any) -> SamplingParams:
    """Convert SGLang's sampling parameters: it writes greedy as top-k 1, and "every token" as −1 or a huge top-k."""
    if params.top_k == _GREEDY_TOP_K:
        return SamplingParams(temperature=0.0)
    top_k = params.top_k if 0 < params.top_k < 1 << 20 else 0
    return SamplingParams(temperature=float(params.temperature), top_p=float(params.top_p), top_k=top_k)


def received_ms(request: Any) -> int:
    """When SGLang's scheduler received the request, in ms since 1970; the same after a wait and after a retraction."""
    waited_s: float = time.perf_counter() - request.time_stats.scheduler_recv_time
    return now_ms() - round(1000 * waited_s)


def is_constrained(request: Any) -> bool:
    """Whether something but temperature, top-k, top-p and penalties changes the distribution of the answer's tokens."""
    params = request.sampling_params
    return bool(
        request.grammar is not None
        or params.logit_bias
        or params.min_new_tokens
        or params.min_p
        or request.custom_logit_processor
    )


def _ours(custom_params: Mapping[str, Any] | None) -> Mapping[str, Any]:
    values = (custom_params or {}).get(POLICY_KEY)
    return values if isinstance(values, Mapping) else {}


MAX_COMPLETION_TOKENS = 4096
"""A longer answer's trace is cut here: its features would take hundreds of megabytes of host memory."""


class InconsistentSpanError(Exception):
    """Captured rows or rounds contradict the served tokens: a bug, or a hook that no longer fits SGLang."""


@dataclass(frozen=True, kw_only=True)
class SpanRequest:
    """What the trace's header says about the request."""

    request_id: str
    num_prompt_tokens: int
    sampling: SamplingParams
    policy: CapturePolicy
    constrained: bool
    """A grammar, a bias or the like changes the distribution of the answer's tokens."""
    created_ms: int
    """When the request came, in ms since 1970."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Consecutive positions from `start`; ids and logprobs [m, K] of the last m of them."""

    start: int
    features: Tensor
    """[n, w] bfloat16, or the bytes of float8_e4m3."""
    scale: Tensor | None = None
    """[n] float16, of features in float8."""
    topk_ids: np.ndarray
    topk_logprobs: np.ndarray

    @property
    def end(self) -> int:
        return self.start + len(self.features)


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Verifications of P proposals each, one after another: k of them."""

    verified: VerifyRounds
    path: np.ndarray
    """[k, P] int32: the tokens along the accepted path, valid up to `num_accepted`."""
    rejected: BranchRows | None = None
    """Their `round` is an index into these k; `hidden` may be the bytes of float8_e4m3."""


@dataclass
class RequestSpan:
    """What was captured of one request; owned by the assembler's thread."""

    request: SpanRequest
    target_version: int = 0
    """The target's version when the request was first read."""
    rows: list[Rows] = field(default_factory=list)
    rounds: list[Rounds] = field(default_factory=list)
    num_bytes: int = 0
    rejected: list[BranchRows] = field(default_factory=list)
    num_rounds: int = 0
    is_cut: bool = False
    """Set by the assembler's thread; the scheduler's then copies no more of the request."""

    def add_rows(self, rows: Rows) -> None:
        """Take the next positions; they must follow the ones before them. Raises InconsistentSpanError."""
        if self.is_cut:
            return
        if self.rows and rows.start != self.rows[-1].end:
            raise InconsistentSpanError(f"positions from {rows.start} follow positions up to {self.rows[-1].end}")
        self.rows.append(rows)
        self.num_bytes += rows.features.nbytes + rows.topk_ids.nbytes + rows.topk_logprobs.nbytes
        self.is_cut = rows.end - self.request.num_prompt_tokens >= MAX_COMPLETION_TOKENS

    def clear(self) -> None:
        """Drop what was captured."""
        self.rows, self.rounds, self.rejected, self.num_bytes = [], [], [], 0

    def add_rounds(self, rounds: Rounds) -> None:
        if self.is_cut:
            return
        self.rounds.append(rounds)
        if (rows := rounds.rejected) is not None:
            self.rejected.append(replace(rows, round=rows.round + np.int32(self.num_rounds)))
            self.num_bytes += rows.num_bytes
        self.num_rounds += len(rounds.verified.position)

    def trace(self, tokens: list[int], origin: Origin) -> Trace | None:
        """The trace of an answer that ended; `tokens` are the prompt and the served completion.

        None where there is nothing to learn: no position was captured, or the answer has a single token.
        Raises InconsistentSpanError where rounds and tokens contradict each other.
        """
        if not self.rows:
            return None
        start = self.rows[0].start
        length = min(self.rows[-1].end, len(tokens) - 1) - start
        if start + length <= self.request.num_prompt_tokens:
            return None
        ids, logprobs = self._distributions(start, length)
        features = torch.cat([rows.features for rows in self.rows])[:length]
        scales = [rows.scale for rows in self.rows if rows.scale is not None]
        request, policy = self.request, self.request.policy
        constrained = np.zeros(length, np.bool_)
        if request.constrained:
            constrained[max(request.num_prompt_tokens - 1 - start, 0) :] = True
        rounds = self._rounds(tokens, start + length)
        branches = BranchRows.within(self.rejected, rounds, start + length)
        if branches is not None and scales:
            branches = replace(branches, hidden=branches.hidden.view(torch.float8_e4m3fn))
        return Trace(
            header=TraceHeader(
                trace_id=uuid.uuid4().hex,
                request_id=request.request_id,
                tenant=policy.tenant,
                group_id=policy.group_id,
                domain=policy.domain,
                sampling=request.sampling,
                num_prompt_tokens=request.num_prompt_tokens,
                first_position=start,
                engine_id=origin.engine_id,
                target_fingerprint=origin.target_fingerprint,
                target_version=self.target_version,
                created_ms=request.created_ms,
                verification=origin.verification,
            ),
            token_ids=np.array(tokens[start : start + length], np.int32),
            aux_hidden=features.view(torch.float8_e4m3fn) if scales else features,
            aux_scale=torch.cat(scales)[:length] if scales else None,
            target_topk_ids=ids,
            target_topk_logprobs=logprobs,
            constrained=constrained,
            rounds=rounds,
            branches=branches,
        )

    def _distributions(self, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        num_kept = self.rows[0].topk_ids.shape[1]
        ids = np.full((length, num_kept), -1, np.int32)
        logprobs = np.full((length, num_kept), -np.inf, np.float16)
        for rows in self.rows:
            first = rows.end - len(rows.topk_ids) - start
            kept = max(min(len(rows.topk_ids), length - first), 0)
            ids[first : first + kept] = rows.topk_ids[:kept]
            logprobs[first : first + kept] = rows.topk_logprobs[:kept]
        return ids, logprobs

    def _rounds(self, tokens: list[int], end: int) -> VerifyRounds:
        parts = [rounds.verified for rounds in self.rounds]
        width = max((part.draft_tokens.shape[1] for part in parts), default=0)
        parents = _padded([part.draft_parents for part in parts], width, np.int8, 0)
        # Padding behind a round's proposals needs valid parents, as in a chain.
        sizes = np.repeat([part.draft_tokens.shape[1] for part in parts], [len(part.position) for part in parts])
        columns = np.arange(width)
        parents = np.where(columns < sizes.reshape(-1, 1), parents, columns - 1).astype(np.int8)
        verified = VerifyRounds(
            position=_joined([part.position for part in parts], np.int32),
            draft_tokens=_padded([part.draft_tokens for part in parts], width, np.int32, -1),
            draft_logprobs=_padded([part.draft_logprobs for part in parts], width, np.float16, 0),
            draft_parents=parents,
            num_accepted=_joined([part.num_accepted for part in parts], np.int8),
            draft_version=_joined([part.draft_version for part in parts], np.int32),
        )
        path = _padded([rounds.path for rounds in self.rounds], width, np.int32, -1)
        is_kept = verified.position < end
        kept = verified[is_kept]
        self._check_served(tokens, kept.position, path[is_kept], kept.num_accepted)
        return kept

    @staticmethod
    def _check_served(tokens: list[int], position_R: np.ndarray, path_RP: np.ndarray, accepted_R: np.ndarray) -> None:
        """Raise InconsistentSpanError unless what was accepted behind each position was served there."""
        served_T = np.array(tokens, np.int32)
        at_RP = position_R[:, None] + 1 + np.arange(path_RP.shape[1])
        is_known_RP = (np.arange(path_RP.shape[1]) < accepted_R[:, None]) & (at_RP < len(tokens))
        differ_RP = is_known_RP & (served_T[np.minimum(at_RP, len(tokens) - 1)] != path_RP)
        if differ_RP.any():
            wrong = position_R[differ_RP.any(1)][0]
            raise InconsistentSpanError(f"the proposals accepted at position {wrong} were not served")


def _joined(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def _padded(parts: list[np.ndarray], width: int, dtype: type, fill: int) -> np.ndarray:
    """Stack the tables of rounds, filled up to `width` columns."""
    table: np.ndarray = np.full((sum(map(len, parts)), width), fill, dtype)
    start = 0
    for part in parts:
        table[start : start + len(part), : part.shape[1]] = part
        start += len(part)
    return table


@dataclass(eq=False)
class CaptureState:
    """The capture state of a running request, an attribute of SGLang's request object."""

    span: RequestSpan | None
    """None where the request is not captured, and once its trace is built or dropped."""
    parent: Parent | None = None
    """The parent of the tracing span of the trace's assembly."""
    dropped: str = ""
    """Why its trace will not be made; set by either thread, counted by the one that assembles."""

    @property
    def growing(self) -> RequestSpan | None:
        """The span, unless it takes no more: its trace was dropped, or is cut, as the assembler may just have found."""
        span = self.span
        return None if self.dropped or (span is not None and span.is_cut) else span

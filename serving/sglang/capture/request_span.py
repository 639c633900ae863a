"""What was captured of one request while it ran, and the trace that it makes in the end.

A span begins with a prefill and grows by verify rounds. Positions are absolute, so chunks of a prompt, a prefix that
the radix cache already had, and rounds of any depth fall into place. The features of position t exist once the target
has read token t, so the last committed token of an answer has none and stays outside.

Shape letters: n rows, w = 3d feature width, K kept tokens, N nodes of a verification (the last committed token first,
then the proposals), P = N − 1 proposals.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from serving.capture.recorder import make_header
from serving.engine import CapturePolicy
from speculator.draft.sampling_params import SamplingParams
from speculator.trace import Trace, VerifyRounds
from speculator.tracing import Parent

MAX_COMPLETION_TOKENS = 4096
"""A longer answer's trace is cut here: its features would take hundreds of megabytes of host memory."""


class InconsistentSpanError(Exception):
    """What was captured contradicts the tokens that were served: a bug, or a hook that moved."""


@dataclass(frozen=True, kw_only=True)
class SpanRequest:
    """What the trace's header says about the request."""

    request_id: str
    num_prompt_tokens: int
    sampling: SamplingParams
    policy: CapturePolicy
    constrained: bool
    """A grammar, bias or penalty changes the distribution of the answer's tokens."""
    created_ms: int
    """When it came."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Consecutive positions from `start`: features [n, w] bfloat16; ids and logprobs [m, K] of the last m of them."""

    start: int
    features: Tensor
    topk_ids: np.ndarray
    topk_logprobs: np.ndarray

    @property
    def end(self) -> int:
        return self.start + len(self.features)


@dataclass(frozen=True, kw_only=True)
class Round:
    """One verification with proposals: tokens, log-probabilities and parents [P] as in a trace, the accepted path."""

    position: int
    tokens: np.ndarray
    logprobs: np.ndarray
    parents: np.ndarray
    path: np.ndarray
    """Tokens of the accepted proposals, in order."""
    draft_version: int


@dataclass
class Span:
    """Owned by the thread that assembles traces."""

    request: SpanRequest
    target_version: int = 0
    """In service when the request was first read."""
    rows: list[Rows] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    num_bytes: int = 0
    is_cut: bool = False

    def add_rows(self, rows: Rows) -> None:
        """Take the next positions; they must follow the ones before them. Raises InconsistentSpanError."""
        if self.is_cut:
            return
        if self.rows and rows.start != self.rows[-1].end:
            raise InconsistentSpanError(f"positions from {rows.start} follow positions up to {self.rows[-1].end}")
        self.rows.append(rows)
        self.num_bytes += rows.features.nbytes + rows.topk_ids.nbytes + rows.topk_logprobs.nbytes
        self.is_cut = rows.end - self.request.num_prompt_tokens >= MAX_COMPLETION_TOKENS

    def add_round(self, round_: Round) -> None:
        if not self.is_cut:
            self.rounds.append(round_)

    def trace(self, tokens: list[int], *, engine_id: str, target_fingerprint: str) -> Trace | None:
        """The trace of an answer that ended; `tokens` are the prompt and the served completion.

        None where there is nothing to learn: no position was computed, or the answer's first token is its last.
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
        request = self.request
        constrained = np.zeros(length, np.bool_)
        if request.constrained:
            constrained[max(request.num_prompt_tokens - 1 - start, 0) :] = True
        return Trace(
            header=make_header(
                request_id=request.request_id,
                policy=request.policy,
                sampling=request.sampling,
                num_prompt_tokens=request.num_prompt_tokens,
                first_position=start,
                engine_id=engine_id,
                target_fingerprint=target_fingerprint,
                target_version=self.target_version,
                created_ms=request.created_ms,
            ),
            token_ids=np.array(tokens[start : start + length], np.int32),
            aux_hidden=features,
            target_topk_ids=ids,
            target_topk_logprobs=logprobs,
            constrained=constrained,
            rounds=self._rounds(tokens, start + length),
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
        rounds = [round_ for round_ in self.rounds if round_.position < end]
        for round_ in rounds:
            served = tokens[round_.position + 1 : round_.position + 1 + len(round_.path)]
            if served != round_.path[: len(served)].tolist():
                raise InconsistentSpanError(f"the proposals accepted at position {round_.position} were not served")
        width = max((len(round_.tokens) for round_ in rounds), default=0)
        draft_tokens = np.full((len(rounds), width), -1, np.int32)
        draft_logprobs = np.zeros((len(rounds), width), np.float16)
        # Beyond a round's proposals the parents say nothing, but must be valid: a chain's are.
        parents = np.broadcast_to(np.arange(-1, width - 1, dtype=np.int8), draft_tokens.shape).copy()
        for row, round_ in enumerate(rounds):
            size = len(round_.tokens)
            draft_tokens[row, :size] = round_.tokens
            draft_logprobs[row, :size] = round_.logprobs
            parents[row, :size] = round_.parents
        return VerifyRounds(
            position=np.array([round_.position for round_ in rounds], np.int32),
            draft_tokens=draft_tokens,
            draft_logprobs=draft_logprobs,
            draft_parents=parents,
            num_accepted=np.array([len(round_.path) for round_ in rounds], np.int8),
            draft_version=np.array([round_.draft_version for round_ in rounds], np.int32),
        )


@dataclass(eq=False)
class Ticket:
    """What hangs on a running request."""

    span: Span | None
    """None where the request is not captured, and once its trace is built or dropped."""
    parent: Parent | None = None
    """What the assembling's span is put under."""
    dropped: str = ""
    """Why its trace will not be made; set by either thread, counted by the one that assembles."""

    @property
    def growing(self) -> Span | None:
        """The span, where more of it is wanted."""
        return None if self.dropped else self.span

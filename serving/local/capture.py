"""Capture of the local engine: builds traces from ended generations, and target distributions of prompt positions.

The engine's thread only queues jobs. One capture thread runs them in order, so a trace has all distributions that were
queued before it. That thread has a higher niceness: if both want a core, it gets a quarter of it. (Much less would
hurt: the engine waits while the thread holds the interpreter's lock.) Once `MOST_WAITING` jobs wait, further prompt
chunks go without distributions, which is counted; traces are always built. Distributions that still wait when the
engine stops or a tenant's text is erased are left out, so that a wait for the traces takes one job at most.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Sequence

import numpy as np
import structlog
import torch
from torch import Tensor

from serving.local.config import LocalEngineConfig
from serving.local.request import ActiveRequest, RoundRecord, TopK
from serving.local.target.model import Target
from serving.metrics import EngineMetrics
from speculator.errors import type_and_place
from speculator.trace import BranchRows, Trace, TraceHeader, VerifyRounds
from speculator.tracing import record

log = structlog.get_logger(__name__)
MOST_WAITING = 64
"""Jobs in the queue. One holds the hidden states of a prompt chunk, up to 128: 1 MiB for an 8B target."""
_NICENESS = 5


class LocalCapture:
    """Builds traces on its own thread, which calls `on_trace`. The engine's thread calls `label` and `hand_over`."""

    def __init__(
        self,
        config: LocalEngineConfig,
        target: Target,
        on_trace: Callable[[Trace], object],
        *,
        target_fingerprint: str,
        metrics: EngineMetrics,
    ) -> None:
        self._config, self._target, self._on_trace = config, target, on_trace
        self._fingerprint, self._metrics = target_fingerprint, metrics
        self._jobs = queue.SimpleQueue[Callable[[], object] | None]()
        self._era = object()
        """Replaced to cancel all waiting distributions: jobs of an earlier era are skipped."""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="capture", daemon=True)

    def start(self) -> None:
        self._thread.start()
        # PyTorch's thread count, which the capture thread sets, is inherited by threads that start later; the engine's
        # thread sets its own.
        self._ready.wait()

    def close(self) -> None:
        """Stop the thread after it has delivered every queued trace."""
        self.cancel_labels()
        if self._thread.ident is not None:
            self._jobs.put(None)
            self._thread.join()

    def drain(self) -> None:
        """Wait until all jobs queued so far are done; for any thread but the engine's."""
        done = threading.Event()
        self._jobs.put(done.set)
        while self._thread.is_alive() and not done.wait(0.1):
            pass

    @property
    def num_waiting(self) -> int:
        """Jobs that wait in the queue."""
        return self._jobs.qsize()

    def label(self, unknown: TopK, hidden_Td: Tensor) -> None:
        """Queue the target's top-k for the rows of `unknown`, to be computed from the final hidden states [T, d]."""
        if self.num_waiting >= MOST_WAITING:
            self._leave_out(unknown)
            return
        hidden_Td, era = hidden_Td.clone(), self._era
        self._jobs.put(lambda: self._fill_in(unknown, hidden_Td, era))

    def cancel_labels(self) -> None:
        """Cancel all waiting distributions; for any thread.

        Called before the target's weights change, since hidden states of the old weights give no valid distribution
        under the new, and before someone waits for the traces.
        """
        self._era = object()

    def hand_over(
        self, generation: ActiveRequest, features: Callable[[int, int], Tensor], *, target_version: int
    ) -> None:
        """Queue the trace of a generation as it is now, if it is captured; `features(start, end)` copies features."""
        # A trace excludes the answer's last token, so an answer of one token has nothing to learn from.
        if not generation.capture or generation.aborted or generation.num_completion_tokens < 2:
            return
        started = time.perf_counter()
        # The last `context_window` positions of the prompt, and the answer. The target never read the last committed
        # token, so it has neither features nor a distribution.
        start, end = max(0, generation.num_prompt_tokens - self._config.context_window), len(generation.tokens) - 1
        frozen, aux_hidden = generation.frozen(), features(start, end)
        self.finish(lambda: self._build_trace(frozen, aux_hidden, start, target_version))
        seconds = time.perf_counter() - started
        self._metrics.capture_seconds.inc(seconds)
        record(generation.parent, "capture", seconds, tokens=end - start)

    def finish(self, build: Callable[[], Trace]) -> None:
        """Queue `build`, and `on_trace` with its trace."""
        self._jobs.put(lambda: self._on_trace(build()))

    def _build_trace(self, generation: ActiveRequest, aux_hidden: Tensor, start: int, target_version: int) -> Trace:
        """The trace of the span that begins at `start` and has features `aux_hidden` [T, 3d]."""
        length = len(aux_hidden)
        kept = TopK.unknown(start, length, generation.topk[0].ids.shape[1])
        for top in generation.topk:
            # A short context window begins behind the first rows of the prompt. If the answer ended inside a round, the
            # rest of that round's rows lie past the span.
            first, rows = max(start - top.position, 0), min(len(top.ids), start + length - top.position)
            if rows > first:
                at = slice(top.position + first - start, top.position + rows - start)
                kept.ids[at], kept.logprobs[at] = top.ids[first:rows], top.logprobs[first:rows]
        rounds = _rounds(generation.rounds)
        branches = BranchRows.within(generation.rejected, rounds, start + length)
        constrained = np.zeros(length, np.bool_)
        if generation.grammar is not None:
            constrained[max(generation.num_prompt_tokens - 1 - start, 0) :] = True
        num_drawn, num_kept = sum(map(len, generation.rejected)), 0 if branches is None else len(branches)
        self._metrics.branch_rows.labels("kept").inc(num_kept)
        self._metrics.branch_rows.labels("cut").inc(num_drawn - num_kept)
        request, policy = generation.request, generation.request.policy
        return Trace(
            header=TraceHeader(
                trace_id=uuid.uuid4().hex,
                request_id=request.request_id,
                tenant=policy.tenant,
                group_id=policy.group_id,
                domain=policy.domain,
                sampling=request.sampling,
                num_prompt_tokens=generation.num_prompt_tokens,
                first_position=start,
                engine_id=self._config.engine_id,
                target_fingerprint=self._fingerprint,
                target_version=target_version,
                created_ms=generation.created_ms,
                verification="coupled",
            ),
            token_ids=np.array(generation.tokens[start : start + length], np.int32),
            aux_hidden=aux_hidden,
            target_topk_ids=kept.ids,
            target_topk_logprobs=kept.logprobs,
            constrained=constrained,
            rounds=rounds,
            branches=branches,
        )

    def _run(self) -> None:
        torch.set_num_threads(1)
        os.nice(_NICENESS)  # Of this thread alone, on Linux.
        self._ready.set()
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:
                self._metrics.capture_failures.inc()
                log.error("capture failed", error=type_and_place(error))
            # Free the last answer's memory while waiting for the next job.
            del job

    @torch.inference_mode()
    def _fill_in(self, unknown: TopK, hidden_Td: Tensor, era: object) -> None:
        if era is self._era:
            ids, logprobs = self._target.ranking.top(self._target.logits(hidden_Td), unknown.ids.shape[1])
            # Check again: if the weights were exchanged meanwhile, the result is wrong.
            if era is self._era:
                unknown.ids[:], unknown.logprobs[:] = ids, logprobs
                return
        self._leave_out(unknown)

    def _leave_out(self, unknown: TopK) -> None:
        self._metrics.unlabelled.inc(len(unknown.ids))


def _rounds(rounds: Sequence[RoundRecord]) -> VerifyRounds:
    width = max((len(round_.tree.tokens) for round_ in rounds), default=0)
    tokens = np.full((len(rounds), width), -1, np.int32)
    logprobs = np.zeros((len(rounds), width), np.float16)
    parents = np.tile(np.arange(-1, width - 1, dtype=np.int8), (len(rounds), 1))
    for row, round_ in enumerate(rounds):
        tree, size = round_.tree, len(round_.tree.tokens)
        tokens[row, :size], parents[row, :size] = tree.tokens, tree.parents
        logprobs[row, :size] = np.log(np.maximum(tree.probabilities, 1e-30))
    return VerifyRounds(
        position=np.array([round_.position for round_ in rounds], np.int32),
        draft_tokens=tokens,
        draft_logprobs=logprobs,
        draft_parents=parents,
        num_accepted=np.array([round_.num_accepted for round_ in rounds], np.int8),
        draft_version=np.array([round_.draft_version for round_ in rounds], np.int32),
    )

"""From a generation that has ended, or is cut, to a trace; and the target's distributions after prompt positions.

The engine's thread hands over and goes on. One thread takes everything in that order, so a trace has all that was
asked for before it. That thread is nicer than the engine: where both want a core, it gets a quarter. (Hardly any would
be too little: while it has the interpreter's lock, the engine waits for it.) Once `MOST_WAITING` pieces wait, further
prompts go without distributions, which is counted; traces are all assembled. Distributions that still wait when the
engine stops, or must let go of somebody's text, are left out: who waits for the traces waits for one piece at most.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import structlog
import torch
from torch import Tensor

from serving.capture.recorder import make_header
from serving.local.config import LocalEngineConfig
from serving.local.request import ActiveRequest, RoundRecord, TopK
from serving.local.target.model import Target
from serving.metrics import EngineMetrics
from speculator.errors import type_and_place
from speculator.trace import BranchRows, Trace, VerifyRounds
from speculator.tracing import record

log = structlog.get_logger(__name__)
MOST_WAITING = 64
"""Of a prompt's chunk, up to 128 hidden states: 1 MiB for an 8B target."""
_NICENESS = 5


class LocalCapture:
    """`label` and `hand_over` are for the engine's thread; `on_trace` is called on a thread of its own."""

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
        """Another one whenever what waits for a distribution is to go without."""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="capture", daemon=True)

    def start(self) -> None:
        self._thread.start()
        # The number of threads that it sets for itself is also that of threads that begin later: not the engine's.
        self._ready.wait()

    def close(self) -> None:
        """Every trace that was handed over is out first."""
        self.forgo_labels()
        if self._thread.ident is not None:
            self._jobs.put(None)
            self._thread.join()

    def drain(self) -> None:
        """Wait until what was handed over before is done; for any thread but the engine's."""
        done = threading.Event()
        self._jobs.put(done.set)
        while self._thread.is_alive() and not done.wait(0.1):
            pass

    @property
    def num_waiting(self) -> int:
        """Pieces and traces that were handed over and have not been begun."""
        return self._jobs.qsize()

    def label(self, unknown: TopK, hidden_Td: Tensor) -> None:
        """Have the rows of `unknown` filled in, from the final hidden states of their positions."""
        if self.num_waiting >= MOST_WAITING:
            self._leave_out(unknown)
            return
        hidden_Td, era = hidden_Td.clone(), self._era
        self._jobs.put(lambda: self._fill_in(unknown, hidden_Td, era))

    def forgo_labels(self) -> None:
        """Leave out what is not filled in by now; for any thread.

        The weights are about to change, and what the old ones read can have no distribution by the new; or somebody is
        about to wait for the traces.
        """
        self._era = object()

    def hand_over(
        self, generation: ActiveRequest, features: Callable[[int, int], Tensor], *, target_version: int
    ) -> None:
        """Make the trace of a generation, as it is now, where it is wanted; `features` copies those of [start, end)."""
        # An answer's last token is outside its trace; where it is the first as well, there is nothing to learn.
        if not generation.capture or generation.aborted or generation.num_completion_tokens < 2:
            return
        started = time.perf_counter()
        # The last `context_window` positions of the prompt, and what the answer read. The target never read the last
        # committed token, so it has neither features nor a distribution.
        start, end = max(0, generation.num_prompt_tokens - self._config.context_window), len(generation.tokens) - 1
        frozen, aux_hidden = generation.frozen(), features(start, end)
        self.finish(lambda: self._build_trace(frozen, aux_hidden, start, target_version))
        seconds = time.perf_counter() - started
        self._metrics.capture_seconds.inc(seconds)
        record(generation.parent, "capture", seconds, tokens=end - start)

    def finish(self, build: Callable[[], Trace]) -> None:
        """Hand on the trace that `build` makes."""
        self._jobs.put(lambda: self._on_trace(build()))

    def _build_trace(self, generation: ActiveRequest, aux_hidden: Tensor, start: int, target_version: int) -> Trace:
        """The span begins at `start` and has features `aux_hidden` [T, 3d]."""
        length = len(aux_hidden)
        kept = TopK.unknown(start, length, generation.topk[0].ids.shape[1])
        for top in generation.topk:
            # The rows of a round's tail that an end of answer cut off lie past the span.
            rows = min(len(top.ids), start + length - top.position)
            if rows > 0:
                at = top.position - start
                kept.ids[at : at + rows], kept.logprobs[at : at + rows] = top.ids[:rows], top.logprobs[:rows]
        rounds = _rounds(generation.rounds)
        branches = BranchRows.within(generation.rejected, rounds, start + length)
        constrained = np.zeros(length, np.bool_)
        if generation.grammar is not None:
            constrained[max(generation.num_prompt_tokens - 1 - start, 0) :] = True
        num_drawn, num_kept = sum(map(len, generation.rejected)), 0 if branches is None else len(branches)
        self._metrics.branch_rows.labels("kept").inc(num_kept)
        self._metrics.branch_rows.labels("cut").inc(num_drawn - num_kept)
        request = generation.request
        return Trace(
            header=make_header(
                request_id=request.request_id,
                policy=request.policy,
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
            # Or the last answer would stay in memory until the next one.
            del job

    @torch.inference_mode()
    def _fill_in(self, unknown: TopK, hidden_Td: Tensor, era: object) -> None:
        if era is self._era:
            ids, logprobs = self._target.ranking.top(self._target.logits(hidden_Td), unknown.ids.shape[1])
            # Read again: weights that were exchanged meanwhile have left nonsense.
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

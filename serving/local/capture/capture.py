"""Turns a generation that has ended, or is cut, into a trace."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
from torch import Tensor

from serving.capture.trace_header import make_header
from serving.local.capture.assembler import TraceAssembler
from serving.local.config import LocalEngineConfig
from serving.local.decode.rounds import RoundRunner
from serving.local.request import Generation
from serving.metrics import EngineMetrics
from speculator.trace import Trace, VerifyRounds
from speculator.tracing import record


class Capture:
    """Used by the engine's thread; what need not be done there is left to the assembler's."""

    def __init__(
        self,
        config: LocalEngineConfig,
        runner: RoundRunner,
        assembler: TraceAssembler,
        *,
        target_fingerprint: str,
        metrics: EngineMetrics,
    ) -> None:
        self._config, self._runner, self._assembler, self._metrics = config, runner, assembler, metrics
        self._fingerprint = target_fingerprint

    def target_moves(self) -> None:
        """Before the weights change."""
        self._assembler.forgo_labels()

    def hand_over(self, generation: Generation, *, slot: int, target_version: int) -> None:
        """Make the trace of a generation in `slot`, as it is now, where it is wanted."""
        # An answer's last token is outside its trace; where it is the first as well, there is nothing to learn.
        teaches = len(generation.tokens) - generation.num_prompt_tokens > 1
        if not generation.capture or generation.aborted or not teaches:
            return
        started = time.perf_counter()
        start, end = span_of(generation, self._config.context_window)
        self._assembler.finish(
            partial(
                build_trace,
                generation.frozen(),
                self._runner.features(slot, start, end),
                start=start,
                engine_id=self._config.engine_id,
                target_fingerprint=self._fingerprint,
                target_version=target_version,
            )
        )
        seconds = time.perf_counter() - started
        self._metrics.capture_seconds.inc(seconds)
        record(generation.parent, "capture", seconds, tokens=end - start)


def span_of(generation: Generation, context_window: int) -> tuple[int, int]:
    """[start, end) of the positions to keep: the last `context_window` of the prompt and what the answer read.

    The last committed token is outside: the target never read it, so it has neither features nor a distribution.
    """
    return max(0, generation.num_prompt_tokens - context_window), len(generation.tokens) - 1


def build_trace(
    generation: Generation,
    aux_hidden: Tensor,
    *,
    start: int,
    engine_id: str,
    target_fingerprint: str,
    target_version: int,
) -> Trace:
    """The trace of a generation that has ended, or is cut here.

    Its span begins at `start` and has features `aux_hidden` [T, 3d].
    """
    length = len(aux_hidden)
    num_kept = generation.topk[0].ids.shape[1]
    ids = np.full((length, num_kept), -1, np.int32)
    logprobs = np.full((length, num_kept), -np.inf, np.float16)
    for top in generation.topk:
        # The rows of a round's tail that an end of answer cut off lie past the span.
        rows = min(len(top.ids), start + length - top.position)
        if rows > 0:
            at = top.position - start
            ids[at : at + rows], logprobs[at : at + rows] = top.ids[:rows], top.logprobs[:rows]
    request = generation.request
    return Trace(
        header=make_header(
            request_id=request.request_id,
            policy=request.policy,
            sampling=request.sampling,
            num_prompt_tokens=generation.num_prompt_tokens,
            first_position=start,
            engine_id=engine_id,
            target_fingerprint=target_fingerprint,
            target_version=target_version,
            created_ms=generation.created_ms,
        ),
        token_ids=np.array(generation.tokens[start : start + length], np.int32),
        aux_hidden=aux_hidden,
        target_topk_ids=ids,
        target_topk_logprobs=logprobs,
        constrained=np.zeros(length, np.bool_),
        rounds=_rounds(generation),
    )


def _rounds(generation: Generation) -> VerifyRounds:
    rounds = generation.rounds
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

"""What capture can do behind the engine's back: the distributions after a prompt's positions, and finished traces.

The engine's thread hands over and goes on; one thread takes everything in that order, so a trace has all that was asked
for before it. The thread is nicer than the engine: where both want a core, it gets a quarter. (Hardly any would be too
little: while it has the interpreter's lock, the engine waits for it.) Where it is so far behind that `MOST_WAITING`
pieces wait, further prompts go without distributions, which is counted; traces are all assembled. So do those that wait
when the engine stops, or has to let go of somebody's text: who waits for the traces waits for one piece at most.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

import structlog
import torch
from torch import Tensor

from serving.local.request import TopK
from serving.local.target.model import Target
from serving.metrics import EngineMetrics
from speculator.errors import type_and_place
from speculator.trace import Trace

log = structlog.get_logger(__name__)

MOST_WAITING = 64
"""Of a prompt's chunk, up to 128 hidden states: 1 MiB for an 8B target."""
_NICENESS = 5


class TraceAssembler:
    """`label` and `finish` are for the engine's thread; `on_trace` is called on the assembler's."""

    def __init__(self, target: Target, on_trace: Callable[[Trace], object], metrics: EngineMetrics) -> None:
        self._target, self._on_trace, self._metrics = target, on_trace, metrics
        self._jobs = queue.SimpleQueue[Callable[[], object] | None]()
        self._era = object()
        """Another one whenever what waits for a distribution is to go without."""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trace-assembler", daemon=True)

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

    def label(self, unknown: TopK, hidden_Td: Tensor) -> None:
        """Have the rows of `unknown` filled in, from the final hidden states of their positions."""
        if self._jobs.qsize() >= MOST_WAITING:
            self._leave_out(unknown)
            return
        hidden_Td, era = hidden_Td.clone(), self._era
        self._jobs.put(lambda: self._fill_in(unknown, hidden_Td, era))

    def finish(self, build: Callable[[], Trace]) -> None:
        """Hand on the trace that `build` makes."""
        self._jobs.put(lambda: self._on_trace(build()))

    def forgo_labels(self) -> None:
        """Leave out what is not filled in by now; for any thread.

        The weights are about to change, and what the old ones read can have no distribution by the new; or somebody is
        about to wait for the traces.
        """
        self._era = object()

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

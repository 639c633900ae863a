"""Assemble the copies of an SGLang server's steps into spans and traces, on a thread of its own.

The scheduler's thread hands over what it copied of a step, says when a request has ended, and goes on. The assembler
waits for the copies, reduces logits that are not reduced yet, grows the spans, and builds the traces of requests that
have ended. It takes verifications in batches, because the two threads compete for the GIL each time it wakes.

Copies count as held until they are reduced, the rows of a span until its request has ended. With more than
`buffer_bytes` held no new request is captured, and the newest running ones are dropped until the others have room. With
much in the queue the assembler is behind, and the scheduler's thread reduces logits itself.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import structlog
import torch
from torch import Tensor

from serving.sglang.capture.device_reads import HostCopy, Places, unpacked
from serving.sglang.capture.request import CaptureState, InconsistentSpanError, Origin, RequestSpan, Rounds, Rows
from serving.sglang.capture.verification_rows import TopTokens, committed, joined, prefilled, reduced
from serving.sglang.device import CpuDevice, Device
from serving.sglang.settings import PluginSettings, buffer_bytes
from speculator.errors import type_and_place
from speculator.trace import Trace
from speculator.tracing import record

log = structlog.get_logger(__name__)
_ROOM = 0.9
"""Share of the buffer down to which spans are dropped once it is full, so that not every step drops another."""


@dataclass(frozen=True)
class Gathering:
    """How long, and up to how many bytes, verifications are collected; the end of a request does not wait."""

    seconds: float = 1.0
    num_bytes: int = 16 << 20
    behind_bytes: int = 64 << 20
    """With more in the queue, the assembler is behind."""


@dataclass(frozen=True)
class Prefill:
    copy: HostCopy
    """As `prefilled` reads it, or with logits instead of the top tokens."""
    rows: tuple[tuple[CaptureState, int, int], ...]
    """(ticket, first position, number of rows) in the order of the copied rows."""


@dataclass(frozen=True)
class CopiedVerification:
    copy: HostCopy
    """The rows that `committed` reads, or logits instead of the top tokens; and, packed, what it reads by tree."""
    places: Places
    """Layout of the packed tensors, which are of the whole batch."""
    indices: tuple[int, ...]
    """Indices of the captured requests in the batch."""
    tickets: tuple[CaptureState, ...]
    counts: tuple[int, ...]
    """Nodes that were committed, of each request."""
    sizes: tuple[int, ...]
    """Nodes whose rows were copied: all of a chain where the rejected ones are kept."""
    num_nodes: int
    draft_version: int
    is_tree: bool
    has_text: bool
    """Whether earlier text was proposed in it."""

    @property
    def kind(self) -> tuple[int, int, bool, bool]:
        """Verifications of the same kind can be joined."""
        return self.num_nodes, self.draft_version, self.is_tree, self.has_text


@dataclass(frozen=True)
class _End:
    ticket: CaptureState
    tokens: list[int]


_Event = Prefill | CopiedVerification | _End | None
"""None ends the assembler."""


class TraceAssembler:
    """`hand_over` and `end` are for the scheduler's thread; `on_trace` runs on the assembler's and must not block."""

    def __init__(
        self,
        settings: PluginSettings,
        *,
        origin: Origin,
        device: Device,
        on_trace: Callable[[Trace], object],
        gathering: Gathering = Gathering(),
    ) -> None:
        self._gathering = gathering
        self._buffer_bytes, self._is_host = buffer_bytes(settings), device.is_host
        self._origin, self._on_trace = origin, on_trace
        self._top_tokens = TopTokens(settings.capture_topk, CpuDevice())
        self._queue: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._urgent = threading.Event()
        self._lock = threading.Lock()
        self.held_bytes = self.queued_bytes = 0
        """Bytes of queued copies and the rows of open spans; of the copies alone."""
        self.target_version = 0
        """The version of the target: requests that began under another are not recorded."""
        self._spans: dict[CaptureState, RequestSpan] = {}
        """Of running requests, the oldest in front."""
        self.dropped: collections.Counter[str] = collections.Counter()
        """Requests that were captured and whose trace was not made, by reason."""
        self.branch_rows: collections.Counter[str] = collections.Counter()
        """Rows behind rejections, by outcome; the scheduler's thread counts those over the budget."""
        self._thread = threading.Thread(target=self._run, name="slipstream-assembler", daemon=True)
        self._thread.start()

    # -- for the scheduler's thread ---------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether another request may be captured."""
        return self.held_bytes <= self._buffer_bytes

    @property
    def held_share(self) -> float:
        """The share of the buffer that is held."""
        return self.held_bytes / self._buffer_bytes

    @property
    def is_behind(self) -> bool:
        """Whether the scheduler's thread should reduce logits before it hands them over."""
        return self.queued_bytes > self._gathering.behind_bytes

    def hand_over(self, step: Prefill | CopiedVerification) -> None:
        """Count what was copied of a step as held, and queue it."""
        with self._lock:
            self.held_bytes += step.copy.num_bytes
            self.queued_bytes += step.copy.num_bytes
            is_much = self.queued_bytes >= self._gathering.num_bytes
        self._queue.put(step)
        if is_much:
            self._urgent.set()

    def end(self, ticket: CaptureState, tokens: list[int]) -> None:
        """End a request; `tokens` are its prompt and answer, where it was not dropped."""
        self._queue.put(_End(ticket, tokens))
        self._urgent.set()

    def close(self, timeout_s: float) -> None:
        """Assemble what is queued and end."""
        self._queue.put(None)
        self._urgent.set()
        self._thread.join(timeout_s)

    # -- on the assembler's thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        """Process events until None comes. An error drops the traces concerned, counted, and no others."""
        if self._is_host:
            torch.set_num_threads(1)  # of this thread: SGLang's own computes beside it
        while self._take(self._gather()):
            pass

    def _gather(self) -> list[_Event]:
        """Wait for an event, then for more until a request ends, there is much, or the time is over."""
        gathered = [self._queue.get()]
        self._urgent.wait(self._gathering.seconds)
        self._urgent.clear()
        with contextlib.suppress(queue.Empty):
            while True:
                gathered.append(self._queue.get_nowait())
        return gathered

    def _take(self, gathered: Sequence[_Event]) -> bool:
        """Process events; returns False where None is among them."""
        for kind, alike in itertools.groupby(gathered, _kind_of):
            if kind is not None:
                self._take_verifications([event for event in alike if isinstance(event, CopiedVerification)])
                continue
            for event in alike:
                match event:
                    case Prefill():
                        self._take_prefill(event)
                    case _End():
                        with self._failing([event.ticket]):
                            self._take_end(event)
                        if event.ticket.dropped:
                            self.dropped[event.ticket.dropped] += 1
        return None not in gathered

    def _take_prefill(self, prefill: Prefill) -> None:
        with self._failing([ticket for ticket, _, _ in prefill.rows]):
            self._grow(list(prefilled(self._arrived([prefill]), prefill.rows)))

    def _take_verifications(self, alike: Sequence[CopiedVerification]) -> None:
        """Process verifications of one kind, in their order."""
        tickets = [ticket for verification in alike for ticket in verification.tickets]
        with self._failing(tickets):
            host = self._arrived(alike)
            counts = [count for verification in alike for count in verification.counts]
            sizes = [size for verification in alike for size in verification.sizes]
            num_nodes, draft_version, is_tree, _ = alike[0].kind
            trees = (host, tickets, counts, sizes)
            found = committed(*trees, num_nodes=num_nodes, draft_version=draft_version, is_tree=is_tree)
            self._grow(list(found))

    @contextlib.contextmanager
    def _failing(self, tickets: Sequence[CaptureState]) -> Iterator[None]:
        """On an error drop the traces of these tickets, and no others."""
        try:
            yield
        except Exception as error:
            for ticket in tickets:
                self._fail(ticket, error)

    def _arrived(self, steps: Sequence[Prefill | CopiedVerification]) -> Mapping[str, Tensor]:
        """Wait for copies and join them, logits reduced. From then on their bytes count as those of spans."""
        try:
            return joined([reduced(_copied(step), self._top_tokens) for step in steps])
        finally:
            num_bytes = sum(step.copy.num_bytes for step in steps)
            with self._lock:
                self.held_bytes -= num_bytes
                self.queued_bytes -= num_bytes

    def _grow(self, additions: Sequence[tuple[CaptureState, Rows, Rounds | None]]) -> None:
        num_bytes = 0
        for ticket, rows, rounds in additions:
            span = ticket.growing
            if span is None:
                continue
            self._spans.setdefault(ticket, span)
            before = span.num_bytes
            try:
                if rounds is not None:
                    span.add_rounds(rounds)
                span.add_rows(rows)
            except Exception as error:
                self._fail(ticket, error)
            num_bytes += span.num_bytes - before
        with self._lock:
            self.held_bytes += num_bytes
            is_full = not self.has_room
        if is_full:
            self._make_room()

    def _make_room(self) -> None:
        """Drop the newest spans: the oldest have cost most and end soonest."""
        for ticket, span in reversed(list(self._spans.items())):
            if self.held_share <= _ROOM:
                return
            ticket.dropped = ticket.dropped or "buffer_full"
            self._free(ticket, span)

    def _free(self, ticket: CaptureState, span: RequestSpan) -> None:
        self._spans.pop(ticket, None)
        with self._lock:
            self.held_bytes -= span.num_bytes
        span.clear()

    def _take_end(self, end: _End) -> None:
        ticket, span = end.ticket, end.ticket.span
        assert span is not None
        ticket.span = None
        if span.target_version != self.target_version:
            ticket.dropped = ticket.dropped or "target_moved"
        try:
            if not ticket.dropped:
                self._build(ticket, span, end.tokens)
        finally:
            self._free(ticket, span)

    def _build(self, ticket: CaptureState, span: RequestSpan, tokens: list[int]) -> None:
        started_s = time.perf_counter()
        trace = span.trace(tokens, self._origin)
        if trace is None:
            ticket.dropped = "nothing_computed"
            return
        num_drawn = sum(map(len, span.rejected))
        self.branch_rows.update(kept=trace.num_branches, cut=num_drawn - trace.num_branches)
        self._on_trace(trace)
        record(ticket.parent, "capture", time.perf_counter() - started_s, tokens=trace.num_tokens)

    def _fail(self, ticket: CaptureState, error: Exception) -> None:
        ticket.dropped = "inconsistent" if isinstance(error, InconsistentSpanError) else "failed"
        log.error("trace dropped, it could not be assembled", error=type_and_place(error))


def _copied(step: Prefill | CopiedVerification) -> dict[str, Tensor]:
    """Wait for a step's copy; of a verification select the captured requests."""
    host = step.copy.wait()
    if isinstance(step, CopiedVerification):
        trees = unpacked(host.pop("by_tree"), step.places)
        if len(step.indices) < len(trees["seq_lens"]):
            indices = torch.tensor(step.indices)
            trees = {name: tensor[indices] for name, tensor in trees.items()}
        host |= trees
    return host


def _kind_of(event: _Event) -> tuple[int, int, bool, bool] | None:
    return event.kind if isinstance(event, CopiedVerification) else None

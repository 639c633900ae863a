"""Hop 5 to 6: stream entries become examples, each trace once; an entry is acked when a checkpoint has used it.

    read ──▶ in hand ──▶ used ──▶ (durable checkpoint with its trace id) ──▶ acked
      └─▶ unusable: dead letter with the reason, acked at once

Redis delivers at least once. A trace id that a durable checkpoint lists is acked without learning from it again; so a
crash between checkpoint and ack applies nothing twice, and a crash before the checkpoint loses the step *and* leaves
its entries pending, to be learnt from again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import structlog

from speculator.codec import decode_trace
from speculator.errors import StreamError, TraceError
from speculator.stream import StreamEntry, TraceStream
from speculator.trace import Trace
from trainer.batch import Example
from trainer.metrics import TrainerMetrics

# Far more than can be pending at once, so that every redelivered trace is still known.
MAX_KNOWN_TRACES = 20_000
RETRY_S = 2.0

log = structlog.get_logger()


class TraceSource:
    """Reads one stream. Redis being away is not an error here: reads come back empty, acks wait, both are counted."""

    def __init__(
        self,
        stream: TraceStream,
        make_example: Callable[[Trace], Example],
        *,
        target_fingerprint: str,
        used_trace_ids: Iterable[str],
        metrics: TrainerMetrics,
    ) -> None:
        """`used_trace_ids` are those that the resumed checkpoint lists; `make_example` may raise TraceError."""
        self._stream = stream
        self._make_example = make_example
        self._fingerprint = target_fingerprint
        self._metrics = metrics
        # Insertion order is age. Trace ids that were used, or are in hand to be.
        self._known: dict[str, None] = dict.fromkeys(used_trace_ids)
        self._in_hand: dict[str, str] = {}  # trace id -> entry id
        self._settled: list[str] = []  # entry ids to ack after the next checkpoint
        self._unusable: dict[str, tuple[StreamEntry, str]] = {}
        self._retry_at_s = 0.0

    def read(self, count: int, block_ms: int) -> list[Example]:
        """Up to `count` new examples; waits up to `block_ms` for the first, or for Redis to come back."""
        if (pause_s := self._retry_at_s - time.monotonic()) > 0:
            time.sleep(min(pause_s, block_ms / 1000))
            return []
        try:
            entries = self._stream.read(count, block_ms)
        except StreamError as error:
            self._report("read", error)
            return []
        examples = [example for entry in entries if (example := self._admit(entry)) is not None]
        self._bury()
        return examples

    def mark_used(self, examples: Iterable[Example]) -> None:
        """A step has learnt from these, or has rejected them for good."""
        for example in examples:
            if (entry_id := self._in_hand.pop(example.trace_id, None)) is not None:
                self._settled.append(entry_id)

    @property
    def has_used(self) -> bool:
        """Some entries wait for a checkpoint."""
        return bool(self._settled)

    @property
    def used_trace_ids(self) -> list[str]:
        """What the next checkpoint must list, oldest first."""
        return [trace_id for trace_id in self._known if trace_id not in self._in_hand]

    def ack_used(self) -> None:
        """Call after a checkpoint that lists `used_trace_ids` is on disk."""
        try:
            self._stream.ack(self._settled)
            self._settled.clear()
            self._metrics.observe_lag(self._stream.lag())
        except StreamError as error:
            self._report("ack", error)

    def history(self, max_bytes: int) -> list[Example]:
        """Traces that were learnt from before a restart, oldest first, to fill the replay again."""
        try:
            entries = self._stream.recent(max_bytes)
        except StreamError as error:
            self._report("recent", error)
            return []
        examples = []
        for entry in entries:
            try:
                examples.append(self._decode(entry))
            except TraceError:
                continue  # a dead letter that the stream still holds; it was counted when it was set aside
        return examples

    def _admit(self, entry: StreamEntry) -> Example | None:
        try:
            example = self._decode(entry)
        except TraceError as error:
            self._unusable[entry.id] = (entry, str(error))
            return None
        if (entry_id := self._in_hand.get(example.trace_id)) is not None and entry_id == entry.id:
            return None  # delivered again after a read that failed half-way; it is in hand already
        if example.trace_id in self._known:
            self._settled.append(entry.id)
            self._metrics.traces.labels("duplicate").inc()
            return None
        self._known[example.trace_id] = None
        while len(self._known) > MAX_KNOWN_TRACES:
            del self._known[next(iter(self._known))]
        self._in_hand[example.trace_id] = entry.id
        self._metrics.observe_arrival(example.num_bases, entry.created_ms)
        return example

    def _decode(self, entry: StreamEntry) -> Example:
        trace = decode_trace(entry.payload)
        fingerprint = trace.header.target_fingerprint
        if fingerprint != self._fingerprint:
            raise TraceError(f"the trace is of target {fingerprint[:12]}, this trainer's is {self._fingerprint[:12]}")
        return self._make_example(trace)

    def _bury(self) -> None:
        for entry, reason in list(self._unusable.values()):
            try:
                self._stream.dead_letter(entry, reason)
            except StreamError as error:
                self._report("dead_letter", error)
                return
            del self._unusable[entry.id]
            self._metrics.traces.labels("dead_lettered").inc()
            log.warning("trace set aside", entry_id=entry.id, reason=reason)

    def _report(self, operation: str, error: StreamError) -> None:
        self._metrics.stream_errors.labels(operation).inc()
        self._retry_at_s = time.monotonic() + RETRY_S
        log.warning("stream unavailable", operation=operation, error=str(error), retry_s=RETRY_S)

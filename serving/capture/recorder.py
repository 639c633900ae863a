"""Record traces of finished generations in the trace stream, without ever blocking serving.

`submit` only queues. A thread of its own encodes and appends. While Redis is away the queue grows up to a bound in
bytes, the thread tries again with growing pauses, and the newest traces are dropped and counted.

`ErasureWatch` carries out orders to erase a tenant from what the engine keeps, queued traces and text, and drops text
that is too old.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from serving.capture.filter import FILTER_REASONS
from serving.capture.sampling import POLL_EVERY_S, SAMPLING_REASONS, CaptureSampler
from speculator.errors import StreamError, TraceError, type_and_place
from speculator.redis.client import LostTransactionError
from speculator.trace import Features, Trace, encode_trace

DROP_REASONS = (
    "buffer_full",
    "too_large",
    "invalid",
    "failed",
    "closed",
    "erased",
    "expired",
    "nothing_computed",
    *SAMPLING_REASONS,
    *FILTER_REASONS,
)
"""`too_large` for the buffer, the stream or Redis; `invalid` does not encode; `failed` is a bug; `erased` by order for
its tenant; `expired` is too old; `nothing_computed` teaches nothing; `sampled_…` Redis, trainer or buffer cannot take
all; the rest by the operator's filter.
"""
_MOST_LOST = 8
"""Attempts in a row at one trace in which Redis answers at first, and then not to the trace. It closes the connection
on a trace above its limit of a value, 512 MiB by default; and a slow one may never get it in time.
"""
log = structlog.get_logger(__name__)


class AppendStream(Protocol):
    """What the recorder needs of a `speculator.redis.trace_stream.TraceStream`."""

    max_bytes: int

    def append(self, payload: bytes, *, trace_id: str) -> str: ...


@dataclass(frozen=True, kw_only=True)
class RecorderStats:
    """Counts of traces since the start: captured == appended + sum of the dropped + pending, at every moment."""

    captured: int
    appended: int
    dropped_by_reason: Mapping[str, int]
    """By those of DROP_REASONS that occurred."""
    pending: int
    bytes_appended: int
    tokens_appended: int
    share: float = 1.0
    """The share of traces that sampling keeps now."""
    acked: int | None = None
    """As `CaptureSampler.num_acked`, of the whole stream; None without sampling."""

    @property
    def dropped(self) -> int:
        return sum(self.dropped_by_reason.values())


class TraceRecorder:
    """Takes traces from engine threads and appends them to the stream on a thread of its own.

    On this thread, too, `on_append` gets the number of bytes of each trace, the `sampler` looks and draws, and
    `reason_to_drop` says why a trace must not leave the process, or None. Traces older than `ttl_s` are dropped; 0 sets
    no limit.
    """

    def __init__(
        self,
        stream: AppendStream,
        *,
        max_buffer_bytes: int,
        features: Features = "float8",
        on_append: Callable[[int], None] | None = None,
        reason_to_drop: Callable[[Trace], str | None] | None = None,
        ttl_s: float = 0,
        sampler: CaptureSampler | None = None,
        retry_s: tuple[float, float] = (0.1, 5.0),
    ) -> None:
        """`retry_s` are the first and the longest pause before another attempt."""
        self._stream = stream
        self._max_buffer_bytes, self._on_append = max_buffer_bytes, on_append
        self._features = features
        self._reason_to_drop, self._ttl_s = reason_to_drop, ttl_s
        self._sampler, (self._first_retry_s, self._last_retry_s) = sampler, retry_s
        self._appending = threading.Lock()
        # Guarded by the condition: everything below.
        self._changed = threading.Condition()
        self._queue: collections.deque[Trace] = collections.deque()
        self._buffer_bytes = 0
        self._captured = self._appended = 0
        self._bytes_appended = self._tokens_appended = 0
        self._dropped: collections.Counter[str] = collections.Counter()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="trace-recorder", daemon=True)
        self._thread.start()

    def submit(self, trace: Trace) -> bool:
        """Queue a trace; never blocks on Redis. False when it was dropped, which `stats` counts by reason."""
        num_bytes = memory_bytes(trace)
        with self._changed:
            self._captured += 1
            if self._closing:
                reason = "closed"
            elif num_bytes > self._max_buffer_bytes:
                reason = "too_large"
            elif self._buffer_bytes + num_bytes > self._max_buffer_bytes:
                reason = "buffer_full"
            else:
                self._queue.append(trace)
                self._buffer_bytes += num_bytes
                self._changed.notify_all()
                return True
            self._dropped[reason] += 1
            return False

    def forget(self, tenants: Collection[str]) -> None:
        """Drop what is queued of these tenants. After it has returned, nothing of theirs that was submitted before is
        written.
        """
        with self._changed:
            gone = [trace for trace in self._queue if trace.header.tenant in tenants]
            self._queue = collections.deque(trace for trace in self._queue if trace.header.tenant not in tenants)
            self._buffer_bytes -= sum(map(memory_bytes, gone))
            if gone:
                self._dropped["erased"] += len(gone)
            self._changed.notify_all()
        with self._appending:
            pass

    def stats(self) -> RecorderStats:
        with self._changed:
            return RecorderStats(
                captured=self._captured,
                appended=self._appended,
                dropped_by_reason=dict(self._dropped),
                pending=len(self._queue),
                bytes_appended=self._bytes_appended,
                tokens_appended=self._tokens_appended,
                share=self._sampler.share if self._sampler is not None else 1.0,
                acked=self._sampler.num_acked if self._sampler is not None else None,
            )

    def close(self, timeout_s: float) -> None:
        """Append what is queued for up to `timeout_s`, count the rest as dropped, and refuse further traces."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        with self._changed:
            while self._queue:
                self._drop(self._queue[0], "closed")
            self._changed.notify_all()

    def _run(self) -> None:
        """Waits for traces, takes them in order, and ends when closed and empty. One bad trace never ends it."""
        while (trace := self._next()) is not None:
            try:
                self._record(trace)
            except TraceError as error:
                log.warning("trace dropped, it does not encode", trace_id=trace.header.trace_id, error=str(error))
                self._drop(trace, "invalid")
            except BaseException as error:
                # Also a panic in Rust, which is no Exception.
                log.error(
                    "trace dropped, recording it failed", trace_id=trace.header.trace_id, error=type_and_place(error)
                )
                self._drop(trace, "failed")

    def _next(self) -> Trace | None:
        """The first in the queue, None where it is empty and closed. While it waits the sampler goes on looking: where
        little comes, or little of it is followed, the next trace may be far away.
        """
        wait_s = None if self._sampler is None else POLL_EVERY_S
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._queue or self._closing, wait_s):
                    return self._queue[0] if self._queue else None
            if self._sampler is not None:
                self._sampler.poll_idle()

    def _record(self, trace: Trace) -> None:
        """Append one trace, however long Redis stays away, unless the recorder is closed meanwhile."""
        if self._sampler is not None:
            self._sampler.poll()
            if not self._sampler.keeps():
                self._drop(trace, self._sampler.reason)
                return
        if not trace.has_label:
            # As where a grammar or a bias changed the whole answer: the trainer would refuse it.
            self._drop(trace, "nothing_computed")
            return
        if self._reason_to_drop is not None and (reason := self._reason_to_drop(trace)) is not None:
            self._drop(trace, reason)
            return
        payload = encode_trace(trace, features=self._features)
        pause_s, num_lost = self._first_retry_s, 0
        while self._is_pending(trace):
            if self._ttl_s and time.time() - trace.header.created_ms / 1000 > self._ttl_s:
                self._drop(trace, "expired")
                return
            try:
                with self._appending:
                    self._append(trace, payload)
                return
            except StreamError as error:
                num_lost = num_lost + 1 if isinstance(error, LostTransactionError) else 0
                if num_lost == _MOST_LOST:
                    log.warning("trace dropped, Redis never takes it", num_bytes=len(payload), error=str(error))
                    self._drop(trace, "too_large")
                    return
                log.warning("cannot record traces for now", error=str(error), retry_in_s=round(pause_s, 1))
            pause_s = self._pause(pause_s)

    def _append(self, trace: Trace, payload: bytes) -> None:
        if not self._is_pending(trace):
            return
        if len(payload) > self._stream.max_bytes:
            self._drop(trace, "too_large")
            return
        self._stream.append(payload, trace_id=trace.header.trace_id)
        with self._changed:
            if self._release(trace):
                self._appended += 1
                self._bytes_appended += len(payload)
                self._tokens_appended += trace.num_tokens
        if self._on_append is not None:
            self._on_append(len(payload))

    def _pause(self, pause_s: float) -> float:
        """Wait before the next attempt and return the pause after that; closing makes the next attempt immediate."""
        with self._changed:
            closing = self._closing
            if self._changed.wait_for(lambda: self._closing != closing or not self._queue, pause_s):
                return self._first_retry_s
        return min(2 * pause_s, self._last_retry_s)

    def _is_pending(self, trace: Trace) -> bool:
        with self._changed:
            return bool(self._queue) and self._queue[0] is trace

    def _drop(self, trace: Trace, reason: str) -> None:
        with self._changed:
            if self._release(trace):
                self._dropped[reason] += 1

    def _release(self, trace: Trace) -> bool:
        """Take the first trace off the queue; False when closing has counted it as dropped already."""
        if not self._is_pending(trace):
            return False
        self._queue.popleft()
        self._buffer_bytes -= memory_bytes(trace)
        return True


def memory_bytes(trace: Trace) -> int:
    """Bytes that the arrays of a trace take in memory."""
    of_tokens = (trace.token_ids, trace.target_topk_ids, trace.target_topk_logprobs, trace.constrained)
    of_arrays = sum(array.nbytes for array in (*of_tokens, *vars(trace.rounds).values()))
    of_branches = 0 if trace.branches is None else trace.branches.num_bytes
    num_bytes: int = trace.aux_hidden.nbytes + of_arrays + of_branches
    return num_bytes


Forget = Callable[[Collection[str]], None]
"""Drops everything that is kept of these tenants; returns when it is done."""


class ErasureWatch:
    """Carries out orders to erase tenants (speculator/redis/trace_deletion.py). `poll` is called with every report of
    the engine, on its thread.

    It erases all of a tenant that is here when the order arrives, whenever it was made.
    """

    def __init__(
        self,
        orders: Callable[[], Mapping[str, int]],
        forget: Sequence[Forget],
        *,
        expire: Callable[[], None] = lambda: None,
    ) -> None:
        """`expire` drops what is too old."""
        self._orders, self._forget, self._expire = orders, forget, expire
        self._done: Mapping[str, int] = {}
        self._is_away = False

    def poll(self) -> dict[str, str | int | float]:
        """Carry out new orders; returns the time of the newest one, for the engine's report. Redis may be away."""
        self._expire()
        try:
            orders = self._orders()
        except StreamError as error:
            if not self._is_away:
                log.warning("orders to erase tenants cannot be read for now", error=str(error))
            self._is_away = True
        else:
            self._is_away = False
            if tenants := {tenant for tenant, at_ms in orders.items() if self._done.get(tenant) != at_ms}:
                for forget in self._forget:
                    forget(tenants)
            self._done = orders
        return {"erased_ms": self.erased_ms}

    @property
    def erased_ms(self) -> int:
        """Time of the newest order that was carried out; 0 for none."""
        return max(self._done.values(), default=0)

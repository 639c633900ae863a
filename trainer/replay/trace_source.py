"""Reads traces from the stream, each once, and keeps copies on disk; acks an entry when a checkpoint lists its trace.

    read ──▶ in hand ──▶ used, or set aside ──▶ (durable checkpoint with its trace id) ──▶ acked
      └─▶ unusable: dead letter with the reason, acked at once

Redis delivers at least once. A trace id that a durable checkpoint lists is acked without learning from it again. So a
crash between checkpoint and ack applies nothing twice. A crash before the checkpoint loses the step and leaves its
entries pending, to be learnt from again.

Several ranks read one consumer group, each as a consumer of its own (`consumer_name`), so each entry goes to one of
them. All share one checkpoint. A trace id that a producer sent twice between two checkpoints may reach two ranks, and
is then learnt from twice.

**On disk** (`TraceFiles`) lies one file a trace beside the checkpoint. It is written when the trace arrives, synced
before the checkpoint that lists it, and removed when a checkpoint no longer does. So every trace that the last
checkpoint lists is there after a kill or a power cut, whatever Redis has trimmed. A file that cannot be written is no
failure: the trace may still be in the stream after a restart.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

import structlog

from speculator.errors import StoreError, StreamError, TraceError
from speculator.host import sync
from speculator.redis.trace_stream import StreamEntry, TraceStream
from speculator.trace import Trace, decode_trace
from trainer.learning.batch import Example
from trainer.metrics import TrainerMetrics
from trainer.replay.reservoirs import Provenance, Stored, provenance_of

RETRY_S = 2.0
_NUM_TAKEN_OVER = 16
"""Entries to claim in one call, since Redis returns their payloads."""
log = structlog.get_logger()


class _OtherTargetError(TraceError):
    """The trace is of another model, or of other weights, than this trainer's target."""


def consumer_name(rank: int) -> str:
    """This rank's consumer in Redis; the same after every restart, so that it gets its pending entries again."""
    return f"trainer-{rank}"


class TraceSource:
    """Reads one trace stream. Without Redis it raises nothing: reads return no trace, acks wait, both are counted."""

    def __init__(
        self,
        stream: TraceStream,
        make_example: Callable[[Trace], Example],
        *,
        target_fingerprint: str,
        used_trace_ids: Iterable[str],
        trace_files: TraceFiles,
        metrics: TrainerMetrics,
        max_known: int = 20_000,
        reason_to_forget: Callable[[Provenance], str | None] = lambda _: None,
        has_refused: bool = False,
        retry_s: float = RETRY_S,
    ) -> None:
        """`used_trace_ids` are those that the resumed checkpoint lists; `make_example` may raise TraceError. Arriving
        traces are written to the `trace_files`, from which the caller removes them. A trace with a `reason_to_forget`
        is acked unused; `has_refused`: an earlier process may have left such traces in the stream. Duplicates are
        recognised among the last `max_known` traces.
        """
        self._stream = stream
        self._make_example = make_example
        self._fingerprint = target_fingerprint
        self._trace_files = trace_files
        self._metrics = metrics
        self._max_known, self._reason_to_forget, self._retry_s = max_known, reason_to_forget, retry_s
        self.has_refused = has_refused
        """Traces of an erased tenant arrived and are still in the stream. (Expired ones leave it without us.)"""
        # Trace ids that were used or are in hand, oldest first.
        self._known: dict[str, None] = dict.fromkeys(used_trace_ids)
        self._in_hand: dict[str, str] = {}  # trace id -> entry id
        self._settled: list[str] = []  # entry ids to ack after the next checkpoint
        self._unusable: dict[str, tuple[StreamEntry, str]] = {}
        self._wanted: set[str] = set()  # what `history` did not find; it may be pending
        self._found: list[Stored] = []
        self._retry_at_s = 0.0

    def take_over(self) -> None:
        """Claim the pending entries of all consumers, so that `read` returns them first: after a restart with fewer
        ranks some consumers do not come back. Call on one rank only, and before any rank reads.
        """
        start_s = time.monotonic()
        try:
            # The least idle time is longer than this loop has run, so no entry is claimed twice.
            while self._stream.reclaim(int(1000 * (time.monotonic() - start_s)) + 2, _NUM_TAKEN_OVER):
                pass
        except StreamError as error:
            self._report("take_over", error)

    def read(self, count: int, block_ms: int) -> list[Stored]:
        """Up to `count` new traces; waits up to `block_ms` for the first, or for Redis to come back."""
        if (pause_s := self._retry_at_s - time.monotonic()) > 0:
            time.sleep(min(pause_s, block_ms / 1000))
            return []
        try:
            entries = self._stream.read(count, block_ms)
        except StreamError as error:
            self._report("read", error)
            return []
        traces = [stored for entry in entries if (stored := self._admit(entry)) is not None]
        self._dead_letter_unusable()
        return traces

    def pop_found(self) -> list[Stored]:
        """Traces that `history` wanted and did not find, because they were still pending, and that `read` got since."""
        found, self._found = self._found, []
        return found

    def mark_used(self, traces: Iterable[Stored]) -> None:
        """Let `ack_used` ack these: a step has used them, or they need none, or the next checkpoint lists them."""
        for stored in traces:
            if (entry_id := self._in_hand.pop(stored.trace_id, None)) is not None:
                self._settled.append(entry_id)

    def swept(self) -> None:
        """Note that the stream holds no trace of an erased tenant."""
        self.has_refused = False

    @property
    def unused_trace_ids(self) -> Collection[str]:
        """Traces that no step has learnt from yet."""
        return self._in_hand.keys()

    @property
    def has_used(self) -> bool:
        """Some entries wait for a checkpoint to be acked."""
        return bool(self._settled)

    @property
    def used_trace_ids(self) -> list[str]:
        """What the next checkpoint must list, oldest first."""
        return [trace_id for trace_id in self._known if trace_id not in self._in_hand]

    def ack_used(self) -> None:
        """Ack the used entries; call after a checkpoint that lists `used_trace_ids` is on disk."""
        try:
            self._stream.ack(self._settled)
            self._settled.clear()
        except StreamError as error:
            self._report("ack", error)
            return
        self.observe_lag()

    def observe_lag(self) -> None:
        """Read the stream's length, backlog and losses into the metrics."""
        try:
            self._metrics.observe_lag(self._stream.lag())
        except StreamError as error:
            self._report("lag", error)

    def history(self, wanted: Collection[str] | None = None) -> Iterator[Stored]:
        """Traces that were learnt from before a restart, to fill the replay again: the `wanted` trace ids in their
        order, as far as the shelf has them, then those of the stream; without `wanted` all of the latter, oldest first.
        """
        self._wanted = set(wanted or ())
        for trace_id in wanted or ():
            payload = self._trace_files.take_over(trace_id)
            if payload is not None and (stored := self._decode_again(payload)) is not None:
                self._wanted.discard(trace_id)
                yield stored
        if wanted is not None and not self._wanted:
            return
        try:
            entries = self._stream.recent(self._stream.max_bytes)
        except StreamError as error:
            self._report("recent", error)
            return
        for entry in entries:
            if wanted is not None and entry.trace_id not in self._wanted:
                continue
            if (stored := self._decode_again(entry.payload)) is not None:
                self._wanted.discard(stored.trace_id)
                self._trace_files.put(stored.trace_id, entry.payload)
                yield stored

    def _admit(self, entry: StreamEntry) -> Stored | None:
        try:
            stored = self._decode(entry.payload)
        except TraceError as error:
            self._unusable[entry.id] = (entry, str(error))
            self._metrics.other_target.inc(isinstance(error, _OtherTargetError))
            return None
        trace_id = stored.trace_id
        if (entry_id := self._in_hand.get(trace_id)) is not None and entry_id == entry.id:
            return None  # redelivered after a read that failed half-way
        if trace_id in self._known:
            self._settled.append(entry.id)
            self._metrics.traces.labels("duplicate").inc()
            if trace_id in self._wanted and self._reason_to_forget(stored.provenance) is None:
                self._wanted.remove(trace_id)
                self._trace_files.put(trace_id, entry.payload)
                self._found.append(stored)
            return None
        if (reason := self._reason_to_forget(stored.provenance)) is not None:
            self.has_refused |= reason == "erased"
            self._settled.append(entry.id)
            self._metrics.traces.labels(reason).inc()
            return None
        self._known[trace_id] = None
        while len(self._known) > self._max_known:
            del self._known[next(iter(self._known))]
        self._metrics.known_traces.set(len(self._known))
        self._in_hand[trace_id] = entry.id
        self._trace_files.put(trace_id, entry.payload)
        self._metrics.observe_arrival(stored.num_bases, entry.created_ms)
        return stored

    def _decode_again(self, payload: bytes) -> Stored | None:
        try:
            stored = self._decode(payload)
        except TraceError:
            return None  # a dead letter that the stream still holds and that was counted, or a damaged file
        if self._reason_to_forget(stored.provenance) is None:
            return stored
        self._trace_files.remove([stored.trace_id])
        return None

    def _decode(self, payload: bytes) -> Stored:
        trace = decode_trace(payload)
        fingerprint = trace.header.target_fingerprint
        if fingerprint != self._fingerprint:
            raise _OtherTargetError(
                f"the trace is of target {fingerprint[:12]}, this trainer's target is {self._fingerprint[:12]}"
            )
        return Stored(example=self._make_example(trace), provenance=provenance_of(trace))

    def _dead_letter_unusable(self) -> None:
        unusable = list(self._unusable.values())
        for entry, reason in unusable:
            try:
                self._stream.dead_letter(entry, reason)
            except StreamError as error:
                self._report("dead_letter", error)
                return
            del self._unusable[entry.id]
            self._metrics.traces.labels("dead_lettered").inc()
            log.warning("trace set aside", entry_id=entry.id, reason=reason)
        if unusable:
            # Where only unusable traces come, no checkpoint follows that would update the metrics.
            self.observe_lag()

    def _report(self, operation: str, error: StreamError) -> None:
        self._metrics.stream_errors.labels(operation).inc()
        self._retry_at_s = time.monotonic() + self._retry_s
        log.warning("stream unavailable", operation=operation, error=str(error), retry_s=self._retry_s)


_SUFFIX = ".trace"
TEMPORARY = ".tmp"
"""Suffix of a file that is being written."""


def trace_folder(state_dir: Path) -> Path:
    """The folder of a trainer's trace files."""
    return state_dir / "replay"


class TraceFiles:
    """Trace files on disk, which outlive a restart. Several processes may share the folder; each removes only files
    that it wrote or took over.
    """

    def __init__(self, folder: Path, sync: Callable[[Path], None] = sync) -> None:
        """`sync` flushes a file or a folder to disk."""
        self._folder, self._sync = folder, sync
        self._own: dict[str, None] = {}
        self._unsynced: set[str] = set()

    def put(self, trace_id: str, payload: bytes) -> None:
        """Write an encoded trace; it may be lost in a power cut until `sync`."""
        path = self._path(trace_id)
        temporary = path.with_suffix(f".{os.getpid()}{TEMPORARY}")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary.write_bytes(payload)
            temporary.rename(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            log.warning("a trace will not survive a restart", folder=str(self._folder), error=str(error))
            return
        self._own[trace_id] = None
        self._unsynced.add(trace_id)

    def sync(self, trace_ids: Collection[str]) -> None:
        """Flush those of these traces that are new to disk; call before a checkpoint that lists them."""
        new = self._unsynced & set(trace_ids)
        try:
            for trace_id in new:
                # `slipstream tenants erase` may have removed it meanwhile.
                with contextlib.suppress(FileNotFoundError):
                    self._sync(self._path(trace_id))
            if new:
                self._sync(self._folder)
        except OSError as error:
            log.warning(
                "traces not flushed to disk, a power cut may lose them; retried",
                folder=str(self._folder),
                error=str(error),
            )
            return
        self._unsynced -= new

    def take_over(self, trace_id: str) -> bytes | None:
        """The encoded trace that an earlier process wrote, which this one now owns; None where there is none."""
        try:
            payload = self._path(trace_id).read_bytes()
        except OSError:
            return None
        self._own[trace_id] = None
        return payload

    def keep(self, trace_ids: Collection[str]) -> None:
        """Remove all of this process's traces but these; call after a checkpoint that lists these is on disk."""
        self.remove([trace_id for trace_id in self._own if trace_id not in trace_ids])

    def remove(self, trace_ids: Iterable[str]) -> None:
        """Remove these traces, whichever process wrote them. Raises StoreError."""
        for trace_id in trace_ids:
            try:
                self._path(trace_id).unlink(missing_ok=True)
            except OSError as error:
                raise StoreError(
                    f"cannot remove traces in {self._folder} ({error.strerror}): give that folder to the trainer's user"
                ) from error
            self._unsynced.discard(trace_id)
            self._own.pop(trace_id, None)

    def sweep(self, trace_ids: Collection[str]) -> None:
        """Remove all files but those of these traces. Call at the start, while no process writes here."""
        kept = {self._path(trace_id).name for trace_id in trace_ids}
        for path in self._folder.glob("*") if self._folder.is_dir() else ():
            if path.name not in kept:
                # NFS keeps a file that another process has open, under a name that cannot be removed.
                with contextlib.suppress(OSError):
                    path.unlink()

    def _path(self, trace_id: str) -> Path:
        # Hashed: a producer may send any text as a trace id.
        return self._folder / (hashlib.blake2b(trace_id.encode(), digest_size=16).hexdigest() + _SUFFIX)

"""Erase a tenant: orders that every trainer carries out, and removal of traces from the stream or from a recording.

Redis deletes by id. Where an entry has a node of its own in the stream's tree its bytes are free at once: so is every
entry of 4 KiB or more, and every entry where `stream-node-max-entries` is 1, as our Redis servers have it. What Redis
has on disk still holds the entry until its append-only file is rewritten (`compact`).

A recording is rewritten beside the old one, without those traces, and put in its place.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import redis
from redis.exceptions import ResponseError

from speculator.errors import ConfigError, StreamError, TraceError
from speculator.host import now_ms, sync
from speculator.recording import RecordingReader, RecordingWriter
from speculator.redis.client import RedisKeys, redis_errors
from speculator.redis.stream_accounting import LAST_ID, Ledger, index_of, member_of, size_member
from speculator.trace import TraceHeader, read_header

TRAINER_TTL_S = 120.0
"""A trainer that has not reported for so long is taken to have stopped; a step, or a gate, takes less."""


class TrainerReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one trainer process says about itself."""

    at_ms: int
    erased_ms: int
    """Time of the newest order that it has carried out; 0 for none."""
    removed: dict[str, int] = {}
    """Traces that it has removed for orders since its start, by tenant."""


class Erasures:
    """One model's orders."""

    def __init__(self, client: redis.Redis, model_key: str) -> None:
        self._redis: Any = client
        keys = RedisKeys(model_key=model_key)
        self._orders, self._trainers = keys.erasures, keys.trainers

    @redis_errors
    def order(self, tenant: str) -> int:
        """From now on everything of this tenant up to now is to be forgotten; returns the order's time, unique."""
        newest = max(self.orders().values(), default=0)
        at_ms = max(now_ms(), newest + 1)
        self._redis.hset(self._orders, tenant, at_ms)
        return at_ms

    @redis_errors
    def orders(self) -> dict[str, int]:
        """Time of the order in milliseconds by tenant."""
        try:
            return {tenant.decode(): int(at_ms) for tenant, at_ms in self._redis.hgetall(self._orders).items()}
        except ValueError as error:
            raise _none_of_ours(self._orders, error) from error

    @redis_errors
    def report(self, trainer: str, report: TrainerReport) -> None:
        self._redis.hset(self._trainers, trainer, msgspec.json.encode(report))

    @redis_errors
    def leave(self, trainer: str) -> None:
        """The trainer has stopped."""
        self._redis.hdel(self._trainers, trainer)

    @redis_errors
    def trainers(self) -> dict[str, TrainerReport]:
        """Those that run, as far as can be told."""
        since_ms = now_ms() - int(1000 * TRAINER_TTL_S)
        try:
            found = {
                name.decode(): msgspec.json.decode(report, type=TrainerReport)
                for name, report in self._redis.hgetall(self._trainers).items()
            }
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise _none_of_ours(self._trainers, error) from error
        return {name: report for name, report in found.items() if report.at_ms >= since_ms}


def _none_of_ours(key: str, error: Exception) -> StreamError:
    return StreamError(f"somebody else has written to {key} in Redis ({error}): remove what is none of ours")


def covers(orders: Mapping[str, int], tenant: str, created_ms: int) -> bool:
    """Whether a trace is one of those to be forgotten."""
    return created_ms <= orders.get(tenant, -1)


_CHUNK = 8
_COMPACT_TIMEOUT_S = 120.0
Chosen = Callable[[TraceHeader], bool]


@dataclass(frozen=True, kw_only=True)
class Removed:
    """Entries that went, or would go. What cannot be read may be anybody's, and goes too."""

    stream: int = 0
    dead_letters: int = 0
    unreadable: int = 0
    """Of both together."""


class Remover:
    """One model's stream and dead letters."""

    def __init__(self, client: redis.Redis, model_key: str, *, group: str = "trainer") -> None:
        self._redis: Any = client
        self._keys = RedisKeys(model_key=model_key)
        self._group = group
        self._ledger = Ledger(client, self._keys, group, max_bytes=0)

    @redis_errors
    def remove(self, chosen: Chosen, *, unreadable: bool = True, dry_run: bool = False) -> Removed:
        """Remove every trace whose header is chosen and, with `unreadable`, what has no readable header.

        Raises StreamError.

        Safe to kill and to repeat: each few entries go in one transaction with their books.
        """
        counts = {"stream": 0, "dead_letters": 0, "unreadable": 0}
        for rows in self._chunks(self._keys.traces):
            taken = [row for row in rows if _goes(row[1], chosen, counts, unreadable)]
            counts["stream"] += len(taken)
            if taken and not dry_run:
                self._take_out(taken)
        for rows in self._chunks(self._keys.dead_letters):
            ids = [entry_id for entry_id, fields in rows if _goes(fields, chosen, counts, unreadable)]
            counts["dead_letters"] += len(ids)
            if ids and not dry_run:
                self._redis.xdel(self._keys.dead_letters, *ids)
        return Removed(**counts)

    @redis_errors
    def compact(self) -> bool:
        """Have Redis rewrite its append-only file, and wait: what was removed is then off its disk, too.

        False where this user may not ask for it. Raises StreamError where it does not end. Without an append-only
        file there is nothing to do.
        """
        try:
            if not self._persistence()["aof_enabled"]:
                return True
            self._begin_rewrite()
        except redis.exceptions.NoPermissionError:
            return False
        deadline = time.monotonic() + _COMPACT_TIMEOUT_S
        while (state := self._persistence())["aof_rewrite_in_progress"] or state["aof_rewrite_scheduled"]:
            if time.monotonic() > deadline:
                raise redis.exceptions.TimeoutError(f"the append-only file took more than {_COMPACT_TIMEOUT_S:.0f} s")
            time.sleep(0.02)
        if state["aof_last_bgrewrite_status"] != "ok":
            raise redis.exceptions.ResponseError("the append-only file could not be rewritten")
        return True

    def _persistence(self) -> dict[str, Any]:
        state: dict[str, Any] = self._redis.info("persistence")
        return state

    def _begin_rewrite(self) -> None:
        deadline = time.monotonic() + _COMPACT_TIMEOUT_S
        while True:
            try:
                self._redis.bgrewriteaof()
                return
            except redis.exceptions.NoPermissionError:
                raise
            except ResponseError:
                # One that is under way has perhaps copied already what was removed since: another must follow it.
                pass
            if time.monotonic() > deadline:
                raise redis.exceptions.TimeoutError("another rewrite of the append-only file does not end")
            time.sleep(0.02)

    def _chunks(self, key: str) -> Iterator[list[Any]]:
        start = "-"
        while start != f"({LAST_ID}" and (rows := self._redis.xrange(key, min=start, count=_CHUNK)):
            yield rows
            start = f"({rows[-1][0].decode()}"

    def _take_out(self, rows: Sequence[tuple[bytes, Mapping[bytes, bytes]]]) -> None:
        """In one transaction, with what is expected in the books; corrected by what the transaction found.

        A correction comes where the trainer took, or somebody trimmed, one of these entries in the milliseconds between
        the look and the transaction. Killed between both, `bytes` and `erased` stay off by those few; nothing of
        the tenant stays. WATCH would close that gap and never succeed on a stream that others append to all the time.
        """
        keys = self._keys
        members = [member_of(fields) or b"" for _, fields in rows]
        sizes = [len(fields.get(b"payload", b"")) for _, fields in rows]
        expected = sum(map(self._ledger.is_open, members))
        with self._redis.pipeline(transaction=True) as transaction:
            for (entry_id, fields), member, size in zip(rows, members, sizes, strict=True):
                index = index_of(fields)
                transaction.xack(keys.traces, self._group, entry_id)
                # An entry of another client is in no book.
                transaction.lrem(keys.sizes, 1, size_member(size, -1 if index is None else index))
                transaction.zrem(keys.open, member)
            transaction.xdel(keys.traces, *(entry_id for entry_id, _ in rows))
            transaction.hincrby(keys.accounts, "bytes", -sum(sizes))
            transaction.hincrby(keys.accounts, "erased", expected)
            results = transaction.execute()
        listed, closed = results[1 : 3 * len(rows) : 3], results[2 : 3 * len(rows) : 3]
        # Others have trimmed, and counted, what the list of sizes does not hold any more.
        missing = sum(size for size, found in zip(sizes, listed, strict=True) if not found)
        for field, difference in (("bytes", missing), ("erased", sum(closed) - expected)):
            if difference:
                self._redis.hincrby(keys.accounts, field, difference)


def _goes(fields: Mapping[bytes, bytes], chosen: Chosen, counts: dict[str, int], unreadable: bool) -> bool:
    try:
        return chosen(read_header(fields.get(b"payload", b"")))
    except TraceError:
        counts["unreadable"] += unreadable
        return unreadable


@dataclass(frozen=True, kw_only=True)
class Rewritten:
    """Traces of one file. What cannot be read may be anybody's, and goes too."""

    removed: int
    kept: int
    unreadable: int
    """Of those removed."""
    cut_bytes: int
    """Bytes at the end that were no whole entry; they go, too."""


def remove_from_recording(path: Path, chosen: Chosen, *, dry_run: bool = False) -> Rewritten:
    """Remove every trace whose header is chosen; the file is left as it is where there is none.

    Safe to kill and to repeat. Nobody may record into the file meanwhile. Raises ConfigError where it is no recording
    or cannot be written.
    """
    found = _look(path, chosen)
    if dry_run or not (found.removed or found.cut_bytes):
        return found
    temporary = path.with_name(f".{path.name}.rewritten")
    try:
        temporary.unlink(missing_ok=True)
        with RecordingReader(path) as reader, RecordingWriter(temporary, reader.header) as writer:
            for payload in reader.payloads():
                if (trace_id := _kept_id(payload, chosen)) is not None:
                    writer.append(payload, trace_id=trace_id)
        os.chmod(temporary, path.stat().st_mode)
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        raise ConfigError(f"cannot write {path} anew ({error.strerror}): check its folder") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return found


def _look(path: Path, chosen: Chosen) -> Rewritten:
    num_unreadable = num_chosen = num_kept = 0
    with RecordingReader(path) as reader:
        for payload in reader.payloads():
            try:
                if chosen(read_header(payload)):
                    num_chosen += 1
                else:
                    num_kept += 1
            except TraceError:
                num_unreadable += 1
        num_unreadable += reader.num_damaged
        return Rewritten(
            removed=num_chosen + num_unreadable,
            kept=num_kept,
            unreadable=num_unreadable,
            cut_bytes=reader.num_cut_bytes,
        )


def _kept_id(payload: bytes, chosen: Chosen) -> str | None:
    try:
        header = read_header(payload)
    except TraceError:
        return None
    return None if chosen(header) else header.trace_id

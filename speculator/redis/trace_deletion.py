"""Erase a tenant: orders that all services execute, and removal of traces from the stream or from a recording.

Redis deletes by id. A deleted entry's bytes are freed at once if the entry has its own node in the stream's tree: from
4 KiB, or always with `stream-node-max-entries` 1, as in our Redis servers. The append-only file on disk still has the
entry until it is rewritten (`compact`).

A recording is rewritten to a new file without those traces, which replaces the old one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import redis
from redis.exceptions import ResponseError

from speculator.errors import ConfigError, StreamError, TraceError
from speculator.host import replacing
from speculator.recording import RecordingReader, RecordingWriter
from speculator.redis.client import RedisKeys, ServerInfo, redis_errors, until_unraced
from speculator.redis.stream_accounting import LAST_ID, StreamAccounts, index_of, member_of, size_member
from speculator.trace import TraceHeader, read_header

TRAINER_TTL_S = 120.0
"""A trainer that has not reported for so long counts as stopped; a step, or a gate, takes less. It reports during a
rest, too."""
GATEWAY_TTL_S = 30.0
"""The same for a gateway."""
_MAX_GATEWAY_REPORTS = 4096
_ATTEMPTS = 5


class TrainerReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of one trainer process on erasure orders."""

    at_ms: int = 0
    """By Redis's clock; `ErasureOrders.report` sets it."""
    erased_ms: int
    """Time of the newest order that it has executed; 0 for none."""
    removed: dict[str, int] = {}
    """Traces that it has removed since its start, by tenant."""


class ErasureOrders:
    """Erasure orders for one model's services, and reports of its trainers and gateways."""

    def __init__(self, client: redis.Redis, model_key: str) -> None:
        self._redis: Any = client
        self._server = ServerInfo(client)
        keys = RedisKeys(model_key=model_key)
        self._orders, self._trainers, self._gateways = keys.erasures, keys.trainers, keys.gateways

    @redis_errors
    def time_ms(self) -> int:
        """The time by Redis's clock, as of `ServerInfo`."""
        return self._server.time_ms()

    @redis_errors
    def order(self, tenant: str) -> int:
        """Order that everything of this tenant up to now is erased; returns the order's time, which is unique."""

        def once() -> int:
            with self._redis.pipeline(transaction=True) as transaction:
                # Else an order made at the same time could get a later one, and a report of it would pass for this one.
                transaction.watch(self._orders)
                newest = max(self.orders().values(), default=0)
                # Not by this machine's clock: one that is ahead would also erase what tenants send in the time to come.
                at_ms = max(self._server.time_ms(), newest + 1)
                transaction.multi()
                transaction.hset(self._orders, tenant, at_ms)
                transaction.execute()
                return at_ms

        return until_unraced(once, attempts=_ATTEMPTS, what=self._orders)

    @redis_errors
    def orders(self) -> dict[str, int]:
        """Time of each order in milliseconds, by tenant."""
        try:
            return {tenant.decode(): int(at_ms) for tenant, at_ms in self._redis.hgetall(self._orders).items()}
        except ValueError as error:
            raise _foreign_data(self._orders, error) from error

    @redis_errors
    def report(self, trainer: str, report: TrainerReport) -> None:
        report = msgspec.structs.replace(report, at_ms=self._server.time_ms())
        self._redis.hset(self._trainers, trainer, msgspec.json.encode(report))

    @redis_errors
    def remove_report(self, trainer: str) -> None:
        """Remove the report of a trainer that stops."""
        self._redis.hdel(self._trainers, trainer)

    @redis_errors
    def trainers(self) -> dict[str, TrainerReport]:
        """Reports of the trainers that run: those that reported within TRAINER_TTL_S."""
        since_ms = self._server.time_ms() - int(1000 * TRAINER_TTL_S)
        try:
            found = {
                name.decode(): msgspec.json.decode(report, type=TrainerReport)
                for name, report in self._redis.hgetall(self._trainers).items()
            }
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise _foreign_data(self._trainers, error) from error
        return {name: report for name, report in found.items() if report.at_ms >= since_ms}

    @redis_errors
    def report_gateway(self, gateway: str, erased_ms: int) -> None:
        """Report the time of the newest order that a gateway has executed; 0 for none."""
        # A stream: for a hash the gateway's user would need HSET, by which it could order to erase a tenant.
        self._redis.xadd(self._gateways, {"gateway": gateway, "erased_ms": erased_ms}, maxlen=_MAX_GATEWAY_REPORTS)

    @redis_errors
    def gateways(self) -> dict[str, int]:
        """What each gateway last reported, by its name; only those that reported within GATEWAY_TTL_S."""
        rows = self._redis.xrange(self._gateways, min=self._server.time_ms() - int(1000 * GATEWAY_TTL_S))
        try:
            return {fields[b"gateway"].decode(): int(fields[b"erased_ms"]) for _, fields in rows}
        except (KeyError, ValueError) as error:
            raise _foreign_data(self._gateways, error) from error


def _foreign_data(key: str, error: Exception) -> StreamError:
    return StreamError(f"another client has written to {key} in Redis ({error}): remove its entries")


def covers(orders: Mapping[str, int], tenant: str, created_ms: int) -> bool:
    """Whether an order covers a trace of this tenant and time."""
    return created_ms <= orders.get(tenant, -1)


_CHUNK = 8
_COMPACT_TIMEOUT_S = 120.0
Chosen = Callable[[TraceHeader], bool]


@dataclass(frozen=True, kw_only=True)
class Removed:
    """Counts of removed entries, or in a dry run of those to remove. Unreadable ones are removed too: they may be any
    tenant's.
    """

    stream: int = 0
    dead_letters: int = 0
    unreadable: int = 0
    """Unreadable entries among both."""


class TraceRemover:
    """Removes traces from one model's stream and dead letters."""

    def __init__(self, client: redis.Redis, model_key: str, *, group: str = "trainer") -> None:
        self._redis: Any = client
        self._keys = RedisKeys(model_key=model_key)
        self._group = group
        self._accounts = StreamAccounts(client, self._keys, group, max_bytes=0)

    @redis_errors
    def remove(self, chosen: Chosen, *, unreadable: bool = True, dry_run: bool = False) -> Removed:
        """Remove every trace whose header is chosen and, with `unreadable`, entries without a readable header.

        Raises StreamError.

        May be killed and repeated: each transaction removes a few entries and updates the accounts.
        """
        counts = {"stream": 0, "dead_letters": 0, "unreadable": 0}
        for rows in self._chunks(self._keys.traces):
            taken = [row for row in rows if _is_chosen(row[1], chosen, counts, unreadable)]
            counts["stream"] += len(taken)
            if taken and not dry_run:
                self._remove_entries(taken)
        for rows in self._chunks(self._keys.dead_letters):
            ids = [entry_id for entry_id, fields in rows if _is_chosen(fields, chosen, counts, unreadable)]
            counts["dead_letters"] += len(ids)
            if ids and not dry_run:
                self._redis.xdel(self._keys.dead_letters, *ids)
        return Removed(**counts)

    @redis_errors
    def compact(self) -> bool:
        """Have Redis rewrite its append-only file, and wait: so removed entries are gone from its disk, too.

        Returns False where Redis refuses: this user lacks the permission, or a provider the command. Raises StreamError
        if the rewrite does not end. Without an append-only file it does nothing.
        """
        try:
            if not self._persistence().get("aof_enabled"):
                return True
            self._begin_rewrite()
        except ResponseError:
            return False
        deadline = time.monotonic() + _COMPACT_TIMEOUT_S
        while (state := self._persistence())["aof_rewrite_in_progress"] or state["aof_rewrite_scheduled"]:
            if time.monotonic() > deadline:
                within = f"within {_COMPACT_TIMEOUT_S:.0f} s"
                raise redis.exceptions.TimeoutError(f"Redis did not rewrite its append-only file {within}: try again")
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
            except ResponseError as error:
                # A running rewrite may have copied entries before their removal: another must follow it.
                if "in progress" not in str(error):
                    raise
            if time.monotonic() > deadline:
                raise redis.exceptions.TimeoutError("another rewrite of the append-only file does not end")
            time.sleep(0.02)

    def _chunks(self, key: str) -> Iterator[list[Any]]:
        start = "-"
        while start != f"({LAST_ID}" and (rows := self._redis.xrange(key, min=start, count=_CHUNK)):
            yield rows
            start = f"({rows[-1][0].decode()}"

    def _remove_entries(self, rows: Sequence[tuple[bytes, Mapping[bytes, bytes]]]) -> None:
        """Remove entries and update the accounts in one transaction; then correct the accounts by its results.

        A correction is needed if an entry was acked or trimmed in the milliseconds between read and transaction. If the
        process is killed before it, `bytes` and `erased` stay off by those few, but nothing of the tenant remains.
        WATCH would avoid that, but never succeed on a stream with constant appends.
        """
        keys = self._keys
        members = [member_of(fields) or b"" for _, fields in rows]
        sizes = [len(fields.get(b"payload", b"")) for _, fields in rows]
        expected = sum(map(self._accounts.is_open, members))
        with self._redis.pipeline(transaction=True) as transaction:
            for (entry_id, fields), member, size in zip(rows, members, sizes, strict=True):
                index = index_of(fields)
                transaction.xack(keys.traces, self._group, entry_id)
                # An entry of another client has no account: index −1 removes nothing.
                transaction.lrem(keys.sizes, 1, size_member(size, -1 if index is None else index))
                transaction.zrem(keys.open, member)
            transaction.xdel(keys.traces, *(entry_id for entry_id, _ in rows))
            transaction.hincrby(keys.accounts, "bytes", -sum(sizes))
            transaction.hincrby(keys.accounts, "erased", expected)
            results = transaction.execute()
        listed, closed = results[1 : 3 * len(rows) : 3], results[2 : 3 * len(rows) : 3]
        # Sizes that are missing in the list belong to entries that others have trimmed and counted.
        missing = sum(size for size, found in zip(sizes, listed, strict=True) if not found)
        for field, difference in (("bytes", missing), ("erased", sum(closed) - expected)):
            if difference:
                self._redis.hincrby(keys.accounts, field, difference)


def _is_chosen(fields: Mapping[bytes, bytes], chosen: Chosen, counts: dict[str, int], unreadable: bool) -> bool:
    try:
        return chosen(read_header(fields.get(b"payload", b"")))
    except TraceError:
        counts["unreadable"] += unreadable
        return unreadable


@dataclass(frozen=True, kw_only=True)
class Rewritten:
    """Counts of traces in a rewritten recording. Unreadable ones are removed too: they may be any tenant's."""

    removed: int
    kept: int
    unreadable: int
    """Unreadable entries among the removed ones."""
    cut_bytes: int
    """Bytes of an incomplete last entry, which is removed, too."""


def remove_from_recording(path: Path, chosen: Chosen, *, dry_run: bool = False) -> Rewritten:
    """Remove every trace whose header is chosen; without any the file stays as it is.

    May be killed and repeated. Nobody may record into the file meanwhile. Raises ConfigError where it is not a
    recording or cannot be written.
    """
    found = _count_chosen(path, chosen)
    if dry_run or not (found.removed or found.cut_bytes):
        return found
    try:
        with (
            replacing(path) as temporary,
            RecordingReader(path) as reader,
            RecordingWriter(temporary, reader.header) as writer,
        ):
            for payload in reader.payloads():
                if (trace_id := _kept_id(payload, chosen)) is not None:
                    writer.append(payload, trace_id=trace_id)
    except OSError as error:
        raise ConfigError(f"cannot rewrite {path} ({error.strerror}): check its folder") from error
    return found


def _count_chosen(path: Path, chosen: Chosen) -> Rewritten:
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

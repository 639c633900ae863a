"""Accounting of a trace stream: acked, pending and lost entries, bytes, and trimming to the cap.

In entries, at every moment and whatever other clients do to the stream and its group:

    appended = acked + pending + undelivered + skipped + lost + erased        (dead letters are acked entries)

An entry is *open* from its append until it is settled once: acked, lost or erased. The transactions that append and
settle update the set of open entries, so a redelivered entry is not settled again: its second ack is counted as
`redelivered`. Of the open entries before the group's position, as many as the group's pending list has are pending;
the others are `skipped`.

Redis trims a stream without notice, so removal is detected: every append also pushes its size onto a list. If the
lengths' difference has changed, `settle` reads the oldest entry. Each entry has its index, and the open entries before
the oldest are lost. Loss is derived from state: a crash between trimming and counting loses no count.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import redis
from redis.exceptions import OutOfMemoryError, ResponseError

from speculator.errors import StreamError
from speculator.redis.client import RedisKeys, until_unraced

# Entries are trimmed by this share of the cap at once, or of the bytes held by a full Redis, so that not every append
# must trim.
_TRIM_STEP = 0.05
MAX_DEAD_LETTERS = 100
_SCAN_COUNT = 1000
# Entries that are read at once, with payloads.
_MAX_ROWS = 16
_ATTEMPTS = 50
_MAX_MEMBERS = 10_000
_MAX_SEQUENCE = 2**64 - 1
_FIELDS = {b"payload", b"trace_id", b"created_ms", b"index"}
LAST_ID = f"{_MAX_SEQUENCE}-{_MAX_SEQUENCE}"

_R = TypeVar("_R")


@dataclass(frozen=True, kw_only=True)
class StreamLag:
    """State of the stream in entries: how far the trainer is behind, and totals since the stream began."""

    pending: int
    """Delivered, not yet acked."""
    undelivered: int
    length: int
    """Entries in the stream, acked ones kept as history included."""
    bytes: int
    """Payload bytes of those entries."""
    appended: int
    acked: int
    lost: int
    dead_lettered: int
    erased: int
    """Removed on request before the trainer had acked them."""
    skipped: int = 0
    """Unacked, but never to be delivered: another client acked or deleted them, or moved the group past them."""
    redelivered: int = 0
    """Acks of already settled entries: another client had moved the group back."""
    foreign: int = 0
    """Entries of other clients, which the trainer has dead-lettered; not part of `appended`."""
    expired: int
    """Removed by age; unacked ones count as lost, too."""


def size_member(num_bytes: int, index: int) -> str:
    """An entry's unique member in the list of sizes."""
    return f"{num_bytes}:{index}"


def open_member(index: int, trace_id: bytes) -> bytes:
    """An entry's member in the set of open ones; with the trace id, since an emptied Redis restarts indexes at 0."""
    return b"%d:%s" % (index, trace_id)


def index_of(fields: Mapping[bytes, bytes]) -> int | None:
    """The index of an entry; None for one of another client, which becomes a dead letter when read."""
    index = fields.get(b"index", b"") if fields.keys() >= _FIELDS else b""
    return int(index) if index.isdigit() and len(index) < 16 else None


def member_of(fields: Mapping[bytes, bytes]) -> bytes | None:
    """`open_member` from an entry's fields; None for an entry of another client."""
    index = index_of(fields)
    return None if index is None else open_member(index, fields.get(b"trace_id", b""))


def _index_of_member(member: bytes) -> int:
    return int(member.partition(b":")[0])


def _number(value: bytes | None, key: str) -> int:
    try:
        return int(value or 0)
    except ValueError:
        raise StreamError(f"{key} in Redis is not a number: another client wrote there; remove that key") from None


def _size_and_index(member: bytes, key: str) -> tuple[int, int]:
    size, _, index = member.partition(b":")
    return _number(size, key), _number(index, key)


class StreamAccounts:
    """Accounts of one stream with one consumer group. Raises redis-py's errors, and those of `until_unraced`."""

    def __init__(self, client: redis.Redis, keys: RedisKeys, group: str, max_bytes: int) -> None:
        # redis-py's types allow every protocol and decoding; replies here are bytes over protocol 2.
        self._redis: Any = client
        self._keys = keys
        self._group = group
        self._max_bytes = max_bytes
        self._members: dict[str, bytes | None] = {}
        """`open_member` of the newest delivered, unsettled entries, by id; None for those of other clients."""

    def append(self, fields: Mapping[str, bytes | str | int], num_bytes: int) -> str:
        """Append one entry after making room for it; returns its id."""
        try:
            held, listed_end = self._held()
            if held + num_bytes > self._max_bytes:
                self._make_room(num_bytes)
            return self._retry_when_raced(functools.partial(self._append_once, fields, num_bytes, listed_end))
        except OutOfMemoryError:
            # Redis is full below the stream's cap, and refuses acks and drafts, too: make room for the next try.
            self._make_way()
            raise

    def expire(self, before_ms: int) -> None:
        """Remove and count every entry appended before this time."""
        num_expired = self._redis.xtrim(self._keys.traces, minid=f"{before_ms}-0", approximate=False)
        if num_expired:
            self._redis.hincrby(self._keys.accounts, "expired", num_expired)
            self.settle()

    def lag(self) -> StreamLag:
        self.settle()
        next_index = self._next_index()
        with self._redis.pipeline(transaction=True) as transaction:
            transaction.xlen(self._keys.traces)
            transaction.hgetall(self._keys.accounts)
            transaction.zcount(self._keys.open, "-inf", f"({next_index}")
            transaction.zcount(self._keys.open, next_index, "+inf")
            transaction.xinfo_groups(self._keys.traces)
            length, accounts, delivered, undelivered, groups = transaction.execute()
        fields = ("acked", "lost", "dead_lettered", "erased", "expired", "redelivered", "foreign", "bytes")
        count = {field: _number(accounts.get(field.encode()), self._keys.accounts) for field in fields}
        # The group's list may be longer: it includes redelivered entries and those of other clients.
        pending = min(self._own_group(groups)[0], delivered)
        return StreamLag(
            pending=pending,
            undelivered=undelivered,
            skipped=delivered - pending,
            length=length,
            appended=delivered + undelivered + count["acked"] + count["lost"] + count["erased"],
            **count,
        )

    def is_open(self, member: bytes | None) -> bool:
        index = _index_of_member(member) if member else -1
        return member in self._redis.zrange(self._keys.open, index, index, byscore=True)

    def delivered(self, rows: Sequence[tuple[bytes, Mapping[bytes, bytes]]]) -> None:
        """Remember entries delivered to this consumer, to settle them later."""
        self._members |= {entry_id.decode(): member_of(fields) for entry_id, fields in rows}
        # Forgotten members can be read from the stream again.
        while len(self._members) > _MAX_MEMBERS:
            del self._members[next(iter(self._members))]

    def moved(self, rows: Sequence[tuple[bytes, Mapping[bytes, bytes]]], count: int) -> None:
        """Store the group's position after it delivered `rows` of up to `count`; saves others a read of the stream."""
        # At the stream's end reading is cheap, and also detects entries that were deleted there.
        index = index_of(rows[-1][1]) if len(rows) == count else None
        self._note_position("" if index is None else rows[-1][0].decode(), 0 if index is None else index + 1)

    def _note_position(self, position: str, next_index: int) -> None:
        self._redis.hset(self._keys.accounts, mapping={"position": position, "next_index": next_index})

    def _next_index(self) -> int:
        """The index of the first entry that the group has not delivered, or of the next append."""
        _, last_delivered = self.group_state()
        position, next_index = self._redis.hmget(self._keys.accounts, ["position", "next_index"])
        if position == last_delivered.encode():
            return _number(next_index, self._keys.accounts)
        _, found = self._first_of_ours(f"({last_delivered}")
        self._note_position(last_delivered, found)
        return found

    def _rows_from(self, start: str) -> Iterator[list[tuple[bytes, Mapping[bytes, bytes]]]]:
        """The entries from the id `start` on: first one, then in larger blocks."""
        count = 1
        while start != f"({LAST_ID}" and (rows := self._redis.xrange(self._keys.traces, min=start, count=count)):
            yield rows
            start = f"({rows[-1][0].decode()}"
            count = min(2 * count, _MAX_ROWS)

    def _first_of_ours(self, start: str) -> tuple[str, int]:
        """(id, index) of the first entry with an index from the id `start` on, or ("0", index of the next append)."""
        # Read first: entries appended in between have no smaller index.
        end = self._end_index(self._redis, self._held()[1])
        for rows in self._rows_from(start):
            for entry_id, fields in rows:
                if (index := index_of(fields)) is not None and index < end:
                    return entry_id.decode(), index
        return "0", end

    def _end_index(self, client: Any, listed_end: int) -> int:
        """The index of the next append; after the newest entry, even if another client has reset the counter."""
        counter = client.get(self._keys.num_appended)
        if counter is None and client.xlen(self._keys.traces):
            for _, fields in client.xrevrange(self._keys.traces, count=1):
                if (newest := index_of(fields)) is not None:
                    return max(listed_end, newest + 1)
        return max(listed_end, _number(counter, self._keys.num_appended))

    def _append_once(self, fields: Mapping[str, bytes | str | int], num_bytes: int, listed_end: int) -> str:
        keys = self._keys
        with self._redis.pipeline(transaction=True) as transaction:
            # The index must be exact: this retries if another producer appends in between.
            transaction.watch(keys.num_appended)
            index = self._end_index(transaction, listed_end)
            size = size_member(num_bytes, index)
            member = open_member(index, str(fields["trace_id"]).encode())
            transaction.multi()
            transaction.xadd(keys.traces, {**fields, "index": index})
            transaction.rpush(keys.sizes, size)
            transaction.zadd(keys.open, {member: index})
            transaction.hincrby(keys.accounts, "bytes", num_bytes)
            transaction.set(keys.num_appended, index + 1)
            entry_id = transaction.execute(raise_on_error=False)[0]
        if isinstance(entry_id, Exception):
            # XADD alone failed, the rest of the transaction took effect: another client had used the last possible id.
            self._redis.zrem(keys.open, member)
            if self._redis.lrem(keys.sizes, -1, size):
                self._redis.hincrby(keys.accounts, "bytes", -num_bytes)
            raise entry_id
        return str(entry_id.decode())

    def _make_room(self, num_bytes: int) -> None:
        """Remove the oldest entries until `num_bytes` more fit under the cap."""
        held, num_more = -1, 0
        for _ in range(_ATTEMPTS):
            self.settle()
            before, (held, _) = held, self._held()
            excess = held + num_bytes - self._max_bytes
            if excess <= 0:
                return
            if held == before:
                # The removed entries were not in the list of sizes: another client's, or the list was deleted.
                first_id, _ = self._first_of_ours("-")
                if self._redis.xtrim(self._keys.traces, minid=first_id, approximate=False):
                    held = -1
                    continue
                num_more = 2 * num_more + 1
            if not self._trim_history(self._num_oldest(excess + int(self._max_bytes * _TRIM_STEP)) + num_more):
                self._trim_oldest(self._num_oldest(excess) + num_more)
        raise StreamError("too many producers trim the trace stream at once; try again")

    def _make_way(self) -> None:
        """Remove the oldest entries from a full Redis, which refuses writes and everything between MULTI and EXEC."""
        # Read first, so that two producers that trim at once remove the same entries, not twice as many.
        length = self._redis.xlen(self._keys.traces)
        held = _number(self._redis.hget(self._keys.accounts, "bytes"), self._keys.accounts)
        num_entries = self._num_oldest(int(held * _TRIM_STEP))
        try:
            num_trimmed = self._trim_history(num_entries)
        except OutOfMemoryError:
            num_trimmed = 0  # there is no group, and none can be created
        if not num_trimmed:
            # Unread ones: as long as acks are refused, no history comes about.
            self._redis.xtrim(self._keys.traces, maxlen=max(length - num_entries, 0), approximate=False)

    def _trim_history(self, num_entries: int) -> int:
        """Remove up to `num_entries` acked entries before the oldest unacked one; returns how many."""
        # Read first: if nothing is pending afterwards, everything up to this position has been acked.
        _, last_delivered = self.group_state()
        if pending := self.pending_ids("-", "+", 1):
            oldest_unacked = pending[0]
        else:
            milliseconds, sequence = last_delivered.split("-")
            oldest_unacked = f"{milliseconds}-{min(int(sequence) + 1, _MAX_SEQUENCE)}"
        # LIMIT requires approximate trimming, which removes whole nodes: from 4 KiB of payload, a node is one entry.
        return int(self._redis.xtrim(self._keys.traces, minid=oldest_unacked, approximate=True, limit=num_entries))

    def _trim_oldest(self, num_entries: int) -> None:
        """Remove the oldest entries, acked or not."""
        # An absolute length, so that two producers that trim at once remove the same entries, not twice as many.
        _, num_listed, surplus = self._lengths()
        self._redis.xtrim(self._keys.traces, maxlen=max(num_listed + surplus - num_entries, 0), approximate=False)

    def _num_oldest(self, num_bytes: int) -> int:
        """How many of the oldest entries have at least `num_bytes` together."""
        num_entries = 0
        for size, _ in self._sizes():
            num_entries += 1
            num_bytes -= size
            if num_bytes <= 0:
                break
        return num_entries

    def _sizes(self) -> Iterator[tuple[int, int]]:
        """(payload bytes, index) of the listed entries, from the oldest."""
        start = 0
        while chunk := self._redis.lrange(self._keys.sizes, start, start + _SCAN_COUNT - 1):
            yield from (_size_and_index(member, self._keys.sizes) for member in chunk)
            start += _SCAN_COUNT

    def settle(self, *, looks: bool = False) -> None:
        """Update the accounts to the stream: count unacked entries that are gone. `looks`: even if lengths agree."""
        length, num_listed, surplus = self._lengths()
        if looks or length - num_listed != surplus:
            self._drop_removed_pending()
            self._retry_when_raced(self._settle_removed)

    def _lengths(self) -> tuple[int, int, int]:
        """(entries in the stream, entries in the list of sizes, surplus of the stream when last settled)."""
        with self._redis.pipeline(transaction=True) as transaction:
            transaction.xlen(self._keys.traces)
            transaction.llen(self._keys.sizes)
            transaction.hget(self._keys.accounts, "surplus")
            length, num_listed, surplus = transaction.execute()
        return length, num_listed, _number(surplus, self._keys.accounts)

    def _drop_removed_pending(self) -> None:
        # Read the group's position before the stream: an entry that is appended and delivered in between is then
        # neither before the first entry nor before the position.
        num_pending, last_delivered = self.group_state()
        if not num_pending:
            return
        first = self._redis.xrange(self._keys.traces, count=1)
        end = f"({first[0][0].decode()}" if first else last_delivered
        while ids := self.pending_ids("-", end, _SCAN_COUNT):
            self.drop_pending(ids)

    def drop_pending(self, ids: Sequence[str]) -> None:
        """Remove entries that are gone from the group's pending list."""
        self._redis.xack(self._keys.traces, self._group, *ids)

    def _settle_removed(self) -> None:
        """Count open entries before the oldest one in the stream as lost."""
        keys = self._keys
        with self._redis.pipeline(transaction=True) as transaction:
            transaction.watch(keys.num_appended, keys.sizes, keys.open)
            # Length first: entries removed after it are found at the next settling.
            length = transaction.xlen(keys.traces)
            _, first_index = self._first_of_ours("-")
            sizes = [size for size, _ in itertools.takewhile(lambda entry: entry[1] < first_index, self._sizes())]
            num_listed = transaction.llen(keys.sizes) - len(sizes)
            num_lost = transaction.zcount(keys.open, "-inf", f"({first_index}")
            transaction.multi()
            if sizes:
                transaction.lpop(keys.sizes, len(sizes))
            transaction.zremrangebyscore(keys.open, "-inf", f"({first_index}")
            transaction.hincrby(keys.accounts, "bytes", -sum(sizes))
            transaction.hincrby(keys.accounts, "lost", num_lost)
            changed = {"surplus": length - num_listed, "position": ""} | ({} if num_listed else {"bytes": 0})
            transaction.hset(keys.accounts, mapping=changed)
            transaction.execute()

    def settle_acked(self, ids: Sequence[str]) -> None:
        with self._redis.pipeline(transaction=True) as transaction:
            self._settle(ids, ("acked",), transaction)

    def settle_dead(self, entry_id: str, dead_letters: str, fields: Mapping[str, bytes | str]) -> None:
        """Ack the entry and keep `fields` in the capped stream `dead_letters`, in one transaction."""
        with self._redis.pipeline(transaction=True) as transaction:
            transaction.xadd(dead_letters, fields, maxlen=MAX_DEAD_LETTERS, approximate=False)
            self._settle([entry_id], ("acked", "dead_lettered"), transaction)

    def _settle(self, ids: Sequence[str], accounts: Sequence[str], transaction: Any) -> None:
        """Ack ids and count them, each entry once however often it was delivered."""
        keys = self._keys
        members = [self._member(entry_id) for entry_id in ids]
        num_ours = sum(bool(member) for member in members)
        for account in accounts:
            transaction.hincrby(keys.accounts, account, num_ours)
        for entry_id, member in zip(ids, members, strict=True):
            transaction.xack(keys.traces, self._group, entry_id)
            transaction.zrem(keys.open, member or b"")
        results = transaction.execute()[-2 * len(ids) :]
        # Counted first and corrected after: a crash in between counts too much, never too little.
        num_closed = sum(results[1::2])
        changes = dict.fromkeys(accounts, num_closed - num_ours)
        found = list(zip(members, results[::2], results[1::2], strict=True))
        changes["redelivered"] = sum(bool(member and taken and not closed) for member, taken, closed in found)
        changes["foreign"] = sum(taken for member, taken, _ in found if member is None)
        for account, change in changes.items():
            if change:
                self._redis.hincrby(keys.accounts, account, change)
        for entry_id in ids:
            self._members.pop(entry_id, None)
        if changes["foreign"]:
            # Appends and removals in equal number leave the lengths unchanged, so compare contents.
            self.settle(looks=True)

    def _member(self, entry_id: str) -> bytes | None:
        """`open_member` of an entry; empty if it is gone and was not delivered here."""
        if entry_id in self._members:
            return self._members[entry_id]
        rows = self._redis.xrange(self._keys.traces, min=entry_id, max=entry_id)
        return member_of(rows[0][1]) if rows else b""

    def _held(self) -> tuple[int, int]:
        """(payload bytes, index after the newest in the list of sizes). Fails if a key has another type."""
        with self._redis.pipeline(transaction=True) as transaction:
            transaction.hget(self._keys.accounts, "bytes")
            transaction.lrange(self._keys.sizes, -1, -1)
            transaction.xlen(self._keys.traces)
            transaction.zcount(self._keys.open, 0, 0)
            num_bytes, newest, _, _ = transaction.execute()
        end = _size_and_index(newest[0], self._keys.sizes)[1] + 1 if newest else 0
        return _number(num_bytes, self._keys.accounts), end

    # -- group

    def ensure_group(self) -> None:
        try:
            self._redis.xgroup_create(self._keys.traces, self._group, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    def with_group(self, command: Callable[[], _R]) -> _R:
        """Run a command; if the group is missing, as in an emptied Redis, create it and run the command again."""
        try:
            return command()
        except ResponseError as error:
            if "NOGROUP" not in str(error) and "no such key" not in str(error):
                raise
            self.ensure_group()
            return command()

    def group_state(self) -> tuple[int, str]:
        """(pending entries, id of the last delivered entry) of the group."""
        return self.with_group(lambda: self._own_group(self._redis.xinfo_groups(self._keys.traces)))

    def _own_group(self, groups: list[dict[str, Any]]) -> tuple[int, str]:
        for group in groups:
            if group["name"] == self._group.encode():
                return group["pending"], group["last-delivered-id"].decode()
        raise ResponseError(f"NOGROUP the consumer group {self._group} is gone")

    def pending_ids(self, start: str, end: str, count: int) -> list[str]:
        """Up to `count` pending ids of the range, from the oldest."""
        if count == 0:
            return []
        rows = self._redis.xpending_range(self._keys.traces, self._group, min=start, max=end, count=count)
        return [row["message_id"].decode() for row in rows]

    def _retry_when_raced(self, transaction: Callable[[], _R]) -> _R:
        return until_unraced(transaction, attempts=_ATTEMPTS, what="the trace stream")

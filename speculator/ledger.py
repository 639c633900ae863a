"""The books of a trace stream: who has acked what, what is lost, how many bytes are left, and making room.

In entries, at every moment:

    appended = acked + pending + undelivered + lost + erased        (dead letters are acked entries)

Redis trims a stream without telling anybody, so removal is detected: every append also pushes its size onto a list.
A list longer than the stream means that the stream's oldest entries are gone, and `settle` finds out how many of them
nobody had acked: the pending ones still stand in the group's pending list, and each entry carries its index, so the
first undelivered entry tells how many undelivered ones are left, less those that were erased behind it (removal.py).
Loss is derived from state: a crash between trimming and counting loses no count.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import redis
from redis.exceptions import ResponseError, WatchError

from speculator.errors import StreamError

# History is removed in steps of this share of the cap, so that not every append at the cap has to trim.
_TRIM_STEP = 0.05
MAX_DEAD_LETTERS = 100
_SCAN_COUNT = 1000
_ATTEMPTS = 50

_R = TypeVar("_R")


@dataclass(frozen=True, kw_only=True)
class StreamLag:
    """How far the trainer is behind, in entries; what is gone counts since the stream began."""

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
    expired: int
    """Removed by age; where nobody had acked them they are lost, too."""


@dataclass(frozen=True, kw_only=True)
class LedgerKeys:
    """Key names, all in one cluster slot."""

    traces: str
    """The stream itself."""
    sizes: str
    """List: "payload bytes:index" of every entry, in the order of the stream."""
    num_appended: str
    """Entries ever appended: also the index of the next entry."""
    accounts: str
    """Hash: acked, lost, dead_lettered, erased, expired (entries), bytes (payload of the entries in the stream)."""
    erased: str
    """Sorted set: indexes of erased entries, those before the first undelivered entry are of no use any more."""


def size_member(num_bytes: int, index: int) -> str:
    """How an entry stands in the list of sizes: unlike every other."""
    return f"{num_bytes}:{index}"


def index_of(entry_id: bytes, fields: Mapping[bytes, bytes]) -> int:
    """Raises StreamError for an entry that somebody else has put there; reading it makes it a dead letter."""
    index = fields.get(b"index", b"")
    if not (index.isdigit() and len(index) < 16):
        raise StreamError(f"entry {entry_id.decode()} of the trace stream is none of ours: find out who writes there")
    return int(index)


def _size_of(member: bytes) -> int:
    return int(member.partition(b":")[0])


class Ledger:
    """One stream with one consumer group. Raises redis-py's errors, and StreamError where clients race too much."""

    def __init__(self, client: redis.Redis, keys: LedgerKeys, group: str, max_bytes: int) -> None:
        # redis-py's types allow every protocol and decoding; ours are bytes over protocol 2.
        self._redis: Any = client
        self._keys = keys
        self._group = group
        self._max_bytes = max_bytes

    def append(self, fields: Mapping[str, bytes | str | int], num_bytes: int) -> str:
        """Append one entry after making room for it; returns its id."""
        if self._bytes() + num_bytes > self._max_bytes:
            self._make_room(num_bytes)
        return self._retry_when_raced(functools.partial(self._append_once, fields, num_bytes))

    def expire(self, before_ms: int) -> None:
        """Remove every entry that was appended before, and count."""
        num_expired = self._redis.xtrim(self._keys.traces, minid=f"{before_ms}-0", approximate=False)
        if num_expired:
            self._redis.hincrby(self._keys.accounts, "expired", num_expired)
            self.settle()

    def lag(self) -> StreamLag:
        self.settle()
        self.group_state()
        with self._redis.pipeline(transaction=True) as transaction:
            transaction.xlen(self._keys.traces)
            transaction.get(self._keys.num_appended)
            transaction.hgetall(self._keys.accounts)
            transaction.xinfo_groups(self._keys.traces)
            length, num_appended, accounts, groups = transaction.execute()
        appended = int(num_appended or 0)
        fields = ("acked", "lost", "dead_lettered", "erased", "expired", "bytes")
        count = {field: int(accounts.get(field.encode(), 0)) for field in fields}
        pending, _ = self._own_group(groups)
        return StreamLag(
            pending=pending,
            undelivered=appended - count["acked"] - count["lost"] - count["erased"] - pending,
            length=length,
            appended=appended,
            **count,
        )

    def _append_once(self, fields: Mapping[str, bytes | str | int], num_bytes: int) -> str:
        keys = self._keys
        with self._redis.pipeline(transaction=True) as transaction:
            # The index must be exact: another producer's append in between makes this one start over.
            transaction.watch(keys.num_appended)
            index = int(transaction.get(keys.num_appended) or 0)
            transaction.multi()
            transaction.xadd(keys.traces, {**fields, "index": index})
            transaction.rpush(keys.sizes, size_member(num_bytes, index))
            transaction.hincrby(keys.accounts, "bytes", num_bytes)
            transaction.incr(keys.num_appended)
            entry_id: bytes = transaction.execute()[0]
        return entry_id.decode()

    def _make_room(self, num_bytes: int) -> None:
        """Remove the oldest entries until `num_bytes` more fit under the cap."""

        def fits() -> bool:
            self.settle()
            excess = self._bytes() + num_bytes - self._max_bytes
            if excess > 0 and not self._trim_history(excess + int(self._max_bytes * _TRIM_STEP)):
                self._trim_oldest(excess)
            return excess <= 0

        for _ in range(_ATTEMPTS):
            if fits():
                return
        raise StreamError("the trace stream is trimmed by too many producers at once; try again")

    def _trim_history(self, num_bytes: int) -> int:
        """Remove up to `num_bytes` of the entries before the oldest unacked one; returns how many entries."""
        # In this order: where nothing is pending any more, everything up to the earlier position has been acked.
        _, last_delivered = self.group_state()
        if pending := self.pending_ids("-", "+", 1):
            oldest_unacked = pending[0]
        else:
            milliseconds, sequence = last_delivered.split("-")
            oldest_unacked = f"{milliseconds}-{int(sequence) + 1}"
        # LIMIT needs the approximate form, which removes whole nodes: one entry each, from 4 KiB of payload.
        limit = self._num_oldest(num_bytes)
        return int(self._redis.xtrim(self._keys.traces, minid=oldest_unacked, approximate=True, limit=limit))

    def _trim_oldest(self, num_bytes: int) -> None:
        """Remove `num_bytes` of the oldest entries, acked or not."""
        length = self._redis.llen(self._keys.sizes)
        # Counted from the ledger, so that two producers that trim at once remove the same entries, not twice as many.
        self._redis.xtrim(self._keys.traces, maxlen=length - self._num_oldest(num_bytes), approximate=False)

    def _num_oldest(self, num_bytes: int) -> int:
        """How many of the oldest entries make up at least `num_bytes`."""
        num_entries = 0
        while chunk := self._redis.lrange(self._keys.sizes, num_entries, num_entries + _SCAN_COUNT - 1):
            for size in chunk:
                num_entries += 1
                num_bytes -= _size_of(size)
                if num_bytes <= 0:
                    return num_entries
        return num_entries

    def settle(self) -> None:
        """Bring ledger and accounts in line with the stream, counting the unacked entries that are gone."""
        with self._redis.pipeline(transaction=True) as transaction:
            transaction.xlen(self._keys.traces)
            transaction.llen(self._keys.sizes)
            transaction.get(self._keys.num_appended)
            length, ledger_length, appended = transaction.execute()
        if length < ledger_length:
            self._settle_removed_pending()
            first_index = int(appended) - length
            self._retry_when_raced(functools.partial(self._settle_removed_undelivered, first_index))

    def _settle_removed_pending(self) -> None:
        # The group's position is read before the stream: an entry that is appended and delivered in between is
        # neither before the first entry nor before the position.
        num_pending, last_delivered = self.group_state()
        if not num_pending:
            return
        first = self._redis.xrange(self._keys.traces, count=1)
        end = f"({first[0][0].decode()}" if first else last_delivered
        while ids := self.pending_ids("-", end, _SCAN_COUNT):
            self.settle_lost(ids)

    def _settle_removed_undelivered(self, first_index: int) -> None:
        """Also shortens the ledger: to `first_index`, no further, since what went after it may still be pending."""
        keys = self._keys
        with self._redis.pipeline(transaction=True) as transaction:
            transaction.watch(keys.num_appended, keys.accounts, keys.erased)
            appended = int(transaction.get(keys.num_appended) or 0)
            num_removed = first_index - (appended - transaction.llen(keys.sizes))
            sizes = transaction.lrange(keys.sizes, 0, num_removed - 1) if num_removed > 0 else []
            settled = sum(int(n or 0) for n in transaction.hmget(keys.accounts, ["acked", "lost", "erased"]))
            pending, last_delivered = self._own_group(transaction.xinfo_groups(keys.traces))
            undelivered = transaction.xrange(keys.traces, min=f"({last_delivered}", count=1)
            num_left = 0
            if undelivered:
                first = index_of(*undelivered[0])
                num_left = appended - first - transaction.zcount(keys.erased, first, "+inf")
            num_lost = appended - settled - pending - num_left
            transaction.multi()
            if sizes:
                transaction.lpop(keys.sizes, len(sizes))
            transaction.hincrby(keys.accounts, "bytes", -sum(map(_size_of, sizes)))
            transaction.hincrby(keys.accounts, "lost", max(num_lost, 0))
            transaction.execute()

    def settle_lost(self, ids: Sequence[str]) -> None:
        with self._redis.pipeline(transaction=True) as transaction:
            self._settle_pending(ids, "lost", transaction)

    def settle_acked(self, ids: Sequence[str]) -> None:
        with self._redis.pipeline(transaction=True) as transaction:
            self._settle_pending(ids, "acked", transaction)

    def settle_dead(self, entry_id: str, dead_letters: str, fields: Mapping[str, bytes | str]) -> None:
        """Ack the entry and keep `fields` in the capped stream `dead_letters`, in one transaction."""
        with self._redis.pipeline(transaction=True) as transaction:
            transaction.xadd(dead_letters, fields, maxlen=MAX_DEAD_LETTERS, approximate=False)
            transaction.hincrby(self._keys.accounts, "dead_lettered", 1)
            self._settle_pending([entry_id], "acked", transaction)

    def settle_deleted(self, num_entries: int) -> None:
        """Redis itself took this many removed entries off the pending list."""
        self._redis.hincrby(self._keys.accounts, "lost", num_entries)

    def _settle_pending(self, ids: Sequence[str], account: str, transaction: Any) -> None:
        """Take ids off the pending list and book them on an account, exactly once whoever else does the same."""
        transaction.hincrby(self._keys.accounts, account, len(ids))
        transaction.xack(self._keys.traces, self._group, *ids)
        num_settled = transaction.execute()[-1]
        # Booked first and corrected after: a crash in between counts too much, never too little.
        if num_settled < len(ids):
            self._redis.hincrby(self._keys.accounts, account, num_settled - len(ids))

    def _bytes(self) -> int:
        return int(self._redis.hget(self._keys.accounts, "bytes") or 0)

    # -- group

    def ensure_group(self) -> None:
        try:
            self._redis.xgroup_create(self._keys.traces, self._group, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    def with_group(self, command: Callable[[], _R]) -> _R:
        """Run a command again after creating the group that an emptied Redis no longer has."""
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
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(WatchError):
                return transaction()
        raise StreamError("the trace stream is changed by too many clients at once; try again")

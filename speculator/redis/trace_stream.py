"""Redis streams to the trainer: traces from any number of engines, and rewards. Redis ≥ 6.2.

Traces are delivered at least once; the trainer uses each `trace_id` once.

Rewards arrive after their traces, and each trainer process reads all of them. So rewards are not acked: the stream
keeps the newest MAX_GROUPS entries, and a process that starts reads from the oldest on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import redis
from msgspec import Meta

from speculator.errors import StreamError
from speculator.host import now_ms
from speculator.redis.client import RedisKeys, ServerInfo, redis_errors
from speculator.redis.stream_accounting import StreamAccounts, StreamLag, member_of
from speculator.target_folder import read_config

# A blocking read must end well before the socket's timeout.
MAX_BLOCK_MS = 2000
EXPIRE_EVERY_S = 5.0
_LEAST_BYTES = 512 << 20
_ROOM_FOR_TOKENS = 64 * 2500
"""Tokens of 64 requests that end at once, each with 2,500 tokens of prompt and answer."""
_BYTES_BESIDE = 600
"""Bytes of a token in a trace, besides its features."""


def cap_for(model_dir: Path) -> int:
    """Default byte cap of this target's stream: by its hidden size, at least 512 MiB.

    A token of a trace has three features in float8. Raises ConfigError where the folder has no usable config.json.
    """
    hidden_size: int = read_config(model_dir)["hidden_size"]
    return max(_LEAST_BYTES, _ROOM_FOR_TOKENS * (3 * hidden_size + _BYTES_BESIDE))


@dataclass(frozen=True, kw_only=True)
class StreamEntry:
    id: str
    trace_id: str
    created_ms: int
    """When the entry was appended."""
    payload: bytes


class TraceStream:
    """One model's traces, from any number of producers to the consumers of one group.

    `max_bytes` is the hard cap on payload bytes in the stream. Before it appends, a producer removes the oldest acked
    entries, which are kept as history; if that is not enough, also unacked ones, which count as lost.
    """

    def __init__(
        self,
        client: redis.Redis,
        model_key: str,
        *,
        max_bytes: int,
        group: str = "trainer",
        consumer: str = "trainer-0",
        ttl_s: float = 0,
    ) -> None:
        """Does not connect yet. Consumers that run at the same time need different names. Every few seconds, appends
        and reads also remove entries older than `ttl_s`; 0: no limit.
        """
        self.max_bytes = max_bytes
        self._ttl_s, self._expired_s = ttl_s, 0.0
        self._redis: Any = client
        self._keys = RedisKeys(model_key=model_key)
        self._traces = self._keys.traces
        self._accounts = StreamAccounts(client, self._keys, group, max_bytes)
        self._group = group
        self._consumer = consumer
        self._server = ServerInfo(client)
        # Own pending entries come first after a start; None once they have all been read.
        self._resume_after: str | None = "0"

    @redis_errors
    def append(self, payload: bytes, *, trace_id: str) -> str:
        """Append one encoded trace and return its entry id.

        Raises StreamError, after which the entry may or may not be in the stream: appending it again is safe, the
        trainer uses a trace id once.
        """
        if len(payload) > self.max_bytes:
            raise StreamError(f"a trace of {len(payload)} bytes is above the stream's cap of {self.max_bytes} bytes")
        self._expire_when_due()
        fields: dict[str, bytes | str | int] = {"payload": payload, "trace_id": trace_id, "created_ms": now_ms()}
        return self._accounts.append(fields, len(payload))

    @redis_errors
    def expire(self, ttl_s: float) -> None:
        """Remove and count entries and dead letters older than `ttl_s`."""
        # By Redis's clock: one machine whose clock is ahead would remove the traces of all.
        before_ms = int(max(self._server.time_ms() - 1000 * ttl_s, 0))
        self._accounts.expire(before_ms)
        self._redis.xtrim(self._keys.dead_letters, minid=f"{before_ms}-0", approximate=False)

    @redis_errors
    def read(self, count: int, block_ms: int) -> list[StreamEntry]:
        """Up to `count` entries for this consumer: after a start its own pending ones, then new ones.

        Waits up to `block_ms` (at most MAX_BLOCK_MS; 0 does not wait) for new entries; returns [] when none came.
        Raises StreamError; the next call then starts over with the pending entries, since Redis may have delivered
        some that never arrived. Entries in hand can therefore come twice.
        """
        try:
            self._expire_when_due()
            while self._resume_after is not None:
                if entries := self._read_own_pending(self._resume_after, count):
                    return entries
            rows = self._read_group(">", count, min(block_ms, MAX_BLOCK_MS) or None)
            self._accounts.moved(rows, count)
            return self._take(rows)
        except (redis.RedisError, OSError):
            self._resume_after = "0"
            raise

    @redis_errors
    def reclaim(self, min_idle_ms: int, count: int = 100) -> list[StreamEntry]:
        """Take over up to `count` entries that some consumer has left unacked for `min_idle_ms`.

        Also finds own entries in hand for that long.
        """
        self._accounts.settle()
        entries: list[StreamEntry] = []
        cursor = "0-0"
        while len(entries) < count:
            reply = self._autoclaim(cursor, min_idle_ms, count - len(entries))
            # Redis ≥ 7 removes deleted entries from the pending list by itself.
            entries += self._take([row for row in reply[1] if row[1]])
            cursor = reply[0].decode()
            if cursor == "0-0":
                break
        return entries

    @redis_errors
    def ack(self, ids: Sequence[str]) -> None:
        """Mark entries as used by the trainer for good; ids that are not pending are ignored."""
        if ids:
            self._accounts.settle_acked(ids)

    @redis_errors
    def dead_letter(self, entry: StreamEntry, reason: str) -> None:
        """Ack an unusable entry, and store it as a dead letter with the reason; keeps the newest `MAX_DEAD_LETTERS`."""
        fields: dict[str, bytes | str] = {
            "payload": entry.payload,
            "trace_id": entry.trace_id,
            "entry_id": entry.id,
            "reason": reason,
        }
        self._accounts.settle_dead(entry.id, self._keys.dead_letters, fields)

    @redis_errors
    def recent(self, max_bytes: int) -> list[StreamEntry]:
        """The newest acked entries that fit into `max_bytes`, oldest first: to rebuild the replay buffer.

        Includes dead-lettered entries that are still in the stream; they fail to decode again.
        """
        _, last_delivered = self._accounts.group_state()
        entries: list[StreamEntry] = []
        end = last_delivered
        while chunk := self._redis.xrevrange(self._traces, max=end, count=8):
            for entry_id, fields in chunk:
                if self._accounts.is_open(member_of(fields)):
                    continue
                entry = _entry(entry_id, fields)
                max_bytes -= len(entry.payload)
                if max_bytes < 0:
                    return entries[::-1]
                entries.append(entry)
            end = f"({chunk[-1][0].decode()}"
        return entries[::-1]

    @redis_errors
    def lag(self) -> StreamLag:
        """State of the stream, after counting entries that were removed from it."""
        return self._accounts.lag()

    @redis_errors
    def memory_share(self) -> float | None:
        """Share of `maxmemory` that Redis uses; None where it has no limit, or refuses INFO."""
        memory = self._server.section("memory")
        limit = memory.get("maxmemory")
        return float(memory["used_memory"] / limit) if limit else None

    def _expire_when_due(self) -> None:
        if self._ttl_s and time.monotonic() - self._expired_s > EXPIRE_EVERY_S:
            self._expired_s = time.monotonic()
            self.expire(self._ttl_s)

    def _read_group(self, after: str, count: int, block_ms: int | None) -> list[Any]:
        streams = {self._traces: after}
        reply = self._accounts.with_group(
            lambda: self._redis.xreadgroup(self._group, self._consumer, streams, count=count, block=block_ms)
        )
        return list(reply[0][1]) if reply else []

    def _read_own_pending(self, after: str, count: int) -> list[StreamEntry]:
        rows = self._read_group(after, count, None)
        self._resume_after = rows[-1][0].decode() if rows else None
        return self._take(rows)

    def _take(self, rows: list[Any]) -> list[StreamEntry]:
        """Entries of rows; drops pending ones without fields, which were removed from the stream."""
        if missing := [entry_id.decode() for entry_id, fields in rows if not fields]:
            self._accounts.drop_pending(missing)
        present = [row for row in rows if row[1]]
        self._accounts.delivered(present)
        return [_entry(*row) for row in present]

    def _autoclaim(self, start: str, min_idle_ms: int, count: int) -> list[Any]:
        reply: list[Any] = self._accounts.with_group(
            lambda: self._redis.xautoclaim(self._traces, self._group, self._consumer, min_idle_ms, start, count=count)
        )
        return reply


def _entry(entry_id: bytes, fields: Mapping[bytes, bytes]) -> StreamEntry:
    # Any client may have written the entry: malformed ones must not fail here, so that they become dead letters.
    created_ms = fields.get(b"created_ms", b"")
    return StreamEntry(
        id=entry_id.decode(),
        trace_id=fields.get(b"trace_id", b"").decode(errors="replace"),
        created_ms=int(created_ms) if created_ms.isdigit() and len(created_ms) < 16 else 0,
        payload=fields.get(b"payload", b""),
    )


MAX_GROUPS = 4096
START = "0"


class GroupRewards(msgspec.Struct, frozen=True, kw_only=True):
    """Rewards of one group by sample number. Request ids in traces are `group_id`/number."""

    tenant: str
    group_id: str
    # Bounded so that the mean of a group is finite.
    rewards: Annotated[dict[int, Annotated[float, Meta(ge=-1e300, le=1e300)]], Meta(min_length=1)]


class RewardStream:
    """Stream of one model's rewards."""

    def __init__(self, client: redis.Redis, model_key: str) -> None:
        self._redis: Any = client
        self._key = RedisKeys(model_key=model_key).rewards

    @redis_errors
    def append(self, groups: Sequence[GroupRewards]) -> None:
        """Append all groups, or none. Raises StreamError."""
        with self._redis.pipeline(transaction=True) as transaction:
            for group in groups:
                transaction.xadd(self._key, {"rewards": msgspec.json.encode(group)}, maxlen=MAX_GROUPS)
            transaction.execute()

    @redis_errors
    def read(self, after: str, count: int) -> tuple[list[GroupRewards], str]:
        """Up to `count` entries after the id `after`, and the last one's id; skips malformed entries.

        Raises StreamError.
        """
        found: list[GroupRewards] = []
        rows = self._redis.xrange(self._key, min=f"({after}", count=count)
        for _, fields in rows:
            try:
                found.append(msgspec.json.decode(fields.get(b"rewards", b""), type=GroupRewards))
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
        return found, rows[-1][0].decode() if rows else after

    @redis_errors
    def remove(self, tenant: str, *, dry_run: bool = False) -> int:
        """Remove a tenant's rewards, and unreadable entries, which may be its; returns of how many groups.

        Raises StreamError.
        """
        theirs = [
            entry_id
            for entry_id, fields in self._redis.xrange(self._key)
            if _tenant_of(fields.get(b"rewards", b"")) in (None, tenant)
        ]
        if theirs and not dry_run:
            self._redis.xdel(self._key, *theirs)
        return len(theirs)


def _tenant_of(payload: bytes) -> str | None:
    try:
        return msgspec.json.decode(payload, type=GroupRewards).tenant
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None

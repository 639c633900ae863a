"""What answers were worth to whoever asked for them: a Redis stream from the gateway to the trainer.

Rewards come after the traces that they are about, and each trainer process wants all of them, so nothing is acked: the
newest MAX_GROUPS entries are kept, and a process that starts reads them from the oldest on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import redis
from msgspec import Meta

from speculator.redis.client import redis_errors
from speculator.redis.keys import RedisKeys

MAX_GROUPS = 4096
START = "0"


class GroupRewards(msgspec.Struct, frozen=True, kw_only=True):
    """Rewards of samples of one group by their number. The traces' request ids are `group_id`/number."""

    tenant: str
    group_id: str
    rewards: Annotated[dict[int, float], Meta(min_length=1)]


class RewardStream:
    """One model's rewards."""

    def __init__(self, client: redis.Redis, model_key: str) -> None:
        self._redis: Any = client
        self._key = RedisKeys(model_key=model_key).rewards

    @redis_errors
    def append(self, groups: Sequence[GroupRewards]) -> None:
        """All or none. Raises StreamError."""
        with self._redis.pipeline(transaction=True) as transaction:
            for group in groups:
                transaction.xadd(self._key, {"rewards": msgspec.json.encode(group)}, maxlen=MAX_GROUPS)
            transaction.execute()

    @redis_errors
    def read(self, after: str, count: int) -> tuple[list[GroupRewards], str]:
        """Up to `count` entries after one with that id, and the id of the last; what is no reward is passed over.

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
        """Remove a tenant's rewards; of how many groups. What cannot be read may be anybody's, and goes too.

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

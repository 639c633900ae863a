"""A plain client for the node of a Redis Cluster that has our keys.

All keys of a model share one hash tag, hence one slot, one node, and one connection at a time. So this is redis-py's
client for one server, whose connections go where the cluster says that the slot is. A command that reaches another node
is answered with MOVED, and nothing of it is done: the connection is closed, the next one goes to that node, and the
command is sent again. When a node is away the nodes of the URL are tried in turn; one of them knows who took over.

Why not `redis.RedisCluster`: its transactions give raw replies where a server's give parsed ones, it asks at the start
for commands that our users are not allowed, and it repeats commands that may have been done, of which a read of the
group would leave entries with a consumer that never saw them.

While a slot with our keys moves from node to node some commands fail (ASK, TRYAGAIN): they are StreamErrors, as when
Redis is away, and callers try again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import redis
from redis import exceptions
from redis.backoff import NoBackoff
from redis.connection import Connection, ConnectionPool, SSLConnection
from redis.retry import Retry

from speculator.redis_url import Place

_MAX_MOVES = 4
"""For one command: a node that is behind may name one that is, too."""

_T = TypeVar("_T")


class SlotMovedError(exceptions.ConnectionError):
    """Another node has the slot; where it is has been noted."""


class SlotOwner:
    """Where to connect: the node that was named last, then those of the URL. Shared by a pool's connections."""

    def __init__(self, seeds: Sequence[Place]) -> None:
        self._seeds = tuple(seeds)
        self.place: Place | None = None

    def places(self) -> Iterator[Place]:
        if (place := self.place) is not None:
            yield place
        yield from self._seeds


class _RetryMoved(Retry):
    """No retries, but of what another node is to do: the one that answered has done nothing."""

    def __init__(self) -> None:
        super().__init__(NoBackoff(), 0)

    def call_with_retry(
        self,
        do: Callable[[], _T],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> _T:
        for _ in range(_MAX_MOVES):
            try:
                return super().call_with_retry(do, fail, is_retryable, with_failure_count)
            except SlotMovedError:
                continue
        return super().call_with_retry(do, fail, is_retryable, with_failure_count)


class _ClusterConnection(Connection):
    def __init__(self, *, owner: SlotOwner, **options: Any) -> None:
        self._owner = owner
        super().__init__(**options)  # type: ignore[no-untyped-call]

    def connect_check_health(self, check_health: bool = True, retry_socket_connect: bool = True) -> None:
        """Every way to a socket leads through here, also that of a command on a closed connection."""
        if self.is_connected:
            return
        last: Exception | None = None
        for place in self._owner.places():
            self.host, self.port = place
            try:
                super().connect_check_health(check_health, retry_socket_connect)
                return
            except exceptions.AuthenticationError:
                raise
            except (exceptions.ConnectionError, exceptions.TimeoutError) as error:
                last = error
        assert last is not None
        raise last

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)
        except exceptions.MovedError as moved:
            # Without a host it means its own.
            self._owner.place = (moved.host or self.host, moved.port)
            self.disconnect()  # type: ignore[no-untyped-call]
            raise SlotMovedError(f"the slot is at {moved.host}:{moved.port}") from moved


class _ClusterSSLConnection(_ClusterConnection, SSLConnection):
    pass


def cluster_client(seeds: Sequence[Place], *, has_tls: bool, **options: Any) -> redis.Redis:
    """Needs no connection yet. `options` are those of redis-py's connections, but for retries."""
    pool = ConnectionPool(
        connection_class=_ClusterSSLConnection if has_tls else _ClusterConnection,
        owner=SlotOwner(seeds),
        retry=_RetryMoved(),
        **options,
    )
    return redis.Redis.from_pool(pool)

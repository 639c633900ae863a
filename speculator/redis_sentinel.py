"""A client for the master that Sentinels name.

redis-py's own asks for the master when its pool hands out a connection. One that is closed inside a transaction,
because it finds itself at a replica, is opened again by the next command, and then to the old address: a stream that
only appends would stay with a demoted master for ever. Here every connection asks before it is opened.
"""

from __future__ import annotations

from typing import Any

import redis
from redis.sentinel import Sentinel, SentinelManagedConnection, SentinelManagedSSLConnection

from speculator.redis_url import RedisUrl


class _MasterConnection(SentinelManagedConnection):
    def connect_check_health(self, check_health: bool = True, retry_socket_connect: bool = True) -> None:
        if not self.is_connected:
            self.host, self.port = self.connection_pool.get_master_address()
            super().connect_check_health(check_health, retry_socket_connect)


class _MasterSSLConnection(_MasterConnection, SentinelManagedSSLConnection):
    pass


def sentinel_client(url: RedisUrl, **options: Any) -> redis.Redis:
    """Needs no connection yet. `options` are those of redis-py's connections, the URL's included."""
    of_sentinels = {name: options.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    common = {name: value for name, value in options.items() if name not in ("username", "password", "db")}
    sentinel = Sentinel(url.places, sentinel_kwargs={**common, **of_sentinels, "ssl": url.has_tls})
    connection = _MasterSSLConnection if url.has_tls else _MasterConnection
    client: redis.Redis = sentinel.master_for(url.service, connection_class=connection, **options)
    return client

"""Where Redis is: one server, one that Sentinels name, or the nodes of a Redis Cluster.

    redis://[user:password@]host:port/db                    rediss:// with TLS, unix://path
    redis+sentinel://[user:password@]host:port,…/service/db   rediss+sentinel://; the hosts are Sentinels
    redis+cluster://[user:password@]host:port,…               rediss+cluster://; the hosts are any nodes

A query sets options of redis-py's connections, such as `ssl_ca_certs`; `sentinel_username` and `sentinel_password` are
for Sentinels that ask for a login of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from redis.connection import SSLConnection, parse_url

Kind = Literal["server", "sentinel", "cluster"]
Place = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class RedisUrl:
    kind: Kind
    shown: str
    """Without what is secret."""
    username: str
    password: str
    has_tls: bool
    places: tuple[Place, ...]
    """Hosts and ports; empty for a Unix socket."""
    service: str = ""
    """The name that Sentinels know the server by."""
    options: dict[str, Any]
    """Of redis-py's connections: user, password and database, and what the query sets."""

    @classmethod
    def parse(cls, url: str) -> RedisUrl:
        """Raises ValueError, whose text may quote a part of the password."""
        parts = urlsplit(url)
        base, _, suffix = parts.scheme.partition("+")
        kind: Kind = "server"
        if suffix in ("sentinel", "cluster") and base in ("redis", "rediss"):
            kind = "sentinel" if suffix == "sentinel" else "cluster"
        elif suffix:
            raise ValueError("unknown scheme")
        if base != "unix" and "@" in parts.path:
            raise ValueError("a / in the password is not quoted, and the rest of it would pass for a path")
        login, at, hosts = parts.netloc.rpartition("@")
        path, service = parts.path, ""
        if kind == "sentinel":
            service, _, db = path.removeprefix("/").partition("/")
            service, path = unquote(service), f"/{db}" if db else ""
            if not service:
                raise ValueError("no service")
        if kind != "server" and path not in ("", "/") and not path.removeprefix("/").isdigit():
            raise ValueError("the path is no database")
        first = hosts.split(",")[0]
        options = parse_url(f"{base}://{login}{at}{first}{path}{f'?{parts.query}' if parts.query else ''}")
        has_tls = options.get("connection_class") is SSLConnection
        if kind != "server":
            for name in ("host", "port", "connection_class"):
                options.pop(name, None)
            if kind == "cluster" and options.pop("db", 0) != 0:
                raise ValueError("a cluster has database 0 alone")
        return cls(
            kind=kind,
            shown=f"{parts.scheme}://{hosts}{parts.path}",
            username=unquote(parts.username or ""),
            password=unquote(parts.password or ""),
            has_tls=has_tls,
            places=() if base == "unix" else tuple(_place(host, kind) for host in hosts.split(",")),
            service=service,
            options=options,
        )


def _place(text: str, kind: Kind) -> Place:
    parts = urlsplit(f"//{text}")
    if not parts.hostname and kind != "server":
        raise ValueError("a host is missing")
    return parts.hostname or "localhost", parts.port or (26379 if kind == "sentinel" else 6379)

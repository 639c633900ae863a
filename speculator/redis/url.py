"""Where Redis is: one server, or one that Sentinels name.

    redis://[user:password@]host:port/db                    rediss:// with TLS, unix:///path?db=0
    redis+sentinel://[user:password@]host:port,…/service/db   rediss+sentinel://; the hosts are Sentinels

A Redis Cluster is refused: one server carries what 100 engines capture (docs/scaling.md).

A query sets the options of `_OPTIONS` and no others. What else redis-py takes there would change what our client needs,
such as replies in bytes (`decode_responses`) and waits that end (`socket_timeout`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qsl, unquote

from speculator.errors import ConfigError

HostPort = tuple[str, int]

_CLUSTER = re.compile(r"\s*rediss?\+cluster:")
# urllib splits such a URL, too, but it also judges hosts in brackets, and takes several hosts for one.
_URL = re.compile(r"(rediss?(?:\+sentinel)?|unix)://([^/?#]*)([^?#]*)(?:\?([^#]*))?", re.DOTALL)
_HOST = re.compile(r"(?:\[([^\[\]\s]+)\]|([^\[\]:\s]*))(?::([0-9]{1,5}))?")
_NAME = re.compile(r"[a-z_]{1,40}")

_PATH, _TEXT, _TRUE = (r"(?s:.+)", "a path"), (r"(?s:.+)", "text"), ("true", "yes", "1")
_OPTIONS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "db": (r"[0-9]{1,9}", "a number"),
        "username": _TEXT,
        "password": _TEXT,
        "client_name": (r"[!-~]+", "ASCII without spaces"),
        "sentinel_username": _TEXT,
        "sentinel_password": _TEXT,
        "ssl_ca_certs": _PATH,
        "ssl_ca_path": _PATH,
        "ssl_certfile": _PATH,
        "ssl_keyfile": _PATH,
        "ssl_password": _TEXT,
        "ssl_cert_reqs": (r"none|optional|required", "none, optional or required"),
        "ssl_check_hostname": (r"(?i:true|yes|1|false|no|0)", "true or false"),
    }
)
"""By name: a pattern that the whole value matches, and what it is called."""


@dataclass(frozen=True, kw_only=True)
class RedisUrl:
    shown: str
    """Without what is secret."""
    has_tls: bool
    hosts: tuple[HostPort, ...]
    """Empty for a Unix socket."""
    path: str = ""
    """Of a Unix socket."""
    service: str = ""
    """The name that Sentinels know the server by; empty without Sentinels."""
    options: dict[str, Any]
    """Of redis-py's connections: user, password and database, and what the query sets."""

    @classmethod
    def parse(cls, url: str) -> RedisUrl:
        """Raises ConfigError for an option or a Redis Cluster, and ValueError for the rest.

        Only the text of a ConfigError may be shown.
        """
        if _CLUSTER.match(url):
            raise ConfigError(
                "the Redis URL names a Redis Cluster, which is not supported: give one server (redis://, rediss:// or "
                "unix://), or its Sentinels (redis+sentinel://)"
            )
        if not (parts := _URL.fullmatch(url.strip())):
            raise ValueError("no URL of Redis")
        scheme, location, path, query = (part or "" for part in parts.groups())
        is_socket, has_tls, has_sentinels = scheme == "unix", scheme.startswith("rediss"), scheme.endswith("sentinel")
        login, at, hosts = location.rpartition("@")
        # A / or ? in the password that is not quoted would make the rest of it a path or an option.
        if "@" in query or ("@" in path and not (is_socket and (at or not location))):
            raise ValueError("an @ behind the hosts")
        username, _, password = (unquote(part, errors="strict") for part in login.partition(":"))
        service, db = "", path
        if is_socket:
            db = ""
            if hosts or path in ("", "/"):
                raise ValueError("no path of a socket")
        elif has_sentinels:
            service, _, db = path.removeprefix("/").partition("/")
            if not service:
                raise ValueError("no service")
        given = {"username": username, "password": password, "db": db.strip("/")}
        options = [*((name, value) for name, value in given.items() if value), *parse_qsl(query, True)]
        return cls(
            shown=f"{scheme}://{hosts}{path}",
            has_tls=has_tls,
            hosts=() if is_socket else tuple(_host(host, has_sentinels) for host in hosts.split(",")),
            path=unquote(path, errors="strict") if is_socket else "",
            service=unquote(service),
            options=dict(_checked(options, has_sentinels=has_sentinels, has_tls=has_tls)),
        )


def _checked(
    options: Iterable[tuple[str, str]], *, has_sentinels: bool, has_tls: bool
) -> Iterator[tuple[str, str | int | bool]]:
    """Raises ConfigError. Values are not quoted: they may be secret."""
    seen = set()
    for name, value in options:
        if name not in _OPTIONS:
            # What is no name is not quoted: it may be a part of a secret.
            shown = name if _NAME.fullmatch(name) else "something unreadable"
            raise ConfigError(
                f"the Redis URL sets {shown}, which is not an option here: remove it; the options are "
                + ", ".join(_OPTIONS)
            )
        if name in seen:
            raise ConfigError(f"the Redis URL sets {name} twice: remove one")
        if name.startswith("ssl_") and not has_tls:
            raise ConfigError(f"the Redis URL sets {name} without TLS: write rediss://, or remove it")
        if name.startswith("sentinel_") and not has_sentinels:
            raise ConfigError(f"the Redis URL sets {name} without Sentinels: write redis+sentinel://, or remove it")
        seen.add(name)
        pattern, expected = _OPTIONS[name]
        if not re.fullmatch(pattern, value):
            raise ConfigError(f"{name} in the Redis URL is not {expected}: correct or remove it")
        yield name, int(value) if name == "db" else value.lower() in _TRUE if name == "ssl_check_hostname" else value


def _host(text: str, is_sentinel: bool) -> HostPort:
    parts = _HOST.fullmatch(text)
    if parts is None:
        raise ValueError("no host and port")
    host = unquote(parts[1] or parts[2], errors="strict")
    if not host and is_sentinel:
        raise ValueError("a host is missing")
    port = int(parts[3]) if parts[3] else 26379 if is_sentinel else 6379
    if not 0 < port < 2**16:
        raise ValueError("no port")
    return host.lower() or "localhost", port

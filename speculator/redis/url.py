"""Where Redis is: one server, or one that Sentinels name.

    redis://[user:password@]host:port/db                    rediss:// with TLS, unix:///path?db=0
    redis+sentinel://[user:password@]host:port,…/service/db   rediss+sentinel://; the hosts are Sentinels

A Redis Cluster is refused: one server carries what 100 engines capture (docs/scaling.md).

A query sets the options of `_OPTIONS` and no others. What else redis-py takes there would change what our client needs,
such as replies in bytes (`decode_responses`) and waits that end (`socket_timeout`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qsl, unquote

from speculator.errors import ConfigError

Place = tuple[str, int]

_CLUSTER = re.compile(r"\s*rediss?\+cluster:")
# What urllib splits, too; it also judges hosts in brackets, and takes several hosts for one.
_URL = re.compile(r"(rediss?(?:\+sentinel)?|unix)://([^/?#]*)([^?#]*)(?:\?([^#]*))?", re.DOTALL)
_HOST = re.compile(r"(?:\[([^\[\]\s]+)\]|([^\[\]:\s]*))(?::([0-9]{1,5}))?")
_NUMBER = re.compile(r"[0-9]{1,9}")
_NAME = re.compile(r"[a-z_]{1,40}")


def _number(text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise ValueError
    return int(text)


def _boolean(text: str) -> bool:
    return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[text.lower()]


def _text(text: str) -> str:
    if not text:
        raise ValueError
    return text


def _client_name(text: str) -> str:
    if not re.fullmatch(r"[!-~]+", text):
        raise ValueError
    return text


def _requirement(text: str) -> str:
    return {name: name for name in ("none", "optional", "required")}[text]


@dataclass(frozen=True)
class _Option:
    parse: Callable[[str], Any]
    """Raises ValueError or KeyError."""
    expected: str


_PATH, _WORD = _Option(_text, "a path"), _Option(_text, "text")
_OPTIONS: Mapping[str, _Option] = MappingProxyType(
    {
        "db": _Option(_number, "a number"),
        "username": _WORD,
        "password": _WORD,
        "client_name": _Option(_client_name, "ASCII without spaces"),
        "sentinel_username": _WORD,
        "sentinel_password": _WORD,
        "ssl_ca_certs": _PATH,
        "ssl_ca_path": _PATH,
        "ssl_certfile": _PATH,
        "ssl_keyfile": _PATH,
        "ssl_password": _WORD,
        "ssl_cert_reqs": _Option(_requirement, "none, optional or required"),
        "ssl_check_hostname": _Option(_boolean, "true or false"),
    }
)
# Options of redis-py that mean something else than the one of ours that they look like.
_UNLIKE = ("ssl", "ssl_ca_data")


@dataclass(frozen=True, kw_only=True)
class RedisUrl:
    shown: str
    """Without what is secret."""
    username: str
    password: str
    has_tls: bool
    places: tuple[Place, ...]
    """Hosts and ports; empty for a Unix socket."""
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
        base, _, suffix = scheme.partition("+")
        has_sentinels = bool(suffix)
        login, at, hosts = location.rpartition("@")
        # A / or ? in the password that is not quoted would make the rest of it a path or an option.
        if "@" in query or ("@" in path and not (base == "unix" and (at or not location))):
            raise ValueError("an @ behind the hosts")
        username, _, password = (unquote(part, errors="strict") for part in login.partition(":"))
        service, socket, db = "", "", path
        if base == "unix":
            socket, db = unquote(path, errors="strict"), ""
            if hosts or socket in ("", "/"):
                raise ValueError("no path of a socket")
        if has_sentinels:
            service, _, db = path.removeprefix("/").partition("/")
            service = unquote(service)
            if not service:
                raise ValueError("no service")
        has_tls = base == "rediss"
        options = dict(_options(query, has_sentinels=has_sentinels, has_tls=has_tls))
        if (db := db.strip("/")) and options.setdefault("db", _number(db)) != _number(db):
            raise ConfigError("the Redis URL names two databases: remove the option db or the path")
        for name, value in (("username", username), ("password", password)):
            if value and name in options:
                raise ConfigError(f"the Redis URL names two {name}s: remove the option {name}")
            options |= {name: value} if value else {}
        return cls(
            shown=f"{scheme}://{hosts}{path}",
            username=options.get("username", ""),
            password=options.get("password", ""),
            has_tls=has_tls,
            places=() if base == "unix" else tuple(_place(host, has_sentinels) for host in hosts.split(",")),
            path=socket,
            service=service,
            options=options,
        )


def _options(query: str, *, has_sentinels: bool, has_tls: bool) -> Iterator[tuple[str, Any]]:
    """Raises ConfigError. Values are not quoted: they may be secret."""
    seen = set()
    for name, value in parse_qsl(query, keep_blank_values=True):
        option = _OPTIONS.get(name)
        if option is None:
            near = [] if name in _UNLIKE else difflib.get_close_matches(name, _OPTIONS, 1)
            # What is no name is not quoted: it may be a piece of a secret.
            shown = name if _NAME.fullmatch(name) else "something unreadable"
            raise ConfigError(
                f"the Redis URL sets {shown}, which is not an option here: remove it"
                + (f", or write {near[0]}" if near else f"; the options are {', '.join(_OPTIONS)}")
            )
        if name in seen:
            raise ConfigError(f"the Redis URL sets {name} twice: remove one")
        if name.startswith("ssl_") and not has_tls:
            raise ConfigError(f"the Redis URL sets {name} without TLS: write rediss://, or remove it")
        if name.startswith("sentinel_") and not has_sentinels:
            raise ConfigError(f"the Redis URL sets {name} without Sentinels: write redis+sentinel://, or remove it")
        seen.add(name)
        try:
            yield name, option.parse(value)
        except (ValueError, KeyError):
            raise ConfigError(f"{name} in the Redis URL is not {option.expected}: correct or remove it") from None


def _place(text: str, is_sentinel: bool) -> Place:
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

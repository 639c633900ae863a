"""Redis URLs that somebody copied, mistyped or meant for another client."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from inspect import signature
from urllib.parse import quote

import redis
from redis.sentinel import Sentinel

from speculator.errors import ConfigError, StreamError
from speculator.redis.client import connect
from speculator.redis.trace_stream import TraceStream
from tests.hostile.judge import Choose, FailureError, Inputs, Outcome

SECRET = "hunter2hunter2"
"""Made up, to be found where it must not be."""
PAYLOAD = bytes(range(256))

_CLIENTS = (redis.Redis, redis.ConnectionPool, redis.SSLConnection, redis.UnixDomainSocketConnection, Sentinel)
_OPTIONS = [
    *sorted({name for one in _CLIENTS for base in one.__mro__ for name in signature(base).parameters}),
    *("queue_class", "timeout", "skip_full_coverage_check", "read_from_replicas", "virtual", "sentinel_password"),
    *("DB", "Decode_Responses", "decode%5Fresponses", "no_such_option", "é"),
]
"""Options of redis-py's clients, of others, and of none."""
_VALUES = (
    *("", "0", "1", "3", "-1", "1.5", "1e999", "nan", "true", "True", "false", "None", "none", "required", "utf-16"),
    *("ascii", "strict", "{}", "[]", "/nowhere", "a b", "%00", "%ff", "%0d%0a", "9" * 30, "9" * 5000, "é", "²"),
    *(";db=1", SECRET, f"a@{SECRET}", "%", "#", "&", "="),
)
_LOGINS = ("", "@", f":{SECRET}@", f"user:{SECRET}@", "user@", f"a:/{SECRET}@", f"a:?{SECRET}=1@", f"a:%zz#{SECRET}@")
_HOSTS = (
    *("127.0.0.1:1", "[::1]:1", "[::1]", "127.0.0.1:1,127.0.0.1:2", "127.0.0.1:1,[::1]:1", "[127.0.0.1:1", "::1]:1"),
    *("", ":", ":1", "127.0.0.1:0", "127.0.0.1:70000", "127.0.0.1:x", "127.0.0.1:²", ",", "%00", "%ff", "a b", ".."),
    *("\n", "x" * 70, "[v1.a]", "[::1%25lo]:1"),
)
_SCHEMES = (
    *("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster"),
    *("unix+cluster", "REDIS", "http", "", "valkey", "redis+", "redis+socket"),
)
_PATHS = (
    *("", "/", "/0", "/1", "/99999", "/-1", "/first", "/0/", "/0/1", "/²", "/m", "/m/0", "/m/x", "/%00", "/a@b", "//"),
)


def make(choose: Choose, socket_url: str) -> str:
    """Half of them lead to the server at `socket_url` as far as scheme, login and path go."""

    def one(parts: Sequence[str]) -> str:
        return parts[choose(len(parts))]

    other = f"{one(_SCHEMES)}://{one(_LOGINS)}{one(_HOSTS)}{one(_PATHS)}"
    base = socket_url.partition("?")[0] if choose(2) else other
    options = [f"{one(_OPTIONS)}={one(_VALUES)}" for _ in range(choose(2) * choose(4))]
    options += [f"db={choose(16)}", f"client_name={quote(one(['engine', 'é', 'a b']))}"][: choose(3)]
    return base + ("?" + "&".join(options) if options else "")


def inputs(choose: Choose, socket_url: str, count: int) -> Inputs:
    for number in range(count):
        url = make(choose, socket_url)
        yield f"{number}: {url[:200]!r}", partial(use, url)


def use(url: str) -> Outcome:
    """Connect and pass a trace through, bytes intact; or be refused in one line without the password."""
    try:
        client = connect(url)
    except (ConfigError, StreamError) as refusal:
        if SECRET in str(refusal) or "\n" in str(refusal):
            raise FailureError(f"told as {refusal}") from refusal
        return type(refusal).__name__
    with contextlib.closing(client):
        client.flushdb()
        stream = TraceStream(client, "hostile", max_bytes=10_000)
        entry_id = stream.append(PAYLOAD, trace_id="é")
        found = [(entry.id, entry.trace_id, entry.payload) for entry in stream.read(10, 0)]
        stream.ack([entry_id])
        lag = stream.lag()
        accounts = (lag.appended, lag.acked, lag.pending, lag.undelivered)
        if found != [(entry_id, "é", PAYLOAD)] or accounts != (1, 1, 0, 0):
            raise FailureError(f"{found}, {lag}")
    return "works"

"""Redis URLs that somebody copied, mistyped or meant for another client."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from urllib.parse import quote

from speculator.errors import ConfigError, StreamError
from speculator.redis.client import connect
from speculator.redis.trace_stream import TraceStream
from tests.hostile.judge import FailureError, Outcome

SECRET = "hunter2hunter2"
"""Made up, to be found where it must not be."""
PAYLOAD = bytes(range(256))

_OPTIONS = (
    *("decode_responses", "encoding", "encoding_errors", "protocol", "legacy_responses", "db"),
    *("socket_timeout", "socket_connect_timeout", "socket_read_size", "socket_keepalive"),
    *("socket_keepalive_options", "retry", "retry_on_timeout", "retry_on_error", "health_check_interval"),
    *("max_connections", "timeout", "client_name", "lib_name", "lib_version", "driver_info", "username"),
    *("password", "credential_provider", "host", "port", "path", "unix_socket_path", "connection_class"),
    *("parser_class", "queue_class", "redis_connect_func", "single_connection_client", "cache_config"),
    *("event_dispatcher", "virtual", "ssl", "ssl_cert_reqs", "ssl_ca_certs", "ssl_ca_path", "ssl_ca_data"),
    *("ssl_certfile", "ssl_keyfile", "ssl_password", "ssl_check_hostname", "ssl_min_version", "ssl_ciphers"),
    *("ssl_validate_ocsp", "ssl_include_verify_flags", "sentinel_username", "sentinel_password"),
    *("skip_full_coverage_check", "read_from_replicas", "DB", "Decode_Responses", "decode%5Fresponses"),
    *("no_such_option", "é"),
)
_VALUES = (
    *("", "0", "1", "3", "-1", "1.5", "1e999", "nan", "true", "True", "false", "None", "none", "required", "utf-16"),
    *(
        "ascii",
        "strict",
        "{}",
        "[]",
        "/nowhere",
        "a b",
        "%00",
        "%ff",
        "%0d%0a",
        "9" * 30,
        "9" * 5000,
        "é",
        "²",
        ";db=1",
    ),
    *(SECRET, f"a@{SECRET}", "%", "#", "&", "="),
)
_LOGINS = ("", "@", f":{SECRET}@", f"user:{SECRET}@", "user@", f"a:/{SECRET}@", f"a:?{SECRET}=1@", f"a:%zz#{SECRET}@")
_HOSTS = (
    *("127.0.0.1:1", "[::1]:1", "[::1]", "127.0.0.1:1,127.0.0.1:2", "127.0.0.1:1,[::1]:1", "[127.0.0.1:1", "::1]:1"),
    *(
        "",
        ":",
        ":1",
        "127.0.0.1:0",
        "127.0.0.1:70000",
        "127.0.0.1:x",
        "127.0.0.1:²",
        ",",
        "%00",
        "%ff",
        "a b",
        "..",
        "\n",
    ),
    *("x" * 70, "[v1.a]", "[::1%25lo]:1"),
)
_SCHEMES = (
    *(
        "redis",
        "rediss",
        "unix",
        "redis+sentinel",
        "rediss+sentinel",
        "redis+cluster",
        "rediss+cluster",
        "unix+cluster",
    ),
    *("REDIS", "http", "", "valkey", "redis+", "redis+socket"),
)
_PATHS = (
    "",
    "/",
    "/0",
    "/1",
    "/99999",
    "/-1",
    "/first",
    "/0/",
    "/0/1",
    "/²",
    "/m",
    "/m/0",
    "/m/x",
    "/%00",
    "/a@b",
    "//",
)


def make(choose: Callable[[int], int], socket_url: str) -> str:
    """Half of them lead to the server at `socket_url` as far as scheme, login and path go."""

    def one(parts: tuple[str, ...] | list[str]) -> str:
        return parts[choose(len(parts))]

    other = f"{one(_SCHEMES)}://{one(_LOGINS)}{one(_HOSTS)}{one(_PATHS)}"
    base = socket_url.partition("?")[0] if choose(2) else other
    options = [f"{one(_OPTIONS)}={one(_VALUES)}" for _ in range(choose(2) * choose(4))]
    options += [f"db={choose(16)}", f"client_name={quote(one(['engine', 'é', 'a b']))}"][: choose(3)]
    return base + ("?" + "&".join(options) if options else "")


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
        if found != [(entry_id, "é", PAYLOAD)] or (lag.appended, lag.acked, lag.pending, lag.undelivered) != (
            1,
            1,
            0,
            0,
        ):
            raise FailureError(f"{found}, {lag}")
    return "works"

"""Which Redis a URL means; what is secret in it is shown nowhere."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from urllib.parse import quote

import pytest
import redis
from redis import connection, sentinel

from speculator.errors import ConfigError, StreamError
from speculator.redis.client import connect
from speculator.redis.url import RedisUrl


def test_one_server() -> None:
    url = RedisUrl.parse("rediss://engine:se%40cret@redis.example:7000/3?ssl_ca_certs=/ca.pem")
    assert (url.service, url.hosts, url.has_tls) == ("", (("redis.example", 7000),), True)
    assert url.options == {"username": "engine", "password": "se@cret", "db": 3, "ssl_ca_certs": "/ca.pem"}
    assert url.shown == "rediss://redis.example:7000/3"
    assert RedisUrl.parse("unix:///tmp/redis.sock?db=0").hosts == ()
    assert RedisUrl.parse("redis://localhost").hosts == (("localhost", 6379),)


def test_sentinels() -> None:
    url = RedisUrl.parse("redis+sentinel://engine:secret@a:26380,[::1],b/my%20master/2?sentinel_password=other")
    assert url.hosts == (("a", 26380), ("::1", 26379), ("b", 26379))
    assert (url.service, url.has_tls) == ("my master", False)
    assert url.options == {"username": "engine", "password": "secret", "db": 2, "sentinel_password": "other"}
    assert "secret" not in url.shown
    assert RedisUrl.parse("rediss+sentinel://a/m").has_tls


def test_a_login_may_be_in_the_query_as_redis_py_writes_it() -> None:
    url = RedisUrl.parse("unix:///run/redis.sock?db=0&username=engine&password=se%40cret")
    assert url.options == {"db": 0, "username": "engine", "password": "se@cret"}
    assert url.shown == "unix:///run/redis.sock"
    with pytest.raises(ConfigError, match="username twice"):
        RedisUrl.parse("unix://engine@/run/redis.sock?username=other")


def test_an_ipv6_zone_may_be_quoted() -> None:
    for zone in ("%25eth0", "%eth0"):
        assert RedisUrl.parse(f"redis://[fe80::1{zone}]:7000").hosts == (("fe80::1%eth0", 7000),)


@pytest.mark.parametrize("scheme", ["redis+cluster", "rediss+cluster"])
def test_a_cluster_is_refused(scheme: str) -> None:
    with pytest.raises(ConfigError, match="Redis Cluster, which is not supported: give one server") as refused:
        connect(f"{scheme}://:hidden@a:7001,b:7002")
    assert "hidden" not in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "http://localhost",
        "redis+something://localhost",
        "unix+cluster://localhost",
        "redis+sentinel://:hidden@localhost",
        "redis+sentinel://:hidden@localhost/",
        "redis+sentinel://:hidden@localhost/service/first",
        "redis+sentinel://:hidden@a,,b/service",
        "redis://localhost?no_such_option=hidden",
        "redis://engine:1/hidden@127.0.0.1:1/0",
        "redis://engine:1?hidden=2@127.0.0.1:1/0",
        "redis://engine:1#hidden@127.0.0.1:1/0",
        "redis://engine:hidden@127.0.0.1:0/0",
        "redis://engine:hidden@127.0.0.1:99999/0",
        "redis://engine:hidden@[127.0.0.1/0",
        "redis://engine:hidden%ff@127.0.0.1/0",
        "redis://engine:hidden@127.0.0.1:1/first",
        "redis://engine:hidden@127.0.0.1:1/1?db=2",
        "redis://engine:1@127.0.0.1:1/0?=hidden%20",
        "redis://engine:1@127.0.0.1:1/0?password=hidden",
        "rediss://engine:1@127.0.0.1:1/0?ssl_ca_certs=/hidden.pem",
        "rediss://engine:1@127.0.0.1:1/0?ssl_cert_reqs=hidden",
        "rediss://engine:1@127.0.0.1:1/0?ssl_check_hostname=hidden",
        "rediss+sentinel://127.0.0.1:1/m?sentinel_password=hidden&sentinel_password=hidden",
        "redis://127.0.0.1:1/0?sentinel_password=hidden",
        "unix://engine:hidden/2@/tmp/redis.sock",
        "unix://:hidden@host/tmp/redis.sock",
        "redis+sentinel://engine:1/hidden@127.0.0.1:1/service",
    ],
)
def test_what_cannot_be_used_is_refused_without_quoting_it(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        connect(text)
    assert "hidden" not in str(refused.value)
    assert refused.value.__cause__ is None
    assert refused.value.__context__ is None or refused.value.__suppress_context__


def test_where_nothing_answers_the_hosts_are_named() -> None:
    with pytest.raises(StreamError, match=r"127\.0\.0\.1:1") as refused:
        connect("redis+sentinel://:hidden@127.0.0.1:1/m")
    assert "hidden" not in str(refused.value)


def options_of_redis_py() -> Iterator[str]:
    """Every option that a URL can reach in redis-py, and those that it reads as other than text."""
    yield from connection.URL_QUERY_ARGUMENT_PARSERS
    for kind in (
        *(connection.AbstractConnection, connection.Connection, connection.SSLConnection),
        *(connection.UnixDomainSocketConnection, connection.ConnectionPool, connection.BlockingConnectionPool),
        redis.Redis,
        *(sentinel.Sentinel, sentinel.SentinelConnectionPool, sentinel.SentinelManagedConnection),
    ):
        yield from (name for name in inspect.signature(kind.__init__).parameters if name != "self")


USABLE = {
    "db": "0",
    "client_name": "engine-1",
    "ssl_ca_certs": __file__,
    "ssl_ca_path": "/",
    "ssl_certfile": __file__,
    "ssl_keyfile": __file__,
    "ssl_password": "secret",
    "ssl_cert_reqs": "none",
    "ssl_check_hostname": "false",
}


@pytest.mark.parametrize("name", sorted(set(options_of_redis_py())))
def test_every_option_of_redis_py_is_understood_or_refused_by_name(name: str, redis_url: str) -> None:
    """An option that a new redis-py brings is refused until it is understood."""
    socket = redis_url.partition("?")[0]
    value = quote(USABLE.get(name, "1"))
    if name in ("username", "password"):
        with pytest.raises(StreamError, match=r"127\.0\.0\.1:1"):
            connect(f"redis://127.0.0.1:1/0?{name}={value}")
    elif name not in USABLE:
        with pytest.raises(ConfigError, match=rf"sets {name}, ") as refused:
            connect(f"{socket}?{name}={value}")
        assert "\n" not in str(refused.value)
    elif name.startswith("ssl_"):
        with pytest.raises(ConfigError, match=rf"{name} without TLS"):
            connect(f"{socket}?{name}={value}")
        with pytest.raises(StreamError, match=r"127\.0\.0\.1:1"):
            connect(f"rediss://127.0.0.1:1/0?{name}={value}")
    else:
        with connect(f"{socket}?{name}={value}") as client:
            assert client.echo("\xff") == "\xff".encode()


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("decode_response=true", "sets decode_response, "),
        ("ssl_ca_cert=/ca.pem", "sets ssl_ca_cert, .*; the options are .* ssl_ca_certs"),
        ("ssl=true", "remove it; the options are"),
        ("ssl_ca_data=x", "remove it; the options are"),
        ("DB=1", "something unreadable"),
        ("db=1&db=1", "db twice"),
        ("db=first", "db in the Redis URL is not a number"),
        ("db=", "db in the Redis URL is not a number"),
        ("client_name=an%20engine", "client_name in the Redis URL is not ASCII without spaces"),
        ("decode%5Fresponses", "sets decode_responses, "),
    ],
)
def test_an_option_that_cannot_be_used_is_named(query: str, told: str, redis_url: str) -> None:
    with pytest.raises(ConfigError, match=told):
        connect(f"{redis_url.partition('?')[0]}?{query}")


def test_a_database_is_named_by_path_or_option(redis_url: str) -> None:
    assert RedisUrl.parse("redis://a/3").options == RedisUrl.parse("redis://a?db=3").options == {"db": 3}
    with pytest.raises(ConfigError, match="sets db twice"):
        RedisUrl.parse("redis://a/3?db=3")
    with pytest.raises(StreamError, match="out of range"):
        connect(f"{redis_url.partition('?')[0]}?db=99999")

"""Which Redis a URL means, with nothing secret shown; and a master behind Sentinels that dies."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import redis
from redis import connection, sentinel

from speculator.errors import ConfigError, StreamError
from speculator.host import free_port
from speculator.redis.client import RedisUrl, connect
from speculator.redis.control_plane import DraftPointer
from speculator.redis.trace_stream import TraceStream
from tests.fixtures.redis_servers import Server, Servers, servers
from tests.fixtures.waiting import wait_until


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
        "",
        "localhost",
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


SENTINEL = """\
sentinel monitor traces 127.0.0.1 {master} 1
sentinel down-after-milliseconds traces 300
sentinel failover-timeout traces 2000
"""
QUICK = ("--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0", "--appendonly", "no")


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Servers]:
    with servers(tmp_path) as all_servers:
        yield all_servers


def test_a_master_that_dies_is_replaced_and_the_books_still_balance(started: Servers) -> None:
    ports = [free_port() for _ in range(3)]
    master, _, _ = _watched(started, ports)
    nobody = free_port()
    url = f"redis+sentinel://127.0.0.1:{nobody},127.0.0.1:{ports[2]}/traces/1"
    with connect(url) as client:
        stream, pointer = TraceStream(client, "m", max_bytes=1 << 20), DraftPointer(client, "m")
        for number in range(10):
            stream.append(b"x" * 100, trace_id=f"before-{number}")
        pointer.publish(7)
        first = stream.read(4, 0)
        assert client.execute_command("WAIT", 1, 5000) == 1
        master.kill()
        with pytest.raises(StreamError, match="cannot be reached"):
            stream.append(b"x", trace_id="nobody is there")
        started_s = time.monotonic()
        wait_until(lambda: _is_appended(stream, "after"))
        assert time.monotonic() - started_s < 15
        # The read that was in hand, what waited, and what came since: all once, and the books know.
        stream.ack([entry.id for entry in first])
        rest = stream.read(100, 0)
        assert [entry.trace_id for entry in [*first, *rest]] == [*(f"before-{n}" for n in range(10)), "after"]
        stream.ack([entry.id for entry in rest])
        lag = stream.lag()
        assert (lag.appended, lag.acked, lag.pending, lag.undelivered, lag.lost) == (11, 11, 0, 0, 0)
        assert pointer.published() == 7
        assert pointer.replace(7, 8)


def test_a_master_that_was_demoted_is_left(started: Servers) -> None:
    """It lives on, as a replica that refuses writes: the connection goes to the new one. After a failover by hand a
    Sentinel takes ten seconds to demote it, so we do.
    """
    ports = [free_port() for _ in range(3)]
    master, replica, sentinel = _watched(started, ports)
    with (
        connect(f"redis+sentinel://127.0.0.1:{ports[2]}/traces") as client,
        sentinel.client() as asked,
        master.client() as old,
        replica.client() as new,
    ):
        stream = TraceStream(client, "m", max_bytes=1 << 20)
        stream.append(b"x", trace_id="before")
        assert client.execute_command("WAIT", 1, 5000) == 1
        wait_until(lambda: _is_failing_over(asked))
        wait_until(lambda: asked.sentinel_master("traces")["port"] == ports[1])
        old.replicaof("127.0.0.1", ports[1])
        wait_until(lambda: _is_appended(stream, "after"))
        assert new.xlen("slipstream:{m}:traces") == 2


def test_an_unknown_service_is_said(started: Servers) -> None:
    port = free_port()
    started.start(port, config="")
    with pytest.raises(StreamError, match="No master found for 'traces'"):
        connect(f"redis+sentinel://127.0.0.1:{port}/traces")


def _watched(started: Servers, ports: list[int]) -> tuple[Server, Server, Server]:
    """Master, replica and Sentinel, which looks for replicas at its start and then every ten seconds."""
    master = started.start(ports[0], *QUICK)
    replica = started.start(ports[1], *QUICK, "--replicaof", "127.0.0.1", str(ports[0]))
    with replica.client() as client:
        wait_until(lambda: client.info("replication")["master_link_status"] == "up")
    sentinel = started.start(ports[2], config=SENTINEL.format(master=ports[0]))
    with sentinel.client() as asked:
        wait_until(lambda: asked.sentinel_master("traces")["num-slaves"] == 1)
    return master, replica, sentinel


def _is_failing_over(sentinel: redis.Redis) -> bool:
    """Whether it has begun: it wants to have heard from the replica."""
    try:
        return bool(sentinel.execute_command("SENTINEL FAILOVER", "traces"))
    except redis.ResponseError:
        return False


def _is_appended(stream: TraceStream, trace_id: str) -> bool:
    try:
        stream.append(b"x", trace_id=trace_id)
    except StreamError:
        return False
    return True

"""Which Redis a URL means; what is secret in it is shown nowhere."""

from __future__ import annotations

import pytest

from speculator.errors import ConfigError, StreamError
from speculator.redis_client import connect
from speculator.redis_url import RedisUrl


def test_one_server() -> None:
    url = RedisUrl.parse("rediss://engine:se%40cret@redis.example:7000/3?ssl_ca_certs=/ca.pem")
    assert (url.kind, url.places, url.has_tls) == ("server", (("redis.example", 7000),), True)
    assert (url.username, url.password, url.shown) == ("engine", "se@cret", "rediss://redis.example:7000/3")
    assert RedisUrl.parse("unix:///tmp/redis.sock?db=0").places == ()
    assert RedisUrl.parse("redis://localhost").places == (("localhost", 6379),)


def test_sentinels() -> None:
    url = RedisUrl.parse("redis+sentinel://engine:secret@a:26380,[::1],b/my%20master/2?sentinel_password=other")
    assert url.kind == "sentinel"
    assert url.places == (("a", 26380), ("::1", 26379), ("b", 26379))
    assert (url.service, url.has_tls) == ("my master", False)
    assert url.options == {"username": "engine", "password": "secret", "db": 2, "sentinel_password": "other"}
    assert "secret" not in url.shown
    assert RedisUrl.parse("rediss+sentinel://a/m").has_tls


def test_a_cluster() -> None:
    url = RedisUrl.parse("redis+cluster://:secret@a:7001,b:7002/0")
    assert (url.kind, url.places) == ("cluster", (("a", 7001), ("b", 7002)))
    assert url.options == {"password": "secret"}


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
        "redis+cluster://:hidden@localhost/1",
        "redis+cluster://:hidden@localhost:x",
        "redis+cluster://localhost?no_such_option=hidden",
        "redis://engine:1/hidden@127.0.0.1:1/0",
        "redis+sentinel://engine:1/hidden@127.0.0.1:1/service",
    ],
)
def test_what_cannot_be_used_is_refused_without_quoting_it(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        connect(text)
    assert "hidden" not in str(refused.value)
    assert refused.value.__suppress_context__


@pytest.mark.parametrize("text", ["redis+sentinel://:hidden@127.0.0.1:1/m", "redis+cluster://:hidden@127.0.0.1:1"])
def test_where_nothing_answers_the_hosts_are_named(text: str) -> None:
    with pytest.raises(StreamError, match=r"127\.0\.0\.1:1") as refused:
        connect(text)
    assert "hidden" not in str(refused.value)

"""Redis behind a Sentinel: what the stream and the pointer do when the master dies, with real processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from speculator.errors import StreamError
from speculator.host import free_port
from speculator.redis.client import connect
from speculator.redis.control_plane import DraftPointer
from speculator.redis.trace_stream import TraceStream
from tests.fixtures.redis_servers import Server, Servers, servers
from tests.fixtures.waiting import wait_until

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

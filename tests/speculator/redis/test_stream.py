"""The trace stream on a real Redis: delivery, acknowledgement, the byte cap, and every loss counted."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from speculator.errors import StreamError
from speculator.redis.client import LostTransactionError, RedisKeys, connect
from speculator.redis.control_plane import DraftPointer
from speculator.redis.embedded import EmbeddedRedis
from speculator.redis.stream_accounting import MAX_DEAD_LETTERS, StreamLag
from speculator.redis.trace_stream import StreamEntry, TraceStream, cap_for

MODEL = "smollm2"
CAP = 1 << 20
KEYS = RedisKeys(model_key=MODEL)
TRACES = KEYS.traces
# Above the 4 KiB of a stream node, as real traces are, so that each entry can be trimmed alone.
ENTRY = b"x" * 5000


def open_stream(redis_client: redis.Redis, *, consumer: str = "trainer-0", max_bytes: int = CAP) -> TraceStream:
    return TraceStream(redis_client, MODEL, max_bytes=max_bytes, consumer=consumer)


def append(traces: TraceStream, count: int, payload: bytes = ENTRY) -> list[str]:
    return [traces.append(payload, trace_id=f"t{i}") for i in range(count)]


def ids_of(entries: list[StreamEntry]) -> list[str]:
    return [entry.id for entry in entries]


@pytest.mark.parametrize(("width", "least_bytes", "most_bytes"), [(576, 512 << 20, 512 << 20), (4096, 2.0e9, 2.1e9)])
def test_the_cap_follows_from_the_width_of_the_target(
    width: int, least_bytes: float, most_bytes: float, tmp_path: Path
) -> None:
    sizes = {"hidden_size": width, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}
    config = {**sizes, "vocab_size": 32, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert least_bytes <= cap_for(tmp_path) <= most_bytes


def balance(lag: StreamLag) -> int:
    return lag.appended - lag.acked - lag.pending - lag.undelivered - lag.skipped - lag.lost - lag.erased


def test_an_entry_arrives_as_it_was_appended(redis_client: redis.Redis) -> None:
    traces = open_stream(redis_client)
    entry_id = traces.append(b"\x00payload", trace_id="abc")
    [entry] = traces.read(10, 0)
    assert (entry.id, entry.trace_id, entry.payload) == (entry_id, "abc", b"\x00payload")
    assert abs(entry.created_ms - int(entry_id.split("-")[0])) < 10_000
    assert traces.read(10, 0) == []


def test_every_key_of_a_model_shares_one_slot(redis_client: redis.Redis) -> None:
    traces, pointer = open_stream(redis_client), DraftPointer(redis_client, MODEL)
    append(traces, 1)
    traces.dead_letter(traces.read(1, 0)[0], "reason")
    pointer.publish(3)
    pointer.pin(3)
    pointer.report_engine("engine-0", {"version": 3})
    keys: Any = redis_client.keys()
    assert len(keys) == 9
    assert all(key.startswith(b"slipstream:{smollm2}:") for key in keys)


def test_lag_follows_an_entry_through_its_life(redis_client: redis.Redis) -> None:
    traces = open_stream(redis_client)
    append(traces, 3)
    assert traces.lag() == StreamLag(
        pending=0,
        undelivered=3,
        length=3,
        bytes=15_000,
        appended=3,
        acked=0,
        lost=0,
        dead_lettered=0,
        erased=0,
        expired=0,
    )
    first, second = traces.read(2, 0)
    assert (traces.lag().pending, traces.lag().undelivered) == (2, 1)
    traces.ack([first.id])
    traces.ack([first.id, "0-1"])
    traces.ack([])
    traces.dead_letter(second, "NaN features")
    traces.dead_letter(second, "NaN features")
    lag = traces.lag()
    assert (lag.pending, lag.undelivered, lag.acked, lag.dead_lettered, lag.length) == (0, 1, 2, 1, 3)
    assert balance(lag) == 0


def test_a_restarted_consumer_first_gets_what_it_had_not_acked(redis_client: redis.Redis) -> None:
    before = open_stream(redis_client)
    ids = append(before, 7)
    before.ack(ids_of(before.read(5, 0))[:1])
    after = open_stream(redis_client)
    assert ids_of(after.read(3, 0)) == ids[1:4]
    assert ids_of(after.read(3, 0)) == ids[4:5]
    assert ids_of(after.read(3, 0)) == ids[5:]
    assert after.read(3, 0) == []


def test_two_consumers_share_the_stream(redis_client: redis.Redis) -> None:
    one, other = (open_stream(redis_client, consumer=name) for name in ("one", "other"))
    ids = append(one, 6)
    assert ids_of(one.read(2, 0)) + ids_of(other.read(2, 0)) + ids_of(one.read(9, 0)) == ids
    assert other.read(9, 0) == []


def test_reading_waits_for_new_entries(redis_url: str, redis_client: redis.Redis) -> None:
    traces = open_stream(redis_client)
    with connect(redis_url) as other:
        timer = threading.Timer(0.05, open_stream(other).append, (b"late",), {"trace_id": "late"})
        timer.start()
        [entry] = traces.read(1, 60_000)
        timer.join()
    assert entry.payload == b"late"


def test_a_long_wait_is_cut_before_the_socket_times_out(redis_client: redis.Redis) -> None:
    assert open_stream(redis_client).read(1, 3_600_000) == []


def test_a_dead_consumers_entries_are_reclaimed(redis_client: redis.Redis) -> None:
    dead, alive = (open_stream(redis_client, consumer=name) for name in ("dead", "alive"))
    ids = append(dead, 5)
    dead.read(5, 0)
    assert alive.reclaim(3_600_000) == []
    assert ids_of(alive.reclaim(0, count=2)) == ids[:2]
    alive.ack(ids[:2])
    assert ids_of(alive.reclaim(0)) == ids[2:]
    alive.ack(ids[2:])
    assert alive.reclaim(0) == []
    assert (alive.lag().acked, alive.lag().pending) == (5, 0)


def test_dead_letters_keep_payload_and_reason_and_are_capped(redis_client: redis.Redis) -> None:
    traces = open_stream(redis_client)
    ids = append(traces, MAX_DEAD_LETTERS + 2)
    for entry in traces.read(len(ids), 0):
        traces.dead_letter(entry, f"reason {entry.trace_id}")
    letters: Any = redis_client.xrange(KEYS.dead_letters)
    assert len(letters) == MAX_DEAD_LETTERS
    oldest = {b"payload": ENTRY, b"trace_id": b"t2", b"entry_id": ids[2].encode(), b"reason": b"reason t2"}
    assert letters[0][1] == oldest
    assert traces.read(3, 0) == []
    assert (traces.lag().acked, traces.lag().dead_lettered) == (len(ids), len(ids))


def test_an_entry_of_somebody_else_is_still_an_entry(redis_client: redis.Redis) -> None:
    traces = open_stream(redis_client)
    redis_client.xadd(TRACES, {"nonsense": "1"})
    redis_client.xadd(TRACES, {"created_ms": b"9" * 5000})
    entries = traces.read(2, 0)
    assert [(entry.payload, entry.trace_id, entry.created_ms) for entry in entries] == [(b"", "", 0)] * 2


# -- the byte cap


def test_the_cap_removes_acked_entries_first(redis_client: redis.Redis) -> None:
    traces = open_stream(redis_client, max_bytes=50_000)
    append(traces, 10)
    traces.ack(ids_of(traces.read(10, 0)))
    kept = append(traces, 8)
    lag = traces.lag()
    assert (lag.lost, lag.bytes, lag.length, lag.undelivered) == (0, 50_000, 10, 8)
    assert ids_of(traces.read(10, 0)) == kept


def test_room_is_made_in_steps(redis_client: redis.Redis) -> None:
    traces = open_stream(redis_client, max_bytes=200_000)
    append(traces, 40)
    traces.ack(ids_of(traces.read(40, 0)))
    append(traces, 1)
    # One entry of room was needed; 5% of the cap, two more, came with it.
    assert traces.lag().length == 38


def test_beyond_the_cap_unacked_entries_go_and_are_counted(redis_client: redis.Redis) -> None:
    traces = open_stream(redis_client, max_bytes=50_000)
    append(traces, 4)
    in_hand = traces.read(4, 0)
    traces.ack([in_hand[3].id])
    ids = append(traces, 13)
    lag = traces.lag()
    assert (lag.bytes, lag.length, lag.lost) == (50_000, 10, 3 + 3)
    assert (lag.pending, lag.undelivered, lag.acked) == (0, 10, 1)
    assert ids_of(traces.read(20, 0)) == ids[3:]
    # What the trainer held was lost to the stream; acking it now changes nothing.
    traces.ack(ids_of(in_hand))
    assert traces.lag().acked == 1
    assert balance(traces.lag()) == 0


def test_small_entries_are_capped_too(redis_client: redis.Redis) -> None:
    traces = open_stream(redis_client, max_bytes=1000)
    append(traces, 250, b"0123456789")
    lag = traces.lag()
    assert (lag.bytes, lag.length, lag.undelivered, lag.lost) == (1000, 100, 100, 150)


def test_a_payload_above_the_cap_is_refused(redis_client: redis.Redis) -> None:
    traces = open_stream(redis_client, max_bytes=100)
    with pytest.raises(StreamError, match="cap of 100"):
        traces.append(b"x" * 101, trace_id="big")
    traces.append(b"x" * 100, trace_id="fits")


def test_a_lowered_cap_is_enforced_by_the_next_append(redis_client: redis.Redis) -> None:
    append(open_stream(redis_client), 19)
    smaller = open_stream(redis_client, max_bytes=30_000)
    append(smaller, 1)
    assert (smaller.lag().length, smaller.lag().lost) == (6, 14)


def test_racing_producers_keep_the_books_exact(redis_url: str, redis_client: redis.Redis) -> None:
    def produce() -> None:
        with connect(redis_url) as redis_client:
            append(open_stream(redis_client, max_bytes=60_000), 60)

    producers = [threading.Thread(target=produce) for _ in range(3)]
    for producer in producers:
        producer.start()
    traces = open_stream(redis_client, max_bytes=60_000)
    num_read = 0
    while any(producer.is_alive() for producer in producers):
        entries = traces.read(4, 1)
        num_read += len(entries)
        traces.ack(ids_of(entries)[:3])
    for producer in producers:
        producer.join()
    lag = traces.lag()
    assert (lag.appended, balance(lag)) == (180, 0)
    assert lag.acked + lag.lost + lag.pending + lag.undelivered == 180
    assert lag.bytes == 5000 * lag.length
    while traces.read(50, 0):
        pass
    # What is left has really been there to read, and only what was counted as lost has not.
    lag = traces.lag()
    assert lag.undelivered == 0
    assert lag.pending == redis_client.xpending(TRACES, "trainer")["pending"]
    assert num_read >= lag.acked


# -- trimming by others


@pytest.mark.parametrize("restart", [False, True])
def test_trimming_past_pending_and_undelivered_is_counted(redis_client: redis.Redis, restart: bool) -> None:
    traces = open_stream(redis_client)
    ids = append(traces, 10)
    traces.ack(ids_of(traces.read(5, 0))[:2])
    redis_client.xtrim(TRACES, maxlen=3, approximate=False)
    if restart:
        traces = open_stream(redis_client)
        assert ids_of(traces.read(10, 0)) == ids[7:]
        assert ids_of(traces.reclaim(0)) == ids[7:]
    lag = traces.lag()
    assert (lag.lost, lag.acked, lag.length, lag.bytes) == (3 + 2, 2, 3, 15_000)
    assert lag.pending + lag.undelivered == 3
    assert balance(lag) == 0


def test_a_stream_that_was_emptied_is_counted(redis_client: redis.Redis) -> None:
    traces = open_stream(redis_client)
    append(traces, 5)
    traces.read(2, 0)
    redis_client.xtrim(TRACES, maxlen=0, approximate=False)
    lag = traces.lag()
    assert (lag.lost, lag.pending, lag.undelivered, lag.bytes) == (5, 0, 0, 0)
    [new] = append(traces, 1)
    assert ids_of(traces.read(5, 0)) == [new]


def test_reclaiming_what_was_trimmed_counts_it(redis_client: redis.Redis) -> None:
    dead, alive = (open_stream(redis_client, consumer=name) for name in ("dead", "alive"))
    ids = append(dead, 4)
    dead.read(4, 0)
    redis_client.xtrim(TRACES, maxlen=1, approximate=False)
    assert ids_of(alive.reclaim(0)) == ids[3:]
    assert alive.lag().lost == 3


def test_what_redis_7_drops_while_reclaiming_is_counted(redis_client: redis.Redis) -> None:
    class Redis7(redis.Redis):
        def xautoclaim(self, *args: Any, **options: Any) -> Any:
            cursor, entries, *deleted = super().xautoclaim(*args, **options)
            if not deleted:
                redis_client.xack(TRACES, "trainer", ids[1])
            return [cursor, [entry for entry in entries if entry[1]], deleted]

    traces = open_stream(Redis7(connection_pool=redis_client.connection_pool))
    ids = append(traces, 3)
    traces.read(3, 0)
    redis_client.xdel(TRACES, ids[1])
    assert ids_of(traces.reclaim(0)) == [ids[0], ids[2]]
    lag = traces.lag()
    assert (lag.skipped, lag.pending) == (1, 2)


def test_pending_entries_that_somebody_deleted_are_counted(redis_client: redis.Redis) -> None:
    traces = open_stream(redis_client)
    ids = append(traces, 4)
    traces.read(3, 0)
    redis_client.xdel(TRACES, ids[1])
    restarted = open_stream(redis_client)
    assert ids_of(restarted.read(9, 0)) == [ids[0], ids[2]]
    assert redis_client.xpending(TRACES, "trainer")["pending"] == 2
    assert restarted.lag().skipped == 1


def test_an_emptied_server_starts_over(redis_client: redis.Redis) -> None:
    traces = open_stream(redis_client)
    append(traces, 3)
    traces.read(1, 0)
    redis_client.flushall()
    assert traces.read(1, 0) == []
    redis_client.flushall()
    [new] = append(traces, 1)
    assert ids_of(traces.read(5, 0)) == [new]
    redis_client.flushall()
    assert balance(traces.lag()) == traces.lag().appended == 0
    redis_client.flushall()
    assert traces.recent(100) == traces.reclaim(0) == []


# -- rebuilding a replay


def test_recent_returns_the_newest_acked_entries_oldest_first(redis_client: redis.Redis) -> None:
    traces = open_stream(redis_client)
    ids = append(traces, 30)
    assert traces.recent(CAP) == []
    traces.read(25, 0)
    traces.ack([*ids[:10], *ids[12:24]])
    assert ids_of(traces.recent(CAP)) == [*ids[:10], *ids[12:24]]
    assert ids_of(traces.recent(3 * len(ENTRY) + 1)) == ids[21:24]
    assert traces.recent(len(ENTRY) - 1) == []


# -- failures


def test_an_unreachable_server_is_a_stream_error_that_names_the_fix(tmp_path: Path) -> None:
    with pytest.raises(StreamError, match="start it, or set SLIPSTREAM_REDIS_URL"):
        connect(f"unix://{tmp_path}/none.sock")
    with pytest.raises(StreamError) as caught:
        connect("redis://user:hunter2@127.0.0.1:1/0")
    assert "127.0.0.1:1" in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path) as server:
        yield server


def test_a_password_is_asked_for(own_server: EmbeddedRedis) -> None:
    with connect(own_server.url) as redis_client:
        redis_client.config_set("requirepass", "hunter2")
    with pytest.raises(StreamError, match="set the user and password"):
        connect(own_server.url)


def test_out_of_memory_is_explained_and_appending_recovers(own_server: EmbeddedRedis) -> None:
    with connect(own_server.url) as redis_client:
        traces = open_stream(redis_client)
        append(traces, 1)
        redis_client.config_set("maxmemory", "1")
        with pytest.raises(StreamError, match="raise its maxmemory"):
            append(traces, 1)
        redis_client.config_set("maxmemory", "0")
        append(traces, 1)
        assert traces.lag().appended == 2


def test_an_append_is_not_sent_again_where_its_connection_is_lost(own_server: EmbeddedRedis) -> None:
    """It may have arrived: sent again at once, one trace would push others out. Redis closes it at a large value."""
    with connect(own_server.url) as client:
        client.config_set("proto-max-bulk-len", 1 << 20)
        traces = open_stream(client, max_bytes=10 * CAP)
        with pytest.raises(LostTransactionError, match="cannot be reached"):
            traces.append(bytes(CAP + 1), trace_id="large")
        statistics: Any = client.info("commandstats")
        assert statistics["cmdstat_watch"]["calls"] == 1
        append(traces, 1)


def test_a_full_redis_gives_up_history_and_goes_on(own_server: EmbeddedRedis) -> None:
    """One smaller than the stream's cap fills with acked entries, and would refuse acks and drafts for ever."""
    with connect(own_server.url) as redis_client:
        traces = open_stream(redis_client, max_bytes=100 * len(ENTRY))
        ids = append(traces, 60)
        assert len(traces.read(50, 0)) == 50
        traces.ack(ids[:50])
        used: int = redis_client.info("memory")["used_memory"]  # type: ignore[index]
        redis_client.config_set("maxmemory", used - 20 * len(ENTRY))
        with pytest.raises(StreamError, match="raise its maxmemory"):
            DraftPointer(redis_client, MODEL).publish(1)
        _append_until_published(traces, redis_client)
        redis_client.config_set("maxmemory", "0")
        lag = traces.lag()
        assert (lag.acked, lag.lost) == (50, 0)
        assert lag.appended == 50 + lag.undelivered > 60 >= lag.length


def _append_until_published(traces: TraceStream, client: redis.Redis) -> None:
    """Each append that fails makes room for the next; one that just fits may leave none for the draft."""
    for _ in range(30):
        with contextlib.suppress(StreamError):
            append(traces, 1)
            DraftPointer(client, MODEL).publish(1)
            return
    raise AssertionError("Redis stays full")


@pytest.mark.parametrize("is_trainer_known", [True, False])
def test_a_full_redis_gives_up_unread_entries_where_none_are_acked(
    own_server: EmbeddedRedis, is_trainer_known: bool
) -> None:
    """It refuses acks, so no history comes about that could be given up."""
    with connect(own_server.url) as redis_client:
        traces = open_stream(redis_client, max_bytes=1000 * len(ENTRY))
        append(traces, 60)
        in_hand = [entry.id for entry in traces.read(4, 0)] if is_trainer_known else []
        used: int = redis_client.info("memory")["used_memory"]  # type: ignore[index]
        redis_client.config_set("maxmemory", used - 5 * len(ENTRY))
        _append_until_published(traces, redis_client)
        traces.ack(in_hand)
        redis_client.config_set("maxmemory", "0")
        lag = traces.lag()
        assert lag.appended == lag.lost + lag.acked + lag.undelivered > 60
        assert 0 < lag.lost < 20, "no more than what makes room"
        assert len(traces.read(4, 0)) == 4


def test_every_public_method_turns_a_dead_server_into_a_stream_error(own_server: EmbeddedRedis) -> None:
    with connect(own_server.url) as redis_client:
        traces, pointer = open_stream(redis_client), DraftPointer(redis_client, MODEL)
        append(traces, 1)
        [entry] = traces.read(1, 0)
        os.kill(own_server.pid, signal.SIGKILL)
        for call in (
            lambda: append(traces, 1),
            lambda: traces.read(1, 0),
            lambda: traces.reclaim(0),
            lambda: traces.ack([entry.id]),
            lambda: traces.dead_letter(entry, "reason"),
            traces.lag,
            lambda: traces.recent(100),
            lambda: pointer.publish(1),
            pointer.desired,
            pointer.published,
            lambda: pointer.replace(1, 2),
            lambda: pointer.pin(1),
            pointer.unpin,
            pointer.pinned,
            lambda: pointer.report_engine("engine-0", {"version": 1}),
            pointer.engines,
            traces.memory_share,
            lambda: traces.expire(1),
        ):
            with pytest.raises(StreamError, match="cannot be reached"):
                call()


@pytest.mark.parametrize("ttl_s", [1e10, 1e300, float("inf")])
def test_a_limit_of_age_from_before_1970_removes_nothing(redis_client: redis.Redis, ttl_s: float) -> None:
    stream = TraceStream(redis_client, "m", max_bytes=1000, ttl_s=ttl_s)
    stream.append(b"a", trace_id="a")
    stream.expire(ttl_s)
    assert (stream.lag().length, stream.lag().expired) == (1, 0)


def test_after_a_failed_read_pending_entries_come_again(redis_client: redis.Redis) -> None:
    class Flaky(redis.Redis):
        fails = False

        def xreadgroup(self, *args: Any, **options: Any) -> Any:
            if self.fails:
                raise redis.ConnectionError("the answer was lost")
            return super().xreadgroup(*args, **options)

    client = Flaky(connection_pool=redis_client.connection_pool)
    traces = open_stream(client)
    ids = append(traces, 2)
    assert ids_of(traces.read(1, 0)) == ids[:1]
    client.fails = True
    with pytest.raises(StreamError):
        traces.read(1, 0)
    client.fails = False
    assert ids_of(traces.read(1, 0)) == ids[:1]
    assert ids_of(traces.read(1, 0)) == ids[1:]

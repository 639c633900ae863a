"""The stream is not ours alone: whatever other clients do to it, the books balance and give it a reason of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from speculator.errors import StreamError
from speculator.redis.client import RedisKeys
from speculator.redis.stream_accounting import StreamLag
from speculator.redis.trace_stream import TraceStream

MODEL, GROUP = "operated", "trainer"
KEYS = RedisKeys(model_key=MODEL)
TRACES = KEYS.traces
PAYLOAD = bytes(5000)


def open_stream(client: redis.Redis, *, consumer: str = "trainer-0", max_bytes: int = 1 << 20) -> TraceStream:
    return TraceStream(client, MODEL, max_bytes=max_bytes, consumer=consumer)


def append(stream: TraceStream, count: int) -> list[str]:
    return [stream.append(PAYLOAD, trace_id=f"t{number}") for number in range(count)]


def learn(stream: TraceStream, count: int) -> int:
    entries = stream.read(count, 0)
    stream.ack([entry.id for entry in entries])
    return len(entries)


def check(lag: StreamLag) -> dict[str, int]:
    """What is not zero; raises AssertionError where the books do not balance."""
    counts = {name: getattr(lag, name) for name in StreamLag.__dataclass_fields__}
    assert all(count >= 0 for count in counts.values()), counts
    parts = ("acked", "pending", "undelivered", "skipped", "lost", "erased")
    assert lag.appended == sum(counts[part] for part in parts), counts
    assert lag.dead_lettered <= lag.acked
    return {name: count for name, count in counts.items() if count and name not in ("length", "bytes")}


def _rename(client: Any) -> None:
    client.rename(TRACES, f"{TRACES}-kept")


def _move_to_new_group(client: Any) -> None:
    client.xgroup_destroy(TRACES, GROUP)
    client.xgroup_create(TRACES, GROUP, "$")


def _ack_by_hand(client: Any) -> None:
    client.xack(TRACES, GROUP, *(row["message_id"] for row in client.xpending_range(TRACES, GROUP, "-", "+", 100)))


def _delete(first: int, last: int) -> Callable[[Any], None]:
    def delete(client: Any) -> None:
        client.xdel(TRACES, *(entry_id for entry_id, _ in client.xrange(TRACES)[first:last]))

    return delete


# Of 12 entries 5 are acked and 3 pending; what is left of them when all that comes has been learnt.
TOUCHED: dict[str, tuple[Callable[[Any], Any], dict[str, int]]] = {
    "nothing": (lambda client: None, {"acked": 12}),
    "group set back": (lambda client: client.xgroup_setid(TRACES, GROUP, "0"), {"acked": 12, "redelivered": 8}),
    "group set to the end": (lambda client: client.xgroup_setid(TRACES, GROUP, "$"), {"acked": 8, "skipped": 4}),
    "group destroyed": (lambda client: client.xgroup_destroy(TRACES, GROUP), {"acked": 12, "redelivered": 8}),
    "group made anew at the end": (_move_to_new_group, {"acked": 8, "skipped": 4}),
    "consumer deleted": (lambda client: client.xgroup_delconsumer(TRACES, GROUP, "trainer-0"), {"acked": 12}),
    "acked by hand": (_ack_by_hand, {"acked": 12}),
    "acked entries deleted": (_delete(0, 3), {"acked": 12}),
    "pending entries deleted": (_delete(5, 7), {"acked": 12}),
    "undelivered entries deleted": (_delete(8, 10), {"acked": 10, "skipped": 2}),
    "newest entries deleted": (_delete(10, 12), {"acked": 10, "skipped": 2}),
    "trimmed": (lambda client: client.xtrim(TRACES, maxlen=3, approximate=False), {"acked": 8, "lost": 4}),
    "trimmed to nothing": (lambda client: client.xtrim(TRACES, maxlen=0), {"acked": 5, "lost": 7}),
    "stream deleted": (lambda client: client.delete(TRACES), {"acked": 5, "lost": 7}),
    "stream renamed": (_rename, {"acked": 5, "lost": 7}),
    "all deleted": (lambda client: client.flushdb(), {}),
    "counter deleted": (lambda client: client.delete(KEYS.num_appended), {"acked": 12}),
    "foreign entry": (lambda client: client.xadd(TRACES, {"hello": "world"}), {"acked": 12, "foreign": 1}),
    "id of the future": (
        lambda client: client.xadd(TRACES, {"hello": "world"}, id="99999999999999-0"),
        {"acked": 12, "foreign": 1},
    ),
    "last id set": (lambda client: client.execute_command("XSETID", TRACES, "99999999999999-0"), {"acked": 12}),
    "forged index": (
        lambda client: client.xadd(TRACES, {"payload": b"x", "trace_id": "x", "index": 3}),
        {"acked": 12, "foreign": 1},
    ),
    "entry copied": (
        lambda client: client.xadd(TRACES, client.xrange(TRACES, count=1)[0][1]),
        {"acked": 12, "redelivered": 1},
    ),
    "index beyond ours": (
        lambda client: client.xadd(TRACES, {"payload": b"x", "trace_id": "x", "index": 5000}),
        {"acked": 12, "foreign": 1},
    ),
    "second group": (lambda client: client.xgroup_create(TRACES, "others", "0"), {"acked": 12}),
    "claimed by another": (
        lambda client: client.xclaim(
            *(TRACES, GROUP, "other", 0),
            [row["message_id"] for row in client.xpending_range(TRACES, GROUP, "-", "+", 100)],
        ),
        {"acked": 12},
    ),
}


@pytest.mark.parametrize("name", TOUCHED)
def test_each_thing_done_to_the_stream_is_a_reason_of_its_own(redis_client: redis.Redis, name: str) -> None:
    touch, expected = TOUCHED[name]
    stream = open_stream(redis_client)
    append(stream, 12)
    learn(stream, 5)
    in_hand = stream.read(3, 0)
    check(stream.lag())
    touch(redis_client)
    check(stream.lag())
    stream.ack([entry.id for entry in in_hand])
    check(stream.lag())
    while entries := stream.read(2, 0):
        check(stream.lag())
        for entry in entries:
            if entry.payload:
                stream.ack([entry.id])
            else:
                stream.dead_letter(entry, "not a trace")
        check(stream.lag())
    found = check(stream.lag())
    found.pop("appended", None)
    assert found == expected
    # It goes on as if nothing had been.
    appended = stream.lag().appended
    append(stream, 3)
    assert (stream.lag().appended, stream.lag().undelivered) == (appended + 3, 3)
    assert learn(stream, 10) == 3
    found = check(stream.lag())
    del found["appended"]
    assert found == expected | {"acked": expected.get("acked", 0) + 3}


def test_what_comes_twice_is_acked_once(redis_client: redis.Redis) -> None:
    stream = open_stream(redis_client)
    append(stream, 15)
    learn(stream, 15)
    redis_client.xgroup_setid(TRACES, GROUP, "0")
    assert learn(stream, 12) == 12
    assert check(stream.lag()) == {"appended": 15, "acked": 15, "redelivered": 12}
    redis_client.xgroup_setid(TRACES, GROUP, "0")
    assert learn(stream, 20) == 15
    assert check(stream.lag()) == {"appended": 15, "acked": 15, "redelivered": 27}


def test_a_backup_that_is_restored_is_as_it_was(redis_client: redis.Redis) -> None:
    """The trainer goes on with what it had in hand; entries that were appended meanwhile are unknown."""
    stream = open_stream(redis_client)
    append(stream, 6)
    learn(stream, 2)
    kept: Any = {key: redis_client.dump(key) for key in redis_client.scan_iter()}
    append(stream, 4)
    in_hand = stream.read(6, 0)
    redis_client.flushdb()
    for key, value in kept.items():
        redis_client.restore(key, 0, value)
    assert check(stream.lag()) == {"appended": 6, "acked": 2, "undelivered": 4}
    stream.append(PAYLOAD, trace_id="after")
    stream.ack([entry.id for entry in in_hand])
    assert check(stream.lag()) == {"appended": 7, "acked": 6, "undelivered": 1}
    assert learn(stream, 10) == 5
    assert check(stream.lag()) == {"appended": 7, "acked": 7, "redelivered": 4}


@pytest.mark.parametrize("key", [TRACES, KEYS.sizes, KEYS.num_appended, KEYS.accounts, KEYS.open])
@pytest.mark.parametrize("value", ["text", "list"])
def test_a_key_of_another_type_is_an_error_of_redis(redis_client: redis.Redis, key: str, value: str) -> None:
    stream = open_stream(redis_client)
    append(stream, 2)
    redis_client.delete(key)
    if value == "text":
        redis_client.set(key, "nonsense")
    else:
        redis_client.hset(key, "bytes", "nonsense") if key == KEYS.accounts else redis_client.rpush(key, "nonsense")
    with pytest.raises(StreamError):
        stream.lag()
    length = redis_client.xlen(TRACES) if key != TRACES else 0
    with pytest.raises(StreamError):
        append(stream, 1)
    assert length == (redis_client.xlen(TRACES) if key != TRACES else 0)
    redis_client.flushdb()
    append(stream, 1)
    assert check(stream.lag()) == {"appended": 1, "undelivered": 1}


def test_a_stream_whose_ids_are_used_up_refuses_appends_and_says_so(redis_client: redis.Redis) -> None:
    stream = open_stream(redis_client)
    append(stream, 2)
    redis_client.xadd(TRACES, {"hello": "world"}, id=f"{2**64 - 1}-{2**64 - 1}")
    with pytest.raises(StreamError, match="ID"):
        append(stream, 1)
    assert check(stream.lag()) == {"appended": 2, "undelivered": 2}
    redis_client.delete(TRACES)
    append(stream, 1)
    assert check(stream.lag()) == {"appended": 3, "lost": 2, "undelivered": 1}
    assert stream.lag().bytes == len(PAYLOAD)
    # At the cap, too: the refused entries are in no book.
    tight = open_stream(redis_client, max_bytes=3 * len(PAYLOAD))
    append(tight, 2)
    redis_client.xadd(TRACES, {"hello": "world"}, id=f"{2**64 - 1}-{2**64 - 1}")
    learn(tight, 4)
    for _ in range(3):
        with pytest.raises(StreamError, match="last possible ID"):
            append(tight, 1)
    assert redis_client.llen(KEYS.sizes) * len(PAYLOAD) == tight.lag().bytes


def test_entries_of_other_clients_at_the_head_make_way_alone(redis_client: redis.Redis) -> None:
    stream = open_stream(redis_client, max_bytes=5 * len(PAYLOAD))
    for _ in range(300):
        redis_client.xadd(TRACES, {"hello": "world"})
    append(stream, 6)
    assert check(stream.lag()) == {"appended": 6, "lost": 1, "undelivered": 5}


def test_entries_of_other_clients_with_an_index_lose_none_of_ours(redis_client: redis.Redis) -> None:
    stream = open_stream(redis_client)
    for index in (2, 5000):
        redis_client.xadd(TRACES, {"payload": b"x", "trace_id": "x", "index": index})
    append(stream, 3)
    redis_client.xadd(TRACES, {"hello": "world"})
    assert check(stream.lag()) == {"appended": 3, "undelivered": 3}
    assert learn(stream, 6) == 6
    assert check(stream.lag()) == {"appended": 3, "acked": 3, "foreign": 3}


def test_what_others_trim_as_they_append_is_lost_once_that_is_read(redis_client: redis.Redis) -> None:
    stream = open_stream(redis_client)
    append(stream, 15)
    check(stream.lag())
    for _ in range(10):
        redis_client.xadd(TRACES, {"hello": "world"}, maxlen=15, approximate=False)
    assert learn(stream, 20) == 15
    assert check(stream.lag()) == {"appended": 15, "acked": 5, "lost": 10, "foreign": 10}


def test_without_the_list_of_sizes_appends_at_the_cap_go_on(redis_client: redis.Redis) -> None:
    stream = open_stream(redis_client, max_bytes=10 * len(PAYLOAD))
    append(stream, 10)
    redis_client.delete(KEYS.sizes)
    append(stream, 25)
    lag = stream.lag()
    check(lag)
    assert (lag.appended, lag.bytes) == (35, 10 * len(PAYLOAD))


def test_indexes_go_on_after_the_stream_that_is_left_without_its_books(redis_client: redis.Redis) -> None:
    stream = open_stream(redis_client)
    append(stream, 5)
    redis_client.delete(KEYS.sizes, KEYS.num_appended, KEYS.accounts, KEYS.open)
    append(stream, 2)
    restarted = open_stream(redis_client)
    assert learn(restarted, 10) == 7
    assert check(restarted.lag()) == {"appended": 2, "acked": 2, "redelivered": 5}

"""Entries that somebody else put into the stream, nonsense in the pointer."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from speculator.errors import StreamError
from speculator.redis.control_plane import DraftPointer
from speculator.redis.trace_stream import TraceStream
from tests.hostile import traces
from tests.hostile.judge import tallied


@pytest.mark.parametrize(("name", "fields"), list(traces.foreign_entries()), ids=lambda value: str(value)[:20])
def test_an_entry_of_somebody_else_becomes_a_dead_letter(
    redis_client: redis.Redis, name: str, fields: dict[str, Any]
) -> None:
    assert traces.consume(redis_client, fields) == "dead letter"


def test_an_entry_of_somebody_else_is_in_the_books_by_itself(redis_client: redis.Redis) -> None:
    stream = TraceStream(redis_client, traces.MODEL_KEY, max_bytes=1000)
    stream.lag()
    for trace_id in ("ours", "ours too"):
        stream.append(b"x", trace_id=trace_id)
    theirs = redis_client.xadd(traces.KEYS.traces, {"hello": "world"})
    redis_client.xtrim(traces.KEYS.traces, minid=theirs, approximate=False)
    lag = stream.lag()
    assert (lag.appended, lag.lost, lag.pending, lag.undelivered, lag.foreign) == (2, 2, 0, 0, 0)
    (entry,) = stream.read(10, 0)
    stream.dead_letter(entry, "no trace")
    lag = stream.lag()
    assert (lag.appended, lag.acked, lag.dead_lettered, lag.pending, lag.foreign) == (2, 0, 0, 0, 1)
    stream.append(b"x", trace_id="another")
    assert [entry.trace_id for entry in stream.read(10, 0)] == ["another"]


def test_nonsense_where_the_pointer_stands_is_an_error_that_a_follower_expects(redis_client: redis.Redis) -> None:
    tallied("pointers", traces.odd_pointers(redis_client)).check()
    redis_client.set(traces.KEYS.desired_draft, "abc")
    with pytest.raises(StreamError, match="desired_draft"):
        DraftPointer(redis_client, traces.MODEL_KEY).published()

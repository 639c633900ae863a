"""Sampling with a real Redis: it sees the stream fill, a trainer stop and come back, and counts what it leaves out."""

from __future__ import annotations

import random

import pytest
import redis

from serving.recorder import TraceRecorder
from serving.sampler import FOLLOWED_PER_KEPT, LOOK_EVERY_S, CaptureSampler
from speculator.codec import decode_trace, encode_trace
from speculator.errors import StreamError
from speculator.stream import TraceStream
from tests.traces import make_trace
from tests.waiting import wait_until

PAYLOAD = encode_trace(make_trace())


class Clock:
    """Time for a look at each trace, or at each twentieth."""

    def __init__(self, step_s: float = LOOK_EVERY_S) -> None:
        self.step_s, self.now_s = step_s, 0.0

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


def stream(client: redis.Redis, *, num_traces: int = 10) -> TraceStream:
    return TraceStream(client, "m", max_bytes=num_traces * len(PAYLOAD))


def append(to: TraceStream, count: int) -> None:
    for index in range(count):
        to.append(PAYLOAD, trace_id=f"{index}")


def test_a_stream_without_a_trainer_fills_and_a_trainer_that_acks_empties_it(redis_client: redis.Redis) -> None:
    traces = stream(redis_client)
    sampler = CaptureSampler(lambda: traces, floor=0.01, clock=Clock(), rng=random.Random(0))
    assert sampler.choose(make_trace()) is not None
    assert sampler.share == 1.0
    append(traces, 9)
    assert sum(sampler.choose(make_trace()) is not None for _ in range(50)) < 10
    assert (sampler.share, sampler.reason) == (pytest.approx(0.01), "sampled_stream")
    traces.ack([entry.id for entry in traces.read(9, 0)])
    assert sampler.choose(make_trace()) is not None
    assert sampler.share == 1.0


def test_a_redis_near_its_memory_limit_is_spared(redis_client: redis.Redis) -> None:
    traces = stream(redis_client)
    assert traces.memory_share() is None
    used = redis_client.info("memory")["used_memory"]
    try:
        redis_client.config_set("maxmemory", int(used / 0.8))
        share = traces.memory_share()
        assert share is not None
        assert 0.7 < share < 0.9
        sampler = CaptureSampler(lambda: traces, floor=0.01, clock=Clock(), rng=random.Random(0))
        sampler.choose(make_trace())
        assert 0.01 < sampler.share < 1
        assert sampler.reason == "sampled_memory"
    finally:
        redis_client.config_set("maxmemory", 0)


def test_who_may_not_ask_for_the_memory_goes_without(redis_client: redis.Redis) -> None:
    redis_client.acl_setuser("noinfo", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-info"])
    try:
        options = {**redis_client.connection_pool.connection_kwargs, "username": "noinfo", "password": "x"}
        pool = redis.ConnectionPool(connection_class=redis_client.connection_pool.connection_class, **options)
        with redis.Redis.from_pool(pool) as client:
            assert [stream(client).memory_share() for _ in range(2)] == [None, None]
    finally:
        redis_client.acl_deluser("noinfo")


def test_the_share_stands_while_redis_is_away(redis_client: redis.Redis) -> None:
    traces, is_away = stream(redis_client), False

    def opened() -> TraceStream:
        if is_away:
            raise StreamError("Redis is away")
        return traces

    sampler = CaptureSampler(opened, floor=0.01, clock=Clock(), rng=random.Random(0))
    append(traces, 9)
    sampler.choose(make_trace())
    share, is_away = sampler.share, True
    sampler._stream = None
    sampler.choose(make_trace())
    assert sampler.share == share < 1


def test_the_recorder_writes_what_is_chosen_marked_and_counts_the_rest(redis_client: redis.Redis) -> None:
    traces = stream(redis_client, num_traces=400)
    sampler = CaptureSampler(lambda: traces, floor=0.01, clock=Clock(LOOK_EVERY_S / 20), rng=random.Random(0))
    append(traces, 200)
    traces.read(200, 0)
    recorder = TraceRecorder(lambda: traces, max_buffer_bytes=1 << 24, sampler=sampler)
    for index in range(300):
        assert recorder.submit(make_trace(index, trace_id=f"new-{index}"))
    wait_until(lambda: recorder.stats().pending == 0)
    stats = recorder.stats()
    recorder.close(1)
    assert stats.captured == stats.appended + stats.dropped == 300
    assert set(stats.dropped_by_reason) <= {"sampled_stream", "sampled_trainer"}
    assert 0 < stats.share < 1
    written = [decode_trace(entry.payload).header for entry in traces.read(400, 0)]
    assert len(written) == stats.appended
    assert {header.preferred for header in written} == {True, False}


def test_the_share_comes_back_while_no_trace_does(redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.recorder.LOOK_EVERY_S", 0.01)
    traces = stream(redis_client, num_traces=20)
    sampler = CaptureSampler(lambda: traces, floor=0.01, follows_all=False, clock=Clock(), rng=random.Random(0))
    append(traces, 19)
    recorder = TraceRecorder(lambda: traces, max_buffer_bytes=1 << 24, sampler=sampler)
    assert recorder.submit(make_trace())
    wait_until(lambda: sampler.share < 1 and recorder.stats().pending == 0)
    traces.ack([entry.id for entry in traces.read(30, 0)])
    wait_until(lambda: sampler.share == 1)
    recorder.close(1)


def test_where_following_costs_only_some_answers_are_followed_and_the_share_is_kept(redis_client: redis.Redis) -> None:
    traces = stream(redis_client)
    sampler = CaptureSampler(
        lambda: traces, floor=0.05, follows_all=False, clock=Clock(LOOK_EVERY_S / 20), rng=random.Random(0)
    )
    assert all(sampler.follows() for _ in range(20))
    append(traces, 9)
    sampler.choose(make_trace())
    followed = sum(sampler.follows() for _ in range(4000))
    assert followed == pytest.approx(4000 * 0.05 * FOLLOWED_PER_KEPT, rel=0.15)
    some = [make_trace(index) for index in range(20)]
    kept = sum(sampler.choose(trace) is not None for trace in some * 30)
    assert kept == pytest.approx(600 / FOLLOWED_PER_KEPT, rel=0.25)

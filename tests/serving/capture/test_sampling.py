"""How much is captured: all while it can be taken, and never so much that something is lost for long."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import redis

from serving.capture.recorder import TraceRecorder
from serving.capture.sampling import POLL_EVERY_S, BranchSampler, CaptureSampler
from speculator.errors import StreamError
from speculator.redis.stream_accounting import StreamLag
from speculator.redis.trace_stream import TraceStream
from speculator.trace import encode_trace
from tests.fixtures.traces import make_trace
from tests.fixtures.waiting import wait_until

FLOOR = 0.01
MIB = 1 << 20
PAYLOAD = encode_trace(make_trace())


@dataclass
class Figures:
    """A stream of which the test says how full it is, and when it is looked at."""

    unacked_bytes: float = 0
    undelivered: int = 0
    taken: int = 100
    share_of_memory: float | None = None
    share_of_buffer: float = 0.0
    now_s: float = 0.0
    max_bytes: int = 512 * MIB

    def lag(self) -> StreamLag:
        """All that was taken is pending; `unacked_bytes` are spread over what was not acked."""
        waiting = self.taken + self.undelivered
        return StreamLag(
            pending=self.taken, undelivered=self.undelivered, length=waiting, bytes=int(self.unacked_bytes),
            appended=waiting, acked=0, lost=0, dead_lettered=0, erased=0, expired=0,
        )  # fmt: skip

    def memory_share(self) -> float | None:
        return self.share_of_memory

    def sampler(self, *, at_start: bool = False) -> CaptureSampler:
        return CaptureSampler(
            self,
            floor=FLOOR,
            clock=lambda: self.now_s,
            rng=random.Random(0),
            at_start=at_start,
            buffer_share=lambda: self.share_of_buffer,
        )


def share_of(seen: Figures) -> tuple[float, str]:
    sampler = seen.sampler()
    sampler.poll()
    return sampler.share, sampler.reason


def test_everything_is_kept_where_there_is_room() -> None:
    cap = Figures().max_bytes
    assert share_of(Figures(unacked_bytes=0.3 * cap, share_of_memory=0.7))[0] == 1.0
    assert share_of(Figures())[0] == 1.0


def test_a_stream_that_fills_asks_for_less() -> None:
    cap = Figures().max_bytes
    shares = [share_of(Figures(unacked_bytes=filled * cap))[0] for filled in (0.3, 0.4, 0.5, 0.6, 0.8, 1.2)]
    assert shares == sorted(shares, reverse=True)
    assert shares[2] == pytest.approx(FLOOR**0.4)
    assert shares[-2:] == pytest.approx([FLOOR, FLOOR])
    assert share_of(Figures(unacked_bytes=0.6 * cap))[1] == "sampled_stream"


def test_a_redis_that_fills_asks_for_less_and_the_smallest_share_counts() -> None:
    assert share_of(Figures(share_of_memory=0.8)) == (pytest.approx(FLOOR**0.5), "sampled_memory")
    assert share_of(Figures(share_of_memory=0.95))[0] == pytest.approx(FLOOR)
    assert share_of(Figures(share_of_memory=0.95, unacked_bytes=0.4 * 512 * MIB))[1] == "sampled_memory"


def test_a_buffer_that_fills_asks_for_less_at_once_whatever_redis_says() -> None:
    seen = Figures(unacked_bytes=0.31 * 512 * MIB)
    sampler = seen.sampler(at_start=True)
    sampler.poll()
    share = sampler.share
    assert (FLOOR < share < 1, sampler.reason) == (True, "sampled_stream")
    seen.share_of_buffer = 0.7
    assert (sampler.share, sampler.reason) == (pytest.approx(FLOOR**0.5), "sampled_buffer")
    assert 0 < sum(sampler.follows() for _ in range(100)) < 30
    seen.share_of_buffer = 0.5
    assert sampler.share == share


def test_a_trainer_that_stops_is_noticed_and_so_is_its_return() -> None:
    seen = Figures(undelivered=30)
    sampler = seen.sampler()

    def poll(num_taken: int, num_new: int) -> float:
        seen.now_s += 1
        seen.taken += num_taken
        seen.undelivered = max(seen.undelivered - num_taken, 0) + num_new
        sampler.poll()
        return sampler.share

    assert [poll(2, 2) for _ in range(40)] == [1.0] * 40
    stopped = [poll(0, 2) for _ in range(300)]
    assert stopped == sorted(stopped, reverse=True)
    assert stopped[-1] == pytest.approx(FLOOR)
    assert sampler.reason == "sampled_trainer"
    back = [poll(4, 0) for _ in range(200)]
    assert back[-1] == 1.0


def test_a_trainer_that_kept_up_may_start_again_before_anything_is_left_out() -> None:
    seen = Figures()
    sampler = seen.sampler()
    for second in range(100):
        seen.now_s, seen.taken = float(second), 20 * second + 1
        sampler.poll()
    shares = []
    for second in range(90):
        seen.now_s, seen.taken, seen.undelivered = 100.0 + second, 2000, 20 * second
        sampler.poll()
        shares.append(sampler.share)
    assert shares[:45] == [1.0] * 45
    assert shares[-1] == pytest.approx(FLOOR), "then it is gone"


def test_where_no_trainer_has_ever_read_only_the_room_counts() -> None:
    seen = Figures(taken=0)
    sampler = seen.sampler()
    for second in range(600):
        seen.now_s, seen.undelivered = float(second), second
        sampler.poll()
    assert sampler.share == 1.0


def test_a_trainer_without_work_is_not_a_slow_one() -> None:
    """One trace a minute, and the trainer has it at once; then a burst arrives."""
    seen = Figures(undelivered=1)
    sampler = seen.sampler()
    for minute in range(30):
        seen.now_s, seen.taken = 60.0 * minute, 100 + minute
        sampler.poll()
    seen.now_s, seen.taken, seen.undelivered = 1801.0, 130, 50
    sampler.poll()
    assert sampler.share == 1.0


@pytest.mark.parametrize("num_engines", [1, 40])
@pytest.mark.parametrize("overload", [0.5, 10.0])
def test_the_share_settles_where_as_much_is_captured_as_is_taken(num_engines: int, overload: float) -> None:
    """Engines that look for themselves, one after the other, at a trainer that acks every 30 s."""
    entry, taken_per_s, seen, rng = 2 * MIB, 4, Figures(taken=0), random.Random(0)
    engines = [seen.sampler() for _ in range(num_engines)]
    offered = overload * taken_per_s / num_engines
    acked = captured = lost = 0
    for second in range(1200):
        for engine in engines:
            kept = sum(rng.random() < engine.share for _ in range(int(offered + rng.random())))
            seen.undelivered, captured = seen.undelivered + kept, captured + (kept if second >= 600 else 0)
        num = min(taken_per_s, seen.undelivered)
        seen.undelivered, seen.taken = seen.undelivered - num, seen.taken + num
        acked = seen.taken if second % 30 == 0 else acked
        seen.unacked_bytes = (seen.undelivered + seen.taken - acked) * entry
        lost += seen.unacked_bytes > seen.max_bytes
        seen.now_s = float(second)
        for engine in engines:
            engine.poll()
    assert lost == 0
    expected = 600 * taken_per_s * min(overload, 1.0)
    assert captured == pytest.approx(expected, rel=0.1)
    assert (seen.undelivered > 0) == (overload > 1)


@pytest.mark.parametrize("at_start", [False, True])
def test_the_share_is_drawn_once_for_each_answer(at_start: bool) -> None:
    """At its beginning, where following it costs something, or at its end."""
    seen = Figures(unacked_bytes=0.5 * 512 * MIB)
    sampler = seen.sampler(at_start=at_start)
    sampler.poll()
    assert all(sampler.keeps() if at_start else sampler.follows() for _ in range(100))
    drawn: Callable[[], bool] = sampler.follows if at_start else sampler.keeps
    assert sum(drawn() for _ in range(4000)) == pytest.approx(4000 * FLOOR**0.4, rel=0.15)


def stream(client: redis.Redis, *, num_traces: int = 10) -> TraceStream:
    return TraceStream(client, "m", max_bytes=num_traces * len(PAYLOAD))


def append(to: TraceStream, count: int) -> None:
    for index in range(count):
        to.append(PAYLOAD, trace_id=f"{index}")


def test_a_stream_without_a_trainer_fills_and_a_trainer_that_acks_empties_it(redis_client: redis.Redis) -> None:
    traces, now_s = stream(redis_client), [0.0]
    sampler = CaptureSampler(traces, floor=FLOOR, clock=lambda: now_s[0])

    def poll() -> float:
        now_s[0] += POLL_EVERY_S
        sampler.poll()
        return sampler.share

    assert poll() == 1.0
    append(traces, 9)
    assert (poll(), sampler.reason) == (pytest.approx(FLOOR), "sampled_stream")
    traces.ack([entry.id for entry in traces.read(9, 0)])
    assert poll() == 1.0


def test_a_redis_near_its_memory_limit_is_spared(redis_client: redis.Redis) -> None:
    traces = stream(redis_client)
    assert traces.memory_share() is None
    used = redis_client.info("memory")["used_memory"]
    try:
        redis_client.config_set("maxmemory", int(used / 0.8))
        share = traces.memory_share()
        assert share is not None
        assert 0.7 < share < 0.9
        sampler = CaptureSampler(traces, floor=FLOOR)
        sampler.poll()
        assert FLOOR < sampler.share < 1
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


@pytest.mark.parametrize("error", [StreamError("Redis is away"), ValueError("a bug")])
def test_the_share_stands_while_the_stream_cannot_be_looked_at(error: Exception) -> None:
    seen = Figures(unacked_bytes=0.5 * 512 * MIB)
    seen.now_s, failing = 0.0, [False]

    class Failing(Figures):
        def lag(self) -> StreamLag:
            if failing[0]:
                raise error
            return seen.lag()

    sampler = CaptureSampler(Failing(), floor=FLOOR, clock=lambda: seen.now_s)
    sampler.poll()
    share = sampler.share
    failing[0], seen.unacked_bytes, seen.now_s = True, 0, 10.0
    sampler.poll()
    assert sampler.share == share < 1
    failing[0], seen.now_s = False, 20.0
    sampler.poll()
    assert sampler.share == 1.0


def test_the_recorder_writes_what_is_kept_and_counts_the_rest(redis_client: redis.Redis) -> None:
    traces = stream(redis_client, num_traces=400)
    append(traces, 200)
    traces.read(200, 0)
    sampler = CaptureSampler(traces, floor=FLOOR, rng=random.Random(0))
    recorder = TraceRecorder(traces, max_buffer_bytes=1 << 24, sampler=sampler)
    for index in range(300):
        assert recorder.submit(make_trace(index, trace_id=f"new-{index}"))
    wait_until(lambda: recorder.stats().pending == 0)
    stats = recorder.stats()
    recorder.close(1)
    assert stats.captured == stats.appended + stats.dropped == 300
    assert set(stats.dropped_by_reason) <= {"sampled_stream", "sampled_trainer"}
    assert 0 < stats.share < 1
    assert 0 < stats.appended < 300
    assert len(traces.read(400, 0)) == stats.appended


def test_the_share_comes_back_while_no_trace_does(redis_client: redis.Redis) -> None:
    traces = stream(redis_client, num_traces=20)
    append(traces, 19)
    sampler = CaptureSampler(traces, floor=FLOOR, at_start=True)
    recorder = TraceRecorder(traces, max_buffer_bytes=1 << 24, sampler=sampler)
    assert recorder.submit(make_trace())
    wait_until(lambda: sampler.share < 1 and recorder.stats().pending == 0)
    traces.ack([entry.id for entry in traces.read(30, 0)])
    began_s = time.monotonic()
    wait_until(lambda: sampler.share == 1)
    assert time.monotonic() - began_s < 10 * POLL_EVERY_S
    recorder.close(1)


def test_the_recorder_says_what_the_trainer_acknowledges_after_the_last_trace(redis_client: redis.Redis) -> None:
    traces = stream(redis_client, num_traces=20)
    recorder = TraceRecorder(traces, max_buffer_bytes=1 << 24, sampler=CaptureSampler(traces, floor=FLOOR))
    assert recorder.stats().acked is None
    assert recorder.submit(make_trace())
    wait_until(lambda: recorder.stats().appended == 1)
    traces.ack([entry.id for entry in traces.read(30, 0)])
    wait_until(lambda: recorder.stats().acked == 1)
    recorder.close(1)


def test_a_trainer_that_is_away_is_not_slow_while_no_trace_comes() -> None:
    seen = Figures(taken=5, undelivered=1)
    sampler = seen.sampler()
    sampler.poll()
    for _ in range(100):
        seen.now_s += 1
        sampler.poll_idle()
    assert sampler.share == 1.0


def test_verifications_are_drawn_alike_one_by_one_and_as_a_batch() -> None:
    dice = random.Random(1)
    rejected = [0, *(dice.randrange(4) for _ in range(19_999))]
    # The first makes room for what comes before the others have.
    committed = [1000, *(4 - count for count in rejected[1:])]
    over = Counter[str]()
    alone = BranchSampler(0.05, over_budget=lambda count: over.update(alone=count))
    one_by_one = [
        index for index, each in enumerate(zip(committed, rejected, strict=True)) if alone.drawn([each[0]], [each[1]])
    ]
    together = BranchSampler(0.05, over_budget=lambda count: over.update(together=count))
    in_batches = [
        start + index
        for start in range(0, 20_000, 50)
        for index in together.drawn(committed[start : start + 50], rejected[start : start + 50])
    ]
    assert in_batches == one_by_one
    assert not over
    assert not any(rejected[index] == 0 for index in in_batches)
    assert len(in_batches) == pytest.approx(0.05 * sum(count > 0 for count in rejected), rel=0.15)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_none_or_all_of_the_verifications_with_rejections_are_drawn(share: float) -> None:
    sampler = BranchSampler(share, over_budget=lambda _: None)
    assert sampler.drawn([1000, 1, 1], [0, 3, 1]) == ([1, 2] if share else [])

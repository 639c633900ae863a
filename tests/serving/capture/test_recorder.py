"""The recorder: never holds serving up, loses nothing it need not lose, and counts the rest."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import structlog
import torch

from serving.capture.recorder import RecorderStats, TraceRecorder, memory_bytes
from speculator.errors import StreamError
from speculator.redis.client import LostTransactionError, open_client
from speculator.redis.embedded import EmbeddedRedis
from speculator.redis.trace_stream import TraceStream
from speculator.trace import Trace, decode_trace
from tests.fixtures.traces import make_trace
from tests.fixtures.waiting import wait_until, wait_until_written

SIZE = memory_bytes(make_trace())


class FakeStream:
    """Blocks while `gate` is closed, fails while `broken`."""

    def __init__(self) -> None:
        self.max_bytes = 1 << 20
        self.gate = threading.Event()
        self.gate.set()
        self.broken = False
        self.attempts = 0
        self.trace_ids: list[str] = []

    def append(self, payload: bytes, *, trace_id: str) -> str:
        self.attempts += 1
        self.gate.wait()
        if self.broken:
            raise StreamError("Redis is away")
        self.trace_ids.append(trace_id)
        return "1-0"


@pytest.fixture
def fake() -> Iterator[FakeStream]:
    stream = FakeStream()
    yield stream
    stream.gate.set()


@pytest.fixture
def opened() -> Iterator[Callable[..., TraceRecorder]]:
    recorders: list[TraceRecorder] = []

    def open_recorder(stream: FakeStream, *, max_buffer_bytes: int = 100 * SIZE, **options: Any) -> TraceRecorder:
        options = {"retry_s": (0.005, 0.02), **options}
        recorders.append(TraceRecorder(stream, max_buffer_bytes=max_buffer_bytes, **options))
        return recorders[-1]

    yield open_recorder
    for recorder in recorders:
        recorder.close(0)


def balance(stats: RecorderStats) -> int:
    return stats.captured - stats.appended - stats.dropped - stats.pending


def submit(recorder: TraceRecorder, count: int) -> list[bool]:
    return [recorder.submit(make_trace(trace_id=f"t{i}")) for i in range(count)]


Open = Callable[..., TraceRecorder]


def test_traces_are_appended_in_order(fake: FakeStream, opened: Open) -> None:
    recorder = opened(fake)
    assert all(submit(recorder, 5))
    wait_until(lambda: recorder.stats().pending == 0)
    assert fake.trace_ids == [f"t{i}" for i in range(5)]
    stats = recorder.stats()
    assert (stats.captured, stats.appended, stats.dropped, stats.tokens_appended) == (5, 5, 0, 5 * 12)
    assert stats.bytes_appended > 0


def test_submit_does_not_wait_and_the_newest_are_dropped(fake: FakeStream, opened: Open) -> None:
    fake.gate.clear()
    recorder = opened(fake, max_buffer_bytes=3 * SIZE)
    start = time.monotonic()
    assert submit(recorder, 50) == [True] * 3 + [False] * 47
    assert time.monotonic() - start < 2
    stats = recorder.stats()
    assert (stats.pending, stats.dropped_by_reason) == (3, {"buffer_full": 47})
    assert balance(stats) == 0
    fake.gate.set()
    wait_until(lambda: recorder.stats().appended == 3)
    assert fake.trace_ids == ["t0", "t1", "t2"]
    assert submit(recorder, 1) == [True]


def test_a_failing_stream_is_tried_again(fake: FakeStream, opened: Open) -> None:
    fake.broken = True
    recorder = opened(fake)
    submit(recorder, 2)
    wait_until(lambda: fake.attempts >= 4)
    assert recorder.stats().pending == 2
    fake.broken = False
    wait_until(lambda: recorder.stats().appended == 2)
    assert fake.trace_ids == ["t0", "t1"]


def test_pauses_grow_to_a_bound(fake: FakeStream, opened: Open) -> None:
    fake.broken = True
    with structlog.testing.capture_logs() as lines:
        submit(opened(fake, retry_s=(0.1, 0.2)), 1)
        wait_until(lambda: len(lines) >= 3)
    assert [line["retry_in_s"] for line in lines[:3]] == [0.1, 0.2, 0.2]


def test_a_trace_that_redis_never_takes_does_not_hold_up_the_rest(
    fake: FakeStream, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, errors = fake.append, [LostTransactionError("lost")] * 5 + [StreamError("Redis is away")]
    errors += [LostTransactionError("lost")] * 8

    def refuse(payload: bytes, *, trace_id: str) -> str:
        if trace_id == "t0":
            raise errors.pop(0)
        return append(payload, trace_id=trace_id)

    monkeypatch.setattr(fake, "append", refuse)
    recorder = opened(fake)
    submit(recorder, 2)
    wait_until(lambda: recorder.stats().pending == 0)
    assert (fake.trace_ids, errors) == (["t1"], [])
    assert recorder.stats().dropped_by_reason == {"too_large": 1}


def test_what_cannot_be_recorded_is_dropped_with_the_reason(fake: FakeStream, opened: Open) -> None:
    def fail(trace: Trace) -> None:
        if trace.header.trace_id == "bug":
            raise ZeroDivisionError
        if trace.header.trace_id == "panic":
            raise BaseException("as a panic in Rust")

    recorder = opened(fake, reason_to_drop=fail)
    bad = make_trace()
    bad.aux_hidden[0] = torch.nan
    recorder.submit(bad)
    wait_until(lambda: recorder.stats().dropped_by_reason == {"invalid": 1})

    assert not recorder.submit(make_trace(T=2000))
    fake.max_bytes = 10
    recorder.submit(make_trace())
    wait_until(lambda: recorder.stats().dropped_by_reason == {"invalid": 1, "too_large": 2})
    fake.max_bytes = 1 << 20

    recorder.submit(make_trace(trace_id="bug"))
    recorder.submit(make_trace(trace_id="panic"))
    wait_until(lambda: recorder.stats().dropped_by_reason == {"invalid": 1, "too_large": 2, "failed": 2})

    submit(recorder, 1)
    wait_until(lambda: recorder.stats().appended == 1)
    assert balance(recorder.stats()) == 0


def test_what_teaches_nothing_is_not_sent(fake: FakeStream, opened: Open) -> None:
    """The trainer would refuse it, and raise an alert: an answer under a penalty, and "yes" after a cached prompt."""
    recorder, whole = opened(fake), make_trace(labelled_from=0)
    recorder.submit(dataclasses.replace(whole, constrained=whole.constrained | True))
    recorder.submit(make_trace(T=2, R=1, labelled_from=0, num_prompt_tokens=1))
    recorder.submit(make_trace(trace_id="good"))
    wait_until(lambda: recorder.stats().pending == 0)
    assert fake.trace_ids == ["good"]
    assert recorder.stats().dropped_by_reason == {"nothing_computed": 2}


def test_closing_flushes(fake: FakeStream, opened: Open) -> None:
    fake.gate.clear()
    recorder = opened(fake)
    submit(recorder, 10)
    threading.Timer(0.02, fake.gate.set).start()
    recorder.close(20)
    assert len(fake.trace_ids) == 10
    assert submit(recorder, 1) == [False]
    stats = recorder.stats()
    assert (stats.appended, stats.pending, stats.dropped_by_reason) == (10, 0, {"closed": 1})


def test_closing_while_the_stream_hangs_counts_what_is_left(fake: FakeStream, opened: Open) -> None:
    fake.gate.clear()
    recorder = opened(fake)
    submit(recorder, 3)
    wait_until(lambda: fake.attempts == 1)
    recorder.close(0.01)
    stats = recorder.stats()
    assert (stats.appended, stats.pending, stats.dropped_by_reason) == (0, 0, {"closed": 3})
    fake.gate.set()
    wait_until(lambda: fake.trace_ids == ["t0"])
    # The one in flight arrived after all; it stays counted once.
    assert recorder.stats() == stats


def test_closing_wakes_a_pause_and_gives_up_in_time(fake: FakeStream, opened: Open) -> None:
    fake.broken = True
    recorder = opened(fake, retry_s=(3600.0, 3600.0))
    submit(recorder, 1)
    wait_until(lambda: fake.attempts == 1)
    recorder.close(1)
    assert fake.attempts == 2
    assert recorder.stats().dropped_by_reason == {"closed": 1}


def test_many_threads_keep_the_balance(fake: FakeStream, opened: Open) -> None:
    recorder = opened(fake, max_buffer_bytes=4 * SIZE)
    threads = [threading.Thread(target=submit, args=(recorder, 50)) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert balance(recorder.stats()) == 0
    for thread in threads:
        thread.join()
    recorder.close(20)
    stats = recorder.stats()
    assert (stats.captured, stats.pending, balance(stats)) == (200, 0, 0)
    assert stats.appended == len(fake.trace_ids)


# -- a real Redis


def test_real_traces_reach_a_real_stream(redis_client: redis.Redis) -> None:
    stream = TraceStream(redis_client, "m", max_bytes=1 << 20)
    recorder = TraceRecorder(stream, max_buffer_bytes=1 << 20, features="bfloat16")
    trace = make_trace(trace_id="real")
    recorder.submit(trace)
    recorder.close(20)
    [entry] = stream.read(10, 0)
    assert entry.trace_id == "real"
    assert torch.equal(decode_trace(entry.payload).aux_hidden, trace.aux_hidden)
    assert recorder.stats().bytes_appended == len(entry.payload)


class RealServer:
    """A server that a test may pause, kill and restart, and a recorder whose connections are closed at the end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.server = EmbeddedRedis(directory)
        self.clients: list[redis.Redis] = []

    def open(self) -> TraceStream:
        client = open_client(self.server.url)
        self.clients.append(client)
        return TraceStream(client, "m", max_bytes=1 << 20)

    def signal(self, number: int) -> None:
        os.kill(self.server.pid, number)

    def restart(self) -> None:
        self.server.stop()
        self.server = EmbeddedRedis(self.directory)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.server.stop()


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RealServer]:
    monkeypatch.setattr("speculator.redis.client.SOCKET_TIMEOUT_S", 0.1)
    server = RealServer(tmp_path)
    yield server
    server.close()


@pytest.mark.parametrize("kill", [False, True], ids=["paused", "killed"])
def test_a_redis_that_goes_away_and_comes_back_gets_every_trace(real: RealServer, kill: bool) -> None:
    recorder = TraceRecorder(real.open(), max_buffer_bytes=8 * SIZE)
    submit(recorder, 3)
    wait_until(lambda: recorder.stats().appended == 3)
    real.open()
    wait_until_written(real.clients[-1])

    real.signal(signal.SIGKILL if kill else signal.SIGSTOP)
    accepted = [recorder.submit(make_trace(trace_id=f"later-{i}")) for i in range(12)]
    assert accepted == [True] * 8 + [False] * 4
    stats = recorder.stats()
    assert (stats.pending, stats.dropped_by_reason, balance(stats)) == (8, {"buffer_full": 4}, 0)

    if kill:
        real.restart()
    else:
        real.signal(signal.SIGCONT)
    wait_until(lambda: recorder.stats().appended == 11)
    recorder.close(20)
    trace_ids = [entry.trace_id for entry in real.open().read(100, 0)]
    # At least once: an append whose answer was lost is repeated, and the trainer uses a trace id once.
    assert list(dict.fromkeys(trace_ids)) == ["t0", "t1", "t2", *(f"later-{i}" for i in range(8))]


def test_a_recorder_starts_without_redis(real: RealServer) -> None:
    real.server.stop()
    recorder = TraceRecorder(real.open(), max_buffer_bytes=1 << 20)
    assert submit(recorder, 2) == [True, True]
    assert recorder.stats().pending == 2
    real.restart()
    recorder.close(20)
    assert recorder.stats().appended == 2

"""Faults of Redis: killed, paused, out of memory, its disk full. Serving must not notice."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from benchmarks.faults.fault import Observed, fault
from benchmarks.faults.load import Window
from benchmarks.faults.loop import Books, Loop
from speculator.redis.client import connect
from tests.fixtures.faults import filled

AWAY_S = 4.0
_PROMISE = "serving goes on; nothing acknowledged is lost; both sides resume"


def _is_alike(during: Window, calm: Window) -> bool:
    """Whether latency did not rise beyond noise: other processes share the machine's cores."""
    return during.p99_ms <= 2 * calm.p99_ms + 50


def _nothing_lost(before: Books, after: Books) -> bool:
    """Every append that Redis confirmed to the engine is in the stream's count, and no trace vanished uncounted."""
    return (
        after.lag.appended - before.lag.appended >= after.appended - before.appended
        and after.lag.lost == before.lag.lost
        and after.captured == after.appended + after.dropped + after.waiting
    )


def _away(loop: Loop, fault_in_place: AbstractContextManager[None]) -> Observed:
    before, calm = loop.books(stream_first=True), loop.calm()
    with fault_in_place:
        started_s = time.monotonic()
        time.sleep(AWAY_S)
        during, waiting = loop.load.since(started_s), loop.metrics().total("slipstream_traces_pending")
    resumed_s = loop.wait_until_settled()
    after = loop.books()
    appended = after.appended - before.appended
    return Observed(
        told=f"{during}; p99 {during.p99_ms:.0f} ms (before {calm.p99_ms:.0f}); {waiting:.0f} traces waited, "
        f"{after.dropped - before.dropped:.0f} dropped, {appended:.0f} appended in all, "
        f"{after.lag.lost - before.lag.lost} lost; "
        f"trained on after {resumed_s:.1f} s",
        checks={
            "no request failed": during.num_failed == 0 and len(during.requests) > 0,
            "p99 within noise": _is_alike(during, calm),
            "traces waited": waiting > 0,
            "no trace lost": _nothing_lost(before, after),
        },
        figures={"p99_ms": during.p99_ms, "calm_p99_ms": calm.p99_ms, "waited": waiting, "resumed_s": resumed_s},
    )


@contextmanager
def _killed(loop: Loop) -> Iterator[None]:
    os.kill(loop.redis.pid, signal.SIGKILL)
    yield
    loop.redis.stop()
    loop.start_redis()


@contextmanager
def _paused(loop: Loop) -> Iterator[None]:
    os.kill(loop.redis.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(loop.redis.pid, signal.SIGCONT)


@contextmanager
def _out_of_memory(loop: Loop) -> Iterator[None]:
    with connect(loop.redis.url) as client:
        client.config_set("maxmemory", "1")
        yield
        client.config_set("maxmemory", "0")


@contextmanager
def _on_a_full_disk(loop: Loop) -> Iterator[None]:
    with filled(loop.redis_dir):
        yield


@fault("Redis killed (SIGKILL), started again", _PROMISE)
def killed(loop: Loop) -> Observed:
    return _away(loop, _killed(loop))


@fault("Redis paused (SIGSTOP)", _PROMISE)
def paused(loop: Loop) -> Observed:
    return _away(loop, _paused(loop))


@fault("Redis out of memory (maxmemory)", _PROMISE)
def out_of_memory(loop: Loop) -> Observed:
    return _away(loop, _out_of_memory(loop))


@fault("Redis's disk full", _PROMISE, needs_small_disks=True)
def on_a_full_disk(loop: Loop) -> Observed:
    return _away(loop, _on_a_full_disk(loop))

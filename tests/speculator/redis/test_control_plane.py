"""The draft pointer: what is published, pinned and asked of engines, and what engines report."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from speculator.errors import StreamError
from speculator.redis import control_plane as pointer_module
from speculator.redis.client import connect
from speculator.redis.control_plane import CanaryHolder, CanarySlot, DraftPointer
from speculator.redis.keys import RedisKeys
from tests.fixtures.waiting import wait_until

MODEL = "smollm2"
KEYS = RedisKeys(model_key=MODEL)


def test_the_pointer_names_the_version_last_published(redis_client: redis.Redis) -> None:
    pointer = DraftPointer(redis_client, MODEL)
    assert pointer.desired() is None
    pointer.publish(7)
    pointer.publish(6)
    assert DraftPointer(redis_client, MODEL).desired() == 6
    assert DraftPointer(redis_client, "other").desired() is None


def test_a_pinned_version_is_desired_whatever_is_published(redis_client: redis.Redis) -> None:
    pointer = DraftPointer(redis_client, MODEL)
    pointer.unpin()
    assert (pointer.pinned(), pointer.published()) == (None, None)
    pointer.pin(4)
    assert (pointer.desired(), pointer.published()) == (4, None)
    pointer.publish(7)
    assert (pointer.desired(), pointer.pinned(), pointer.published()) == (4, 4, 7)
    assert DraftPointer(redis_client, "other").pinned() is None
    pointer.unpin()
    assert (pointer.desired(), pointer.pinned()) == (7, None)


def test_a_replacement_needs_the_old_version_to_be_published(redis_client: redis.Redis) -> None:
    pointer = DraftPointer(redis_client, MODEL)
    assert not pointer.replace(3, 2)
    assert pointer.published() is None
    pointer.publish(3)
    pointer.pin(9)
    assert not pointer.replace(9, 2)
    assert pointer.replace(3, 2)
    assert not pointer.replace(3, 1)
    assert pointer.published() == 2


def test_a_replacement_loses_to_what_is_published_meanwhile(
    redis_url: str, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between reading the old version and writing the new one, the trainer publishes."""
    pointer = DraftPointer(redis_client, MODEL)
    pointer.publish(3)
    begin = redis.client.Pipeline.multi

    def multi(pipeline: Any) -> None:
        with connect(redis_url) as trainer:
            DraftPointer(trainer, MODEL).publish(4)
        begin(pipeline)

    monkeypatch.setattr(redis.client.Pipeline, "multi", multi)
    assert not pointer.replace(3, 2)
    assert pointer.published() == 4


def holder(engine_id: str, *, process: str = "first", version: int = 2) -> CanaryHolder:
    return CanaryHolder(engine_id=engine_id, process=process, version=version)


def test_one_engine_has_the_canarys_slot_until_it_expires_or_gives_it_back(redis_client: redis.Redis) -> None:
    pointer = DraftPointer(redis_client, MODEL)
    assert pointer.hold_canary(holder("a"), ttl_s=60, on_probation=True) == CanarySlot(True, False, 0)
    assert not pointer.hold_canary(holder("b"), ttl_s=60, on_probation=True).is_held
    assert DraftPointer(redis_client, "other").hold_canary(holder("b"), ttl_s=60, on_probation=True).is_held
    pointer.release_canary(holder("b"))
    assert pointer.hold_canary(holder("a"), ttl_s=0.02, on_probation=True) == CanarySlot(True, True, 0)
    wait_until(lambda: pointer.hold_canary(holder("b"), ttl_s=60, on_probation=True).is_held)
    pointer.release_canary(holder("b"))
    assert pointer.hold_canary(holder("a"), ttl_s=60, on_probation=True).is_held


def test_the_slot_is_given_once_however_many_ask_together(redis_client: redis.Redis) -> None:
    pointer, start = DraftPointer(redis_client, MODEL), threading.Barrier(8)

    def ask(name: str) -> bool:
        start.wait()
        return pointer.hold_canary(holder(name), ttl_s=60, on_probation=True).is_held

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(ask, map(str, range(8)))) == 1


def test_processes_that_end_on_probation_are_counted(redis_client: redis.Redis) -> None:
    pointer = DraftPointer(redis_client, MODEL)

    def crashed_before(process: str, *, version: int = 2, on_probation: bool = True) -> int:
        one = holder("a", process=process, version=version)
        return pointer.hold_canary(one, ttl_s=60, on_probation=on_probation).num_crashed

    assert [crashed_before(process) for process in ("1", "1", "2", "3")] == [0, 0, 1, 2]
    assert crashed_before("4", version=3) == 0
    pointer.release_canary(holder("a", process="3"))
    assert crashed_before("2", on_probation=False) == 1, "neither one that ended in order, nor one that outlasted it"
    pointer.release_canary(holder("a", process="5"), forget_crashes=True)
    assert crashed_before("5") == 0


def test_a_canary_that_slipstream_did_not_write_is_named(redis_client: redis.Redis) -> None:
    redis_client.set(KEYS.canary, b"[1, 2")
    with pytest.raises(StreamError, match="delete that key"):
        DraftPointer(redis_client, MODEL).hold_canary(holder("a"), ttl_s=60, on_probation=True)


def test_each_engine_has_its_own_depth(redis_client: redis.Redis) -> None:
    pointer = DraftPointer(redis_client, MODEL)
    assert pointer.depth_limit("engine-0") is None
    pointer.set_depth("engine-0", 3)
    pointer.set_depth("engine-0", 0)
    assert pointer.depth_limit("engine-0") == 0
    assert pointer.depth_limit("engine-1") is None
    assert DraftPointer(redis_client, "other").depth_limit("engine-0") is None


def test_engine_reports_expire(redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    pointer = DraftPointer(redis_client, MODEL)
    pointer.report_engine("engine-0", {"version": 3, "state": "swapping", "accept_length": 1.5})
    pointer.report_engine("engine-0", {"version": 4})
    monkeypatch.setattr(pointer_module, "ENGINE_TTL_S", 0.02)
    pointer.report_engine("engine-1", {"version": 2})
    wait_until(lambda: pointer.engines() == {"engine-0": {"version": "4"}})
    wait_until(lambda: _expires(redis_client) < _now(redis_client))
    pointer.report_engine("engine-2", {"version": 1})
    assert b"engine-1" not in redis_client.zrange(KEYS.engines, 0, -1)


def _expires(client: redis.Redis) -> float:
    score = client.zscore(KEYS.engines, "engine-1")
    return float(score or 0)


def _now(client: redis.Redis) -> float:
    return float(client.time()[0]) * 1000 + client.time()[1] / 1000

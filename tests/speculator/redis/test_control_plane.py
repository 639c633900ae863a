"""The draft pointer: what is published, pinned and asked of engines, and what engines report."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from speculator.errors import StreamError
from speculator.host import now_ms
from speculator.redis import control_plane
from speculator.redis.client import LostTransactionError, RedisKeys
from speculator.redis.control_plane import (
    ENGINE_TTL_S,
    LINGER_S,
    CanaryHolder,
    CanarySlot,
    DraftPointer,
    EndedGroups,
    EngineLoad,
    busiest_local_engine,
    machine_id,
)
from tests.fixtures.clock import Clock
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


def test_each_engine_hears_once_of_groups_that_end_from_now_on(redis_client: redis.Redis) -> None:
    gateway, engine = EndedGroups(redis_client, MODEL), EndedGroups(redis_client, MODEL)
    gateway.add("a", "before")
    assert engine.read() == []
    gateway.add("a", "one")
    gateway.add("b", "one")
    other = EndedGroups(redis_client, MODEL)
    assert other.read() == []
    assert engine.read() == [("a", "one"), ("b", "one")]
    assert engine.read() == []
    gateway.add("a", "two")
    assert engine.read() == other.read() == [("a", "two")]
    assert EndedGroups(redis_client, "other").read() == []


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


class _Refusing(redis.Redis):
    """Takes no transaction, as a Redis whose writes are paused."""

    def pipeline(self, transaction: Any = True, shard_hint: Any = None) -> Any:
        pipe: Any = super().pipeline(transaction, shard_hint)

        def execute() -> None:
            pipe.reset()
            raise redis.exceptions.WatchError("not now")

        pipe.execute = execute
        return pipe


def test_a_redis_that_takes_no_change_is_not_asked_for_ever(redis_client: redis.Redis) -> None:
    refusing = _Refusing(connection_pool=redis_client.connection_pool)
    pointer, holder = DraftPointer(refusing, MODEL), CanaryHolder(engine_id="a", process="a:1", version=2)
    for change in (
        lambda: pointer.replace(1, 2),
        lambda: pointer.hold_canary(holder, ttl_s=5, on_probation=True),
        lambda: pointer.release_canary(holder),
    ):
        with pytest.raises(StreamError, match="try again"):
            change()


class _CutOff(redis.Redis):
    """Loses its connection in the middle of each transaction."""

    num_begun = 0

    def pipeline(self, transaction: Any = True, shard_hint: Any = None) -> Any:
        pipe: Any = super().pipeline(transaction, shard_hint)
        execute = pipe.execute

        def cut_off() -> Any:
            self.num_begun += 1
            self.client_kill_filter(_id=pipe.immediate_execute_command("CLIENT ID"))
            return execute()

        pipe.execute = cut_off
        return pipe


def test_a_change_whose_connection_is_lost_is_not_sent_again(redis_client: redis.Redis) -> None:
    cut_off = _CutOff(connection_pool=redis_client.connection_pool)
    DraftPointer(redis_client, MODEL).publish(1)
    with pytest.raises(LostTransactionError, match="cannot be reached"):
        DraftPointer(cut_off, MODEL).replace(1, 2)
    assert cut_off.num_begun == 1


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


def test_a_replacement_loses_to_what_is_published_meanwhile(redis_client: redis.Redis) -> None:
    """Between reading the old version and writing the new one, the trainer publishes."""
    trainer = DraftPointer(redis_client, MODEL)
    trainer.publish(3)

    class Slow(redis.Redis):
        def pipeline(self, transaction: Any = True, shard_hint: Any = None) -> Any:
            pipe: Any = super().pipeline(transaction, shard_hint)
            execute = pipe.execute

            def late() -> Any:
                if trainer.published() == 3:
                    trainer.publish(4)
                return execute()

            pipe.execute = late
            return pipe

    assert not DraftPointer(Slow(connection_pool=redis_client.connection_pool), MODEL).replace(3, 2)
    assert trainer.published() == 4


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


def test_an_engine_that_has_lost_the_slot_cannot_give_it_back_for_another(redis_client: redis.Redis) -> None:
    pointer = DraftPointer(redis_client, MODEL)
    pointer.hold_canary(holder("a"), ttl_s=60, on_probation=True)
    pointer.release_canary(holder("b"))
    assert not pointer.hold_canary(holder("c"), ttl_s=60, on_probation=True).is_held


def test_an_engine_that_gets_the_slot_no_longer_waits_for_it(redis_client: redis.Redis) -> None:
    pointer = DraftPointer(redis_client, MODEL)
    pointer.hold_canary(holder("a"), ttl_s=60, on_probation=True)
    assert not pointer.hold_canary(holder("b"), ttl_s=60, on_probation=True).is_held
    pointer.release_canary(holder("a"))
    assert pointer.hold_canary(holder("b"), ttl_s=60, on_probation=True) == CanarySlot(True, False, 0)


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


def test_engine_reports_expire(redis_client: redis.Redis) -> None:
    pointer = DraftPointer(redis_client, MODEL)
    pointer.report_engine("engine-0", {"version": 3, "state": "swapping", "accept_length": 1.5})
    pointer.report_engine("engine-0", {"version": 4})
    pointer.report_engine("engine-1", {"version": 2})
    assert 0 < redis_client.pttl(KEYS.engine("engine-1")) <= 1000 * ENGINE_TTL_S
    # As after ENGINE_TTL_S.
    redis_client.delete(KEYS.engine("engine-1"))
    redis_client.zadd(KEYS.engines, {"engine-1": 0})
    assert pointer.engines() == {"engine-0": {"version": "4"}}
    pointer.report_engine("engine-2", {"version": 1})
    assert redis_client.zrange(KEYS.engines, 0, -1) == [b"engine-0", b"engine-2"]


@pytest.mark.parametrize("skew_s", [-14 * 3600, -600, 600, 14 * 3600])
def test_engines_with_other_clocks_do_not_remove_each_other(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch, skew_s: int
) -> None:
    pointer = DraftPointer(redis_client, MODEL)
    pointer.report_engine("engine-0", {"version": 3})
    with monkeypatch.context() as patched:
        patched.setattr(control_plane, "now_ms", lambda: now_ms() + 1000 * skew_s)
        pointer.report_engine("engine-1", {"version": 3})
    pointer.report_engine("engine-2", {"version": 3})
    assert pointer.engines().keys() == {"engine-0", "engine-1", "engine-2"}


def test_the_share_of_time_in_steps_since_the_last_report() -> None:
    clock = Clock()
    load = EngineLoad(clock)
    clock.now_s += 1.0
    with load.stepping():
        clock.now_s += 3.0
    assert load.report() == {"machine": machine_id(), "card": "", "busy": 0.75}
    clock.now_s += 2.0
    assert load.report()["busy"] == 0.0


def test_a_step_that_goes_on_counts_so_far_and_only_once() -> None:
    clock = Clock()
    load = EngineLoad(clock)
    clock.now_s += 5.0
    with load.stepping():
        clock.now_s += 5.0
        assert load.report()["busy"] == 0.5
        clock.now_s += 1.0
    clock.now_s += 1.0
    assert load.report()["busy"] == 0.5


def test_a_pause_between_steps_is_busy_only_where_it_is_short() -> None:
    """A GPU still computes what the last step launched."""
    clock = Clock()
    load = EngineLoad(clock)
    for pause_s in (0.9 * LINGER_S, 2 * LINGER_S):
        load.report()
        for _ in range(10):
            with load.stepping():
                clock.now_s += LINGER_S
            clock.now_s += pause_s
        busy = load.report()["busy"]
        assert busy == pytest.approx(0.95 if pause_s < LINGER_S else 1 / 3, abs=0.05)


def test_a_step_that_fails_ends() -> None:
    clock = Clock()
    load = EngineLoad(clock)
    with pytest.raises(RuntimeError), load.stepping():
        raise RuntimeError("the engine has failed")
    clock.now_s += 10.0
    assert load.report()["busy"] == 0.0


def test_two_reports_at_once_are_no_error() -> None:
    load = EngineLoad(Clock())
    assert load.report()["busy"] == load.report()["busy"] == 0.0


def test_the_busiest_engine_of_this_machine() -> None:
    here, elsewhere = machine_id(), "another"
    reports = {
        "a": {"machine": here, "busy": "0.25"},
        "b": {"machine": here, "busy": "0.5"},
        "c": {"machine": elsewhere, "busy": "1.0"},
        "d": {"version": "7"},
        "e": {"machine": here},
        "f": {"machine": here, "busy": "nan"},
        "g": {"machine": here, "busy": "very"},
        "h": {"machine": here, "busy": "17"},
    }
    assert busiest_local_engine(reports) == 0.5
    assert busiest_local_engine({}) == 0.0

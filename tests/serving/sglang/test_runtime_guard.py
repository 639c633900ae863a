"""The guard over the target's weights in an SGLang server: on all ranks, and with Redis away."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from serving.sglang.pointer import LazyPointer
from serving.sglang.runtime import EngineRuntime
from speculator.errors import StreamError
from speculator.pointer import DraftPointer


class Guard:
    def __init__(self) -> None:
        self.is_unchanged, self.num_looks, self.num_moves = True, 0, 0

    def look_at_times(self) -> bool:
        self.num_looks += 1
        return self.is_unchanged

    def move(self, take: Callable[[], None]) -> None:
        self.num_moves += 1
        self.is_unchanged = True
        take()


@pytest.fixture
def runtime() -> Any:
    """No worker, no draft: the parts that have to do with the guard."""
    runtime: Any = object.__new__(EngineRuntime)
    runtime._guard, runtime._is_target_unchanged = Guard(), True
    runtime._announced = runtime._target_version = 0
    runtime._is_listening = False
    runtime._is_writer, runtime._capture, runtime.depth = False, None, SimpleNamespace(target_version=0)
    runtime._recorder = SimpleNamespace(
        distrust=lambda: runtime.told.append("distrust"), trust=lambda: runtime.told.append("trust")
    )
    runtime.told = []
    return runtime


def test_weights_that_changed_on_another_rank_are_no_longer_trusted_here(
    runtime: Any, caplog: pytest.LogCaptureFixture
) -> None:
    others = [True, True, False, False]
    runtime._agreement = SimpleNamespace(first=lambda version: version, all=lambda holds: holds and others.pop(0))
    found = []
    for _ in range(4):
        runtime._agree_on_target()
        found.append(runtime._is_target_unchanged)
    assert found == [True, True, False, False]
    assert runtime.told == ["distrust"]
    assert len(caplog.records) == 1


def test_an_announced_target_is_the_right_one_on_every_rank(runtime: Any) -> None:
    """Rank 1 finds its weights changed: without a word that is an alarm, and with the word it is over."""
    announced = [0, 3, 3]
    runtime._agreement = SimpleNamespace(first=lambda _: announced.pop(0), all=lambda holds: holds)
    runtime._guard.is_unchanged = False
    runtime._agree_on_target()
    runtime._follow_target()
    assert (runtime._guard.num_moves, runtime.told) == (0, ["distrust"])
    runtime._agree_on_target()
    assert runtime.told == ["distrust", "trust"]
    for _ in range(2):
        runtime._follow_target()
    assert (runtime._guard.num_moves, runtime._target_version, runtime.depth.target_version) == (1, 3, 3)
    runtime._agree_on_target()
    assert runtime._is_target_unchanged


def test_what_was_announced_to_an_earlier_process_of_that_name_is_not_for_this_one(
    runtime: Any, redis_client: redis.Redis, redis_url: str
) -> None:
    """A container that starts again, on the weights of its start."""
    pointer = DraftPointer(redis_client, "m")
    runtime._is_writer, runtime._pointer, runtime._process = True, LazyPointer(redis_url, "m"), "host:1"
    pointer.announce_target("host:1", 7)
    runtime._follow_target()
    assert (runtime._guard.num_moves, runtime._target_version) == (0, 0)
    pointer.announce_target("host:1", 8)
    runtime._follow_target()
    assert (runtime._guard.num_moves, runtime._target_version) == (1, 8)


def test_it_looks_while_redis_is_away(runtime: Any) -> None:
    def away(_: str) -> int:
        raise StreamError("away")

    runtime._engine_id, runtime._pointer = "e", SimpleNamespace(depth_limit=away)
    for _ in range(2):
        with pytest.raises(StreamError):
            runtime._status()
    assert runtime._guard.num_looks == 2

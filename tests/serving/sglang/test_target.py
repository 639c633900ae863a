"""The guard over the target's weights in an SGLang server: on all ranks, and with Redis away."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from serving.sglang.pointer import LazyPointer
from serving.sglang.target import Announcements, RankTarget
from speculator.errors import StreamError
from speculator.pointer import DraftPointer


class Guard:
    def __init__(self) -> None:
        self.is_unchanged, self.num_looks, self.num_moves = True, 0, 0

    def look_at_times(self) -> bool:
        self.num_looks += 1
        return self.is_unchanged

    def move(self, change: Callable[[], None], /) -> None:
        self.num_moves += 1
        self.is_unchanged = True
        change()


class Rank:
    """One rank's target, its guard, and what its traces and its depth were told."""

    def __init__(
        self,
        *,
        first: Callable[[int], int] = lambda version: version,
        all_hold: Callable[[bool], bool] = bool,
        announcements: Announcements | None = None,
    ) -> None:
        agreement: Any = SimpleNamespace(first=first, all=all_hold)
        self.guard, self.told = Guard(), list[str | int]()
        self.target = RankTarget(
            self.guard,
            agreement,
            announcements,
            on_change=lambda: self.told.append("distrust"),
            on_renewal=lambda: self.told.append("trust"),
            on_version=self.told.append,
        )


def test_weights_that_changed_on_another_rank_are_no_longer_trusted_here(caplog: pytest.LogCaptureFixture) -> None:
    others = [True, True, False, False]
    rank = Rank(all_hold=lambda holds: holds and others.pop(0))
    found = []
    for _ in range(4):
        rank.target.agree()
        found.append(rank.target.is_unchanged)
    assert found == [True, True, False, False]
    assert rank.told == ["distrust"]
    assert len(caplog.records) == 1
    assert rank.target.status()["target_ok"] == 0


def test_an_announced_target_is_the_right_one_on_every_rank() -> None:
    """Rank 1 finds its weights changed: without a word that is an alarm, and with the word it is over."""
    announced = [0, 3, 3]
    rank = Rank(first=lambda _: announced.pop(0))
    rank.guard.is_unchanged = False
    rank.target.agree()
    rank.target.follow()
    assert (rank.guard.num_moves, rank.told) == (0, ["distrust"])
    rank.target.agree()
    assert rank.told == ["distrust", "trust"]
    for _ in range(2):
        rank.target.follow()
    assert (rank.guard.num_moves, rank.target.version, rank.told[2:]) == (1, 3, [3])
    rank.target.agree()
    assert rank.target.is_unchanged


def test_what_was_announced_to_an_earlier_process_of_that_name_is_not_for_this_one(
    redis_client: redis.Redis, redis_url: str
) -> None:
    """A container that starts again, on the weights of its start."""
    pointer = DraftPointer(redis_client, "m")
    rank = Rank(announcements=LazyPointer(redis_url, "m"))
    pointer.announce_target(rank.target.process, 7)
    rank.target.follow()
    assert (rank.guard.num_moves, rank.target.version) == (0, 0)
    pointer.announce_target(rank.target.process, 8)
    rank.target.follow()
    assert (rank.guard.num_moves, rank.target.version) == (1, 8)


def test_it_looks_while_redis_is_away() -> None:
    def away(_: str) -> None:
        raise StreamError("away")

    announcements: Any = SimpleNamespace(withdraw_announcement=away)
    rank = Rank(announcements=announcements)
    for _ in range(2):
        with pytest.raises(StreamError):
            rank.target.follow()
    assert rank.guard.num_looks == 2

"""The version of an SGLang server's target: on all ranks, across restarts, and with Redis away."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from serving.sglang.pointer import LazyPointer, RankTarget
from speculator.errors import StreamError
from speculator.redis.control_plane import DraftPointer


class Rank:
    """One rank's target, and the versions that its traces and its depth were told."""

    def __init__(self, *, first: Callable[[int], int] = lambda version: version, announcements: Any = None) -> None:
        agreement: Any = SimpleNamespace(first=first)
        self.told: list[int] = []
        self.target = RankTarget(agreement, announcements, on_version=self.told.append)


def test_a_rank_that_only_follows_hears_of_a_target_at_a_meeting() -> None:
    announced = [0, 3, 3]
    rank = Rank(first=lambda _: announced.pop(0))
    rank.target.agree()
    rank.target.follow()
    assert (rank.target.version, rank.told) == (0, [])
    rank.target.agree()
    for _ in range(2):
        rank.target.follow()
    rank.target.agree()
    rank.target.follow()
    assert (rank.target.version, rank.told) == (3, [3])
    assert rank.target.status()["target_version"] == 3


def test_what_was_announced_to_an_earlier_process_of_that_name_is_not_for_this_one(
    redis_client: redis.Redis, redis_url: str
) -> None:
    """A container that starts again, on the weights of its start."""
    pointer = DraftPointer(redis_client, "m")
    rank = Rank(announcements=LazyPointer(redis_url, "m"))
    pointer.announce_target(rank.target.process, 7)
    rank.target.follow()
    assert (rank.target.version, rank.told) == (0, [])
    pointer.announce_target(rank.target.process, 8)
    rank.target.follow()
    assert (rank.target.version, rank.told) == (8, [8])


def test_while_redis_is_away_the_version_stands() -> None:
    def away(_: str) -> None:
        raise StreamError("away")

    announcements: Any = SimpleNamespace(withdraw_announcement=away)
    rank = Rank(announcements=announcements)
    with pytest.raises(StreamError):
        rank.target.follow()
    assert (rank.target.version, rank.told) == (0, [])

"""The follower drives an engine to the desired version, and stays where it is when it cannot."""

from __future__ import annotations

import pytest

from serving.engine import SwapReport
from serving.hotswap import DraftFollower
from speculator.errors import DraftFileError, StoreError, StreamError
from tests.doubles import DoubleEngine


class FakePointer:
    def __init__(self) -> None:
        self.version: int | None = None
        self.status: dict[str, str] = {}
        self.away = False

    def desired(self) -> int | None:
        if self.away:
            raise StreamError("Redis is away")
        return self.version

    def report_engine(self, engine_id: str, status: dict[str, str]) -> None:
        self.status = status


class SwappingEngine(DoubleEngine):
    """A double whose swaps can be refused."""

    def __init__(self) -> None:
        super().__init__(draft_version=1)
        self.asked: list[int] = []
        self.refusal: Exception | None = None

    def install_draft(self, version: int) -> SwapReport:
        self.asked.append(version)
        if self.refusal is not None:
            raise self.refusal
        return super().install_draft(version)


def _follower() -> tuple[DraftFollower, SwappingEngine, FakePointer]:
    engine, pointer = SwappingEngine(), FakePointer()
    return DraftFollower(engine, pointer, engine_id="e"), engine, pointer


def test_it_installs_what_is_desired_once() -> None:
    follower, engine, pointer = _follower()
    follower.follow()
    assert engine.asked == []
    pointer.version = 4
    follower.follow()
    follower.follow()
    assert engine.asked == [4]
    assert [report.version for _, report in follower.log.installed] == [4]
    assert pointer.status["version"] == 4


def test_a_refused_version_is_not_tried_again_and_is_reported() -> None:
    follower, engine, pointer = _follower()
    pointer.version, engine.refusal = 2, DraftFileError("not finite")
    follower.follow()
    follower.follow()
    assert engine.asked == [2]
    assert pointer.status == {"version": 1, "refused": "2"}
    pointer.version, engine.refusal = 3, None
    follower.follow()
    assert engine.draft_version == 3


def test_an_unreadable_store_is_tried_again() -> None:
    follower, engine, pointer = _follower()
    pointer.version, engine.refusal = 2, StoreError("disk away")
    with pytest.raises(StoreError):
        follower.follow()
    assert pointer.status["version"] == 1, "it still says that it lives"
    assert follower.log.num_failed == 1
    engine.refusal = None
    follower.follow()
    assert engine.draft_version == 2


def test_without_redis_the_version_stays() -> None:
    follower, engine, pointer = _follower()
    pointer.away = True
    with pytest.raises(StreamError):
        follower.follow()
    assert engine.asked == []

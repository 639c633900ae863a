"""What the trainer makes of versions that engines rolled back: other weights, and a pause; the clock is ours."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from speculator.errors import StreamError
from speculator.versions import lifecycle
from speculator.versions.lifecycle import Lifecycle, VersionState
from trainer.metrics import TrainerMetrics
from trainer.release.live_review import MAX_PAUSE_S, POLL_INTERVAL_S, RollbackWatch, pause_s

PAUSE_S = 300.0


class Desk:
    """A lifecycle, a watch and its clock."""

    def __init__(self, root: Path) -> None:
        self.lifecycle, self.registry, self.now_s = Lifecycle(root), CollectorRegistry(), time.time()
        self.published: int | None = None
        self.is_redis_away = False
        self.watch = self.new_watch(self.registry)
        self.make(1, VersionState.LIVE, VersionState.PROMOTED)

    def new_watch(self, registry: CollectorRegistry) -> RollbackWatch:
        return RollbackWatch(
            self.lifecycle,
            TrainerMetrics(registry),
            published=self.pointer,
            first_pause_s=PAUSE_S,
            clock=lambda: self.now_s,
        )

    def pointer(self) -> int | None:
        if self.is_redis_away:
            raise StreamError("away")
        return self.published

    def make(self, version: int, *states: VersionState, actor: str = "engine:0") -> None:
        if self.lifecycle.state(version) is None:
            for state in (VersionState.WRITTEN, VersionState.VALIDATED, VersionState.SCORED):
                self.lifecycle.move(version, state, actor="trainer")
        for state in states:
            self.lifecycle.move(version, state, actor=actor)

    def roll_back(self, version: int, *, actor: str = "engine:0") -> None:
        self.make(version, VersionState.LIVE, VersionState.ROLLED_BACK, VersionState.QUARANTINED, actor=actor)

    def poll(self, version: int, *, after_s: float = POLL_INTERVAL_S) -> int | None:
        self.now_s += after_s
        return self.watch.poll(version)

    @property
    def gauge(self) -> float | None:
        return self.registry.get_sample_value("slipstream_trainer_publishing_paused")

    def kinds(self) -> list[str]:
        return [event.kind for event in self.lifecycle.events.tail(100) if event.kind.startswith("publishing")]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_the_pause_doubles_with_each_rollback_up_to_a_day() -> None:
    assert [pause_s(count, 300.0) for count in range(6)] == [0, 0, 300, 600, 1200, 2400]
    assert pause_s(20, 300.0) == pause_s(5000, 300.0) == MAX_PAUSE_S


def test_weights_of_a_barred_version_are_given_up_for_the_last_good_one(desk: Desk) -> None:
    assert desk.poll(1) is None
    desk.roll_back(2)
    assert desk.poll(2) == 1
    desk.make(3, VersionState.LIVE, VersionState.PROMOTED)
    desk.make(4)
    desk.lifecycle.move(4, VersionState.QUARANTINED, actor="operator:ann")
    assert desk.poll(4) == 3
    assert desk.poll(3) is None
    assert not desk.watch.paused


def test_it_looks_now_and_then_and_at_once_at_another_version(desk: Desk) -> None:
    desk.make(2)
    assert desk.poll(2) is None
    desk.roll_back(2)
    assert desk.poll(2, after_s=POLL_INTERVAL_S / 2) is None
    assert desk.poll(2, after_s=POLL_INTERVAL_S / 2) == 1
    desk.roll_back(3)
    assert desk.poll(3, after_s=0.0) == 1


def test_it_looks_also_where_the_clock_was_set_back(desk: Desk) -> None:
    desk.make(2)
    assert desk.poll(2) is None
    desk.roll_back(2)
    assert desk.poll(2, after_s=-3600.0) == 1


def test_where_no_version_is_good_there_is_nothing_to_go_back_to(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.lifecycle.move(1, VersionState.QUARANTINED, actor="operator:ann")
    assert desk.poll(1) is None


def test_where_no_version_is_good_the_newest_that_may_be_served_is_gone_back_to(desk: Desk) -> None:
    desk.lifecycle.move(1, VersionState.QUARANTINED, actor="operator:ann")
    desk.make(2)
    desk.make(3)
    desk.roll_back(4)
    assert desk.poll(4) == 3


def test_two_rollbacks_in_a_row_pause_publishing_and_it_begins_again_with_one_on_trial(desk: Desk) -> None:
    desk.roll_back(2)
    assert desk.poll(2) == 1
    assert (desk.watch.paused, desk.gauge) == (False, 0)
    desk.roll_back(3)
    assert desk.poll(3) == 1
    assert (desk.watch.paused, desk.gauge) == (True, 1)
    desk.poll(1, after_s=PAUSE_S - 10)
    assert desk.watch.paused
    desk.poll(1, after_s=20)
    assert (desk.watch.paused, desk.gauge) == (False, 0)

    desk.make(4)
    desk.published = 4
    desk.poll(4)
    assert desk.watch.paused, "one at a time"
    desk.roll_back(4)
    assert desk.poll(4) == 1
    last_s = desk.now_s
    desk.now_s = last_s + 1.9 * PAUSE_S
    desk.poll(1)
    assert desk.watch.paused, "twice as long"
    desk.now_s = last_s + 2.1 * PAUSE_S
    desk.poll(1)
    assert not desk.watch.paused

    desk.make(5, VersionState.LIVE)
    desk.published = 5
    desk.poll(5)
    assert desk.watch.paused
    desk.lifecycle.move(5, VersionState.PROMOTED, actor="engine:0")
    desk.poll(5)
    assert not desk.watch.paused
    assert desk.kinds() == 3 * ["publishing_paused", "publishing_resumed"]


@pytest.mark.parametrize("num_rollbacks", [2, 3])
def test_a_trial_without_a_verdict_holds_up_publishing_for_as_long_as_a_pause_and_no_longer(
    desk: Desk, num_rollbacks: int
) -> None:
    for version in range(2, 2 + num_rollbacks):
        desk.roll_back(version)
    desk.make(9, VersionState.LIVE)  # and its engine goes away
    desk.published = 9
    held_s = pause_s(num_rollbacks, PAUSE_S)
    desk.poll(9, after_s=2 * held_s)
    desk.poll(9, after_s=held_s - 10)
    assert desk.watch.paused
    desk.poll(9, after_s=20)
    assert not desk.watch.paused


def test_a_trial_begins_when_its_version_is_announced(desk: Desk) -> None:
    for version in (2, 3):
        desk.roll_back(version)
    desk.make(4)
    desk.is_redis_away = True
    desk.poll(4, after_s=2 * PAUSE_S)
    desk.poll(4, after_s=2 * PAUSE_S)
    desk.is_redis_away, desk.published = False, 4
    desk.poll(4)
    assert desk.watch.paused, "no engine has seen it before"


def test_nobody_waits_for_a_trial_of_what_was_never_published(desk: Desk) -> None:
    for version in (2, 3):
        desk.roll_back(version)
    desk.published = 1
    desk.make(4)  # and the trainer is killed
    desk.poll(4, after_s=2 * PAUSE_S)
    assert not desk.watch.paused
    desk.is_redis_away = True
    desk.poll(4)
    assert desk.watch.paused, "nothing could be published anyway"


def test_an_operators_promotion_ends_the_pause(desk: Desk) -> None:
    for version in (2, 3, 4):
        desk.roll_back(version)
    desk.poll(4)
    assert desk.watch.paused
    desk.lifecycle.move(1, VersionState.PROMOTED, actor="operator:ann")
    desk.poll(1)
    assert not desk.watch.paused


def test_rollbacks_by_operators_pause_nothing(desk: Desk) -> None:
    for version in (2, 3, 4):
        desk.roll_back(version, actor="operator:ann")
    assert desk.poll(4) == 1
    assert not desk.watch.paused


def test_rollbacks_by_the_trainers_own_look_count_and_the_promotions_before_them_do_not(desk: Desk) -> None:
    desk.roll_back(2)
    desk.make(3, VersionState.LIVE, VersionState.PROMOTED)
    desk.poll(3)
    desk.lifecycle.bar(3, actor="trainer:review", reason="worse after all")
    assert desk.poll(3) == 1
    assert desk.watch.paused


@pytest.mark.parametrize("is_seen_at_start", [True, False])
@pytest.mark.parametrize("ahead_s", [6 * 3600, -6 * 3600])
def test_a_pause_is_as_long_where_an_engines_clock_is_wrong(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, ahead_s: int, is_seen_at_start: bool
) -> None:
    if not is_seen_at_start:
        desk.poll(1)
    with monkeypatch.context() as patched:
        patched.setattr(lifecycle, "now_ms", lambda: int(1000 * (desk.now_s + ahead_s)))
        desk.roll_back(2)
        desk.roll_back(3)
    desk.poll(1)
    assert desk.watch.paused == (ahead_s > 0 or not is_seen_at_start), "nobody knows when a slow clock meant"
    desk.poll(1, after_s=PAUSE_S + 20)
    assert not desk.watch.paused


def test_a_pause_is_no_longer_where_the_clock_is_set_back(desk: Desk) -> None:
    desk.roll_back(2)
    desk.roll_back(3)
    desk.poll(1)
    desk.poll(1, after_s=-6 * 3600)
    assert desk.watch.paused
    desk.poll(1, after_s=PAUSE_S + 20)
    assert not desk.watch.paused


def test_a_trial_holds_up_publishing_no_longer_where_the_clock_is_set_back(desk: Desk) -> None:
    desk.roll_back(2)
    desk.roll_back(3)
    desk.poll(1)
    desk.make(4, VersionState.LIVE)
    desk.published = 4
    desk.poll(4, after_s=PAUSE_S + 20)
    desk.poll(4, after_s=-6 * 3600)
    assert desk.watch.paused
    desk.poll(4, after_s=PAUSE_S + 20)
    assert not desk.watch.paused


def test_a_pause_survives_a_restart(desk: Desk) -> None:
    desk.roll_back(2)
    desk.roll_back(3)
    after = desk.new_watch(CollectorRegistry())
    assert after.poll(1) is None
    assert after.paused


def test_states_that_cannot_be_read_stop_nothing(desk: Desk) -> None:
    desk.roll_back(2)
    (desk.lifecycle.root / "states" / "000002.json").write_text("damaged")
    assert desk.poll(2) is None
    assert not desk.watch.paused

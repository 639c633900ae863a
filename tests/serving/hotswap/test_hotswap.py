"""The follower drives an engine to the desired version, takes back what does not keep up, and stays where it cannot."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from serving.engine import SwapReport, WatchedRound
from serving.hotswap.breaker import MOVING_TARGET_PATIENCE_S, LiveWatch, WatchRules
from serving.hotswap.follower import DraftFollower, SwapLog
from serving.sglang.report import swap_fields
from speculator.errors import DraftFileError, EngineBusyError, StoreError, StreamError, UnknownDraftError
from speculator.redis.control_plane import CanaryHolder, CanarySlot
from speculator.versions.lifecycle import Lifecycle, Number, Transition, VersionState
from tests.fixtures.doubles import DoubleEngine
from tests.fixtures.waiting import wait_until
from tests.serving.watching import CHAT, rounds, serve

WAY = (VersionState.WRITTEN, VersionState.VALIDATED, VersionState.SCORED)


class FullStore(Lifecycle):
    """Its disk may be full."""

    is_full = False

    def bar(self, version: int, *, actor: str, reason: str, numbers: Mapping[str, Number] | None = None) -> None:
        if self.is_full:
            raise StoreError("the disk is full")
        super().bar(version, actor=actor, reason=reason, numbers=numbers)


class FakePointer:
    def __init__(self) -> None:
        self.version: int | None = None
        self.pin: int | None = None
        self.status: dict[str, str] = {}
        self.away = False

    def desired(self) -> int | None:
        self._reach()
        return self.version if self.pin is None else self.pin

    def pinned(self) -> int | None:
        self._reach()
        return self.pin

    def replace(self, old: int, new: int) -> bool:
        self._reach()
        if self.version != old:
            return False
        self.version = new
        return True

    def hold_canary(self, holder: CanaryHolder, *, ttl_s: float, on_probation: bool) -> CanarySlot:
        self._reach()
        return CanarySlot(is_held=True, is_awaited=False, num_crashed=0)

    def release_canary(self, holder: CanaryHolder, *, forget_crashes: bool = False) -> None:
        self._reach()

    def report_engine(self, engine_id: str, status: dict[str, str]) -> None:
        self.status = status

    def _reach(self) -> None:
        if self.away:
            raise StreamError("Redis is away")


class SwappingEngine(DoubleEngine):
    """A double whose swaps can be refused."""

    def __init__(self) -> None:
        super().__init__(draft_version=1)
        self.asked: list[int] = []
        self.refusal: Exception | None = None
        self.removed: int | None = None
        self.damaged: int | None = None

    def install_draft(self, version: int) -> SwapReport:
        self.asked.append(version)
        if version == self.damaged:
            raise DraftFileError("the weights are truncated or altered")
        if version == self.removed:
            raise UnknownDraftError(f"draft version {version} is not in the store")
        if self.refusal is not None:
            raise self.refusal
        return super().install_draft(version)


def _follower() -> tuple[DraftFollower, SwappingEngine, FakePointer]:
    engine, pointer = SwappingEngine(), FakePointer()
    return DraftFollower(engine, pointer, engine_id="e"), engine, pointer


def test_it_installs_what_is_desired_once() -> None:
    follower, engine, pointer = _follower()
    follower.poll()
    assert engine.asked == []
    pointer.version = 4
    follower.poll()
    follower.poll()
    assert engine.asked == [4]
    assert [report.version for _, report in follower.log.installed] == [4]
    assert pointer.status["version"] == 4


def test_a_refused_version_is_not_tried_again_and_is_reported() -> None:
    follower, engine, pointer = _follower()
    pointer.version, engine.refusal = 2, DraftFileError("not finite")
    follower.poll()
    assert pointer.version == 1, "the version in service is published instead"
    pointer.version = 2
    follower.poll()
    assert engine.asked == [2]
    assert (pointer.status["version"], pointer.status["refused"]) == (1, "2")
    pointer.version, engine.refusal = 3, None
    follower.poll()
    assert engine.draft_version == 3


@pytest.mark.parametrize("failure", [StoreError("disk away"), torch.OutOfMemoryError(), KeyError("fc.weight")])
def test_whatever_fails_in_one_attempt_it_counts_and_follows_on(failure: Exception) -> None:
    """On its own thread, which would otherwise end, with all swaps and all reports."""
    engine, pointer = SwappingEngine(), FakePointer()
    follower = DraftFollower(engine, pointer, engine_id="e", poll_s=0.01, status=lambda: swap_fields(follower.log))
    pointer.version, engine.refusal = 2, failure
    follower.start()
    wait_until(lambda: engine.asked == [2, 2])
    wait_until(lambda: pointer.status.get("swap_failures") == 2)
    assert (pointer.status["version"], pointer.status["refused"]) == (1, "")
    engine.refusal = None
    wait_until(lambda: engine.draft_version == 2 and pointer.status["version"] == 2)
    follower.stop()


def test_an_engine_whose_ranks_have_not_met_is_asked_again_at_once() -> None:
    """They meet only while all of them offer the version; pauses that grow would keep them apart."""
    engine, pointer = SwappingEngine(), FakePointer()
    follower = DraftFollower(engine, pointer, engine_id="e", poll_s=0.01)
    pointer.version, engine.refusal = 2, EngineBusyError("its ranks cannot agree on a step")
    follower.start()
    # Doubled each time, the pauses would add up to over 40 s.
    wait_until(lambda: len(engine.asked) > 12)
    engine.refusal = None
    wait_until(lambda: engine.draft_version == 2)
    follower.stop()
    assert follower.log.num_failed == 0


class Pauses(threading.Event):
    """Waits for nothing, and notes for how long it should have."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.seconds: list[float | None] = []
        self._count = count

    def wait(self, timeout: float | None = None) -> bool:
        if len(self.seconds) == self._count:
            self.set()
        else:
            self.seconds.append(timeout)
        return self.is_set()


def pauses_of(follower: DraftFollower, count: int) -> list[float | None]:
    """Before each of its first looks."""
    follower._stop = pauses = Pauses(count)
    follower.start()
    wait_until(pauses.is_set)
    follower.stop()
    return pauses.seconds


def test_pauses_that_grew_are_short_again_for_ranks_that_have_not_met() -> None:
    class Engine(SwappingEngine):
        def install_draft(self, version: int) -> SwapReport:
            self.refusal = StoreError("disk away") if len(self.asked) < 3 else EngineBusyError("no step is agreed on")
            return super().install_draft(version)

    pointer = FakePointer()
    pointer.version = 2
    follower = DraftFollower(Engine(), pointer, engine_id="e", poll_s=1.0)
    assert pauses_of(follower, 7) == [1.0, 2.0, 4.0, 8.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("part", ["desired", "report_engine", "status"])
def test_whatever_fails_beside_an_attempt_it_follows_on(part: str) -> None:
    engine, pointer = SwappingEngine(), FakePointer()
    fails = [True]

    class Failing(FakePointer):
        def desired(self) -> int | None:
            fail("desired")
            return pointer.desired()

        def report_engine(self, engine_id: str, status: dict[str, str]) -> None:
            fail("report_engine")
            pointer.report_engine(engine_id, status)

    def fail(where: str) -> dict[str, str]:
        if where == part and fails:
            fails.pop()
            raise RuntimeError("deque mutated during iteration")
        return {}

    pointer.version = 2
    follower = DraftFollower(engine, Failing(), engine_id="e", poll_s=0.01, status=lambda: fail("status"))
    follower.start()
    wait_until(lambda: pointer.status.get("version") == 2)
    follower.stop()


def test_the_last_hundred_swaps_are_known_and_all_are_counted() -> None:
    swaps, engine = SwapLog(), SwappingEngine()
    for version in range(2, 130):
        swaps.add(engine.install_draft(version))
    assert [report.version for _, report in swaps.installed] == list(range(30, 130))
    assert swaps.num_installed == 128


def test_without_redis_the_version_stays() -> None:
    follower, engine, pointer = _follower()
    pointer.away = True
    with pytest.raises(StreamError):
        follower.poll()
    assert engine.asked == []


# -- with a watch --------------------------------------------------------------------------------------------------


class Scene:
    """An engine on version 1, which is promoted; versions 2 and 3 are scored. Rounds come when a test says so."""

    def __init__(self, root: Path) -> None:
        self.engine, self.pointer, self.states = SwappingEngine(), FakePointer(), FullStore(root)
        for version in (1, 2, 3):
            for state in WAY:
                self.states.move(version, state, actor="test")
        for state in (VersionState.LIVE, VersionState.PROMOTED):
            self.states.move(1, state, actor="test")
        self._rng, self.now_s = random.Random(0), 0.0
        self.start()

    def start(self) -> None:
        """The engine's process, perhaps another one: it begins with the last good version."""
        self.engine.draft_version = self.states.last_good() or 1
        self.watch = LiveWatch(self.engine.draft_version, WatchRules(enough_rounds=1000), clock=lambda: self.now_s)
        self.follower = DraftFollower(
            self.engine,
            self.pointer,
            engine_id="e",
            watch=self.watch,
            lifecycle=self.states,
        )

    def serve(self, length: float = 2.0, count: int = 2000, *, target_version: int = 0) -> None:
        """Rounds of the version in service."""
        version = self.engine.draft_version
        serve(self.watch, rounds(self._rng, version, {CHAT: length}, target_version=target_version), count)

    def on_trial(self, version: int = 2) -> None:
        self.serve()
        self.pointer.version = version
        self.follower.poll()
        assert (self.engine.draft_version, self.watch.watched) == (version, version)

    def roll_back(self) -> None:
        self.on_trial()
        self.serve(1.0, 200)
        self.follower.poll()


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_version_waits_until_the_incumbent_is_known(scene: Scene) -> None:
    scene.pointer.version = 2
    scene.follower.poll()
    assert scene.engine.asked == []
    scene.serve()
    scene.follower.poll()
    assert scene.engine.asked == [2]
    assert scene.states.state(2) is VersionState.LIVE
    assert scene.pointer.status["watched"] == 2


def test_a_good_version_is_promoted(scene: Scene) -> None:
    scene.on_trial()
    scene.serve(2.4, 1000)
    scene.follower.poll()
    last = scene.states.history(2)[-1]
    assert (last.state, last.actor, last.reason) == (
        VersionState.PROMOTED,
        "engine:e",
        "not found worse than the incumbent",
    )
    assert float(last.numbers["accept_change"] or 0) == pytest.approx(0.2, abs=0.08)
    assert scene.follower.log.verdicts == {"promoted": 1, "rolled_back": 0, "withdrawn": 0}
    assert scene.states.last_good() == 2


def test_a_bad_version_is_taken_back_and_barred(scene: Scene) -> None:
    scene.roll_back()
    assert scene.engine.asked == [2, 1]
    states = [transition.state for transition in scene.states.history(2)]
    assert states == [*WAY, VersionState.LIVE, VersionState.ROLLED_BACK, VersionState.QUARANTINED]
    numbers = scene.states.history(2)[-1].numbers
    assert numbers["back_to"] == 1
    assert float(numbers["accept_change"] or 0) < -0.3
    assert scene.pointer.version == 1
    assert len(scene.states.rollbacks_in_a_row()) == 1
    assert scene.follower.log.last_verdict == "version 2 rolled_back: accepts less than the incumbent"
    scene.pointer.version = 3
    scene.follower.poll()
    assert scene.engine.draft_version == 3, "the incumbent is still known"
    scene.follower.poll()
    assert (scene.engine.draft_version, scene.watch.watched) == (3, 3), "the verdict was about the other one"


def test_a_draft_is_not_blamed_for_a_new_target(scene: Scene) -> None:
    scene.on_trial()
    scene.serve(1.0, 200, target_version=1)
    scene.follower.poll()
    assert (scene.engine.draft_version, scene.watch.watched) == (2, None)
    assert scene.follower.log.verdicts == {"promoted": 0, "rolled_back": 0, "withdrawn": 1}
    assert scene.follower.log.last_verdict == "version 2 withdrawn: the target has moved"
    assert scene.watch.baseline_verifications == 200, "a new record, of the version that stayed"
    scene.serve(1.0, 2000, target_version=1)
    scene.pointer.version = 3
    scene.follower.poll()
    assert scene.watch.watched == 3
    scene.serve(1.0, 1000, target_version=1)
    scene.follower.poll()
    assert scene.states.state(3) is VersionState.PROMOTED, "as good as the one before it, on this target"


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_newer_version_that_waits_ends_a_trial_that_has_shown_enough(scene: Scene, is_asked: bool) -> None:
    scene.on_trial()
    scene.pointer.version = 3
    scene.follower.poll()
    if is_asked:
        scene.serve(2.0, 600)
    else:
        for _ in range(600):
            scene.watch.observe(WatchedRound(2, 1, False, 0.06, 1, ()))
    scene.follower.poll()
    assert scene.states.state(2) is (VersionState.PROMOTED if is_asked else VersionState.LIVE)
    assert scene.follower.log.verdicts == {"promoted": int(is_asked), "rolled_back": 0, "withdrawn": int(not is_asked)}
    scene.follower.poll()
    assert scene.watch.watched == 3


def test_patience_with_a_moving_target_begins_anew_with_another_version(scene: Scene) -> None:
    scene.serve(count=100)
    scene.serve(count=100, target_version=1)
    scene.pointer.version = 2
    scene.follower.poll()
    scene.now_s = MOVING_TARGET_PATIENCE_S - 1
    scene.pointer.pin = 3
    scene.follower.poll()
    assert scene.engine.draft_version == 3
    scene.now_s += 2
    scene.pointer.pin = None
    scene.follower.poll()
    assert scene.watch.watched is None, "the pinned version serves since two seconds"
    scene.now_s += MOVING_TARGET_PATIENCE_S
    scene.follower.poll()
    assert scene.watch.watched == 2


def test_an_incumbent_that_a_moving_target_keeps_unknown_is_not_waited_for_for_ever(scene: Scene) -> None:
    scene.serve(count=100)
    scene.pointer.version = 2
    for step in range(3):
        scene.follower.poll()
        scene.serve(count=100, target_version=step + 1)
    assert scene.engine.draft_version == 1
    scene.now_s = MOVING_TARGET_PATIENCE_S
    scene.follower.poll()
    assert (scene.engine.draft_version, scene.watch.watched) == (2, 2)


def test_the_rollback_waits_for_nothing(scene: Scene) -> None:
    """The store cannot be written and Redis is away: the engine goes back all the same, and says so later."""
    scene.on_trial()
    scene.serve(1.0, 200)
    scene.pointer.away = scene.states.is_full = True
    with pytest.raises(StreamError):
        scene.follower.poll()
    assert scene.engine.draft_version == 1
    assert scene.states.state(2) is VersionState.LIVE
    scene.pointer.away = scene.states.is_full = False
    scene.follower.poll()
    assert scene.states.state(2) is VersionState.QUARANTINED
    assert scene.pointer.version == 1
    assert scene.engine.asked == [2, 1]


def test_a_trial_is_looked_at_as_often_while_redis_is_away(scene: Scene) -> None:
    scene.pointer.away = True
    assert pauses_of(scene.follower, 4) == [0.5, 1.0, 2.0, 4.0]
    scene.pointer.away = False
    scene.start()
    scene.on_trial()
    scene.pointer.away = True
    assert pauses_of(scene.follower, 4) == [0.5] * 4


def test_a_store_that_cannot_be_read_keeps_no_bad_version_in_service(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is barred once the store is back."""
    scene.on_trial()
    scene.serve(1.0, 200)
    with monkeypatch.context() as broken:
        broken.setattr(scene.states, "history", store_is_away)
        scene.follower.poll()
    assert scene.engine.draft_version == 1
    scene.follower.poll()
    assert scene.states.state(2) is VersionState.QUARANTINED


def test_a_store_that_cannot_be_read_takes_no_version_out_of_service(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.on_trial()
    monkeypatch.setattr(scene.states, "history", store_is_away)
    scene.follower.poll()
    assert (scene.engine.draft_version, scene.watch.watched) == (2, 2)


def store_is_away(version: int) -> list[Transition]:
    raise StoreError("the store is away")


def test_without_a_store_too_the_pointer_is_moved_once_redis_is_back(scene: Scene) -> None:
    """There, nothing else says that the version is bad."""
    scene.follower = DraftFollower(scene.engine, scene.pointer, engine_id="e", watch=scene.watch)
    scene.on_trial()
    scene.serve(1.0, 200)
    scene.pointer.away = True
    with pytest.raises(StreamError):
        scene.follower.poll()
    scene.pointer.away = False
    scene.follower.poll()
    assert (scene.engine.draft_version, scene.pointer.version) == (1, 1)


def test_a_rollback_that_fails_is_tried_again(scene: Scene) -> None:
    scene.on_trial()
    scene.serve(1.0, 200)
    scene.engine.refusal = EngineBusyError("the ranks cannot agree")
    with pytest.raises(EngineBusyError):
        scene.follower.poll()
    assert scene.engine.draft_version == 2
    assert scene.states.state(2) is VersionState.QUARANTINED, "so that no other engine tries it"
    assert scene.pointer.version == 1
    scene.serve(4.0, 3000)
    with pytest.raises(EngineBusyError):
        scene.follower.poll()
    scene.engine.refusal = None
    scene.follower.poll()
    assert scene.engine.draft_version == 1
    assert scene.states.state(2) is VersionState.QUARANTINED
    assert scene.follower.log.verdicts == {"promoted": 0, "rolled_back": 1, "withdrawn": 0}, "it stands"


def test_a_verdict_that_was_not_carried_out_says_nothing_of_the_next_version(scene: Scene) -> None:
    scene.on_trial()
    scene.serve(1.0, 200)
    scene.engine.refusal = EngineBusyError("the ranks cannot agree")
    with pytest.raises(EngineBusyError):
        scene.follower.poll()
    scene.engine.refusal = None
    scene.serve(2.0, 10, target_version=1)
    scene.follower.poll()
    assert scene.engine.draft_version == 1, "barred, though the trial ended as the target moved"
    scene.serve(2.0, target_version=1)
    scene.pointer.version = 3
    scene.follower.poll()
    assert scene.watch.watched == 3
    scene.follower.poll()
    assert (scene.engine.draft_version, scene.watch.watched) == (3, 3)
    assert scene.states.state(3) is VersionState.LIVE


def test_a_rollback_passes_over_an_incumbent_that_was_removed(scene: Scene) -> None:
    scene.pointer.pin = 3
    scene.follower.poll()
    scene.pointer.pin = None
    scene.on_trial()
    assert scene.states.forget(3)
    scene.engine.removed = 3
    scene.serve(1.0, 200)
    scene.follower.poll()
    assert (scene.engine.draft_version, scene.pointer.version) == (1, 1)
    assert scene.states.state(2) is VersionState.QUARANTINED
    assert scene.watch.baseline_verifications == 0, "the next one is not compared with what was removed"
    scene.serve()
    scene.follower.poll()
    assert scene.watch.baseline_verifications > 0


def test_a_rollback_passes_over_an_incumbent_that_cannot_be_read(scene: Scene) -> None:
    """Also while the store cannot note that it is barred."""
    scene.pointer.pin = 3
    scene.follower.poll()
    scene.pointer.pin = None
    scene.on_trial()
    scene.engine.damaged, scene.states.is_full = 3, True
    scene.serve(1.0, 200)
    for _ in range(2):
        scene.follower.poll()
    assert scene.engine.asked == [3, 2, 3, 1]
    scene.states.is_full = False
    scene.follower.poll()
    assert [scene.states.state(version) for version in (2, 3)] == [VersionState.QUARANTINED] * 2


def test_a_trial_that_others_ended_goes_back_past_an_incumbent_that_was_removed(scene: Scene) -> None:
    scene.pointer.pin = 3
    scene.follower.poll()
    scene.pointer.pin = None
    scene.on_trial()
    assert scene.states.forget(3)
    scene.states.bar(2, actor="trainer:review", reason="accepts less")
    scene.follower.poll()
    assert (scene.engine.draft_version, scene.watch.watched) == (1, None)
    assert scene.follower.log.verdicts["withdrawn"] == 1
    assert scene.watch.baseline_verifications == 0, "what is known is of the one that was removed"


def test_a_version_that_is_barred_in_service_gives_way_to_the_last_good_one(scene: Scene) -> None:
    """Not to the one that this engine began with."""
    for version in (2, 3):
        for state in (VersionState.LIVE, VersionState.PROMOTED):
            scene.states.move(version, state, actor="engine:f")
    scene.pointer.version = 3
    scene.follower.poll()
    assert scene.engine.draft_version == 3
    scene.states.bar(3, actor="trainer:review", reason="accepts less")
    scene.follower.poll()
    assert (scene.engine.draft_version, scene.pointer.version) == (2, 2)


def test_a_pinned_version_comes_at_once_and_is_not_tried(scene: Scene) -> None:
    scene.on_trial()
    scene.pointer.pin = 3
    scene.follower.poll()
    assert (scene.engine.draft_version, scene.watch.watched) == (3, None)
    assert scene.follower.log.verdicts["withdrawn"] == 1
    scene.serve(1.0)
    scene.follower.poll()
    assert scene.engine.draft_version == 3
    assert scene.states.state(2) is VersionState.LIVE, "nobody has judged it"


def test_a_version_that_is_pinned_during_its_trial_stays(scene: Scene) -> None:
    scene.on_trial()
    scene.pointer.pin = 2
    scene.follower.poll()
    scene.serve(1.0)
    scene.follower.poll()
    assert (scene.engine.draft_version, scene.watch.watched) == (2, None)
    assert scene.watch.baseline_verifications == 0, "what is known is of the one before it, too"


def test_a_promoted_version_comes_at_once(scene: Scene) -> None:
    """The operator, or another engine, has gone back to it."""
    for state in (VersionState.LIVE, VersionState.PROMOTED):
        scene.states.move(3, state, actor="operator:o")
    scene.pointer.version = 3
    scene.follower.poll()
    assert (scene.engine.draft_version, scene.watch.watched) == (3, None)


def test_what_is_known_of_the_incumbent_outlasts_a_trial_that_others_ended(scene: Scene) -> None:
    scene.on_trial()
    known = scene.watch.baseline_verifications
    scene.serve(count=100)
    scene.states.bar(2, actor="trainer:review", reason="accepts less")
    scene.follower.poll()
    assert (scene.engine.draft_version, scene.pointer.version) == (1, 1)
    assert scene.follower.log.verdicts["withdrawn"] == 1
    assert known > 0
    assert scene.watch.baseline_verifications == known
    scene.pointer.version = 3
    scene.follower.poll()
    assert scene.engine.draft_version == 3, "it is known well enough to try the next one at once"


def test_a_barred_version_is_not_taken(scene: Scene) -> None:
    scene.states.move(2, VersionState.QUARANTINED, actor="operator:o")
    scene.serve()
    scene.pointer.version = 2
    scene.follower.poll()
    assert scene.engine.asked == []
    assert scene.pointer.version == 1


def test_instead_of_a_barred_version_the_last_good_one_is_published(scene: Scene) -> None:
    """Which this engine has not got yet."""
    for state in (VersionState.LIVE, VersionState.PROMOTED):
        scene.states.move(3, state, actor="engine:f")
    scene.states.move(2, VersionState.QUARANTINED, actor="operator:o")
    scene.pointer.version = 2
    scene.follower.poll()
    assert scene.pointer.version == 3
    scene.follower.poll()
    assert scene.engine.draft_version == 3


def test_a_damaged_version_is_quarantined(scene: Scene) -> None:
    scene.serve()
    scene.pointer.version, scene.engine.refusal = 2, DraftFileError("fc.weight is not finite")
    scene.follower.poll()
    last = scene.states.history(2)[-1]
    assert (last.state, last.reason) == (VersionState.QUARANTINED, "fc.weight is not finite")
    assert scene.pointer.version == 1
    assert scene.engine.draft_version == 1
    scene.follower.poll()
    assert scene.engine.asked == [2]


@pytest.mark.parametrize("written", [(), (VersionState.LIVE,), (VersionState.LIVE, VersionState.ROLLED_BACK)])
def test_after_a_crash_it_goes_on_from_what_was_written(scene: Scene, written: tuple[VersionState, ...]) -> None:
    """Killed after the install and any number of the writes that follow it."""
    scene.pointer.version = 2
    for state in written:
        scene.states.move(2, state, actor="engine:e")
    scene.start()
    assert scene.engine.draft_version == 1
    scene.serve()
    scene.follower.poll()
    if VersionState.ROLLED_BACK in written:
        assert scene.states.state(2) is VersionState.QUARANTINED
        assert (scene.engine.draft_version, scene.pointer.version) == (1, 1)
    else:
        assert scene.states.state(2) is VersionState.LIVE
        assert scene.watch.watched == 2


@pytest.mark.parametrize("states", [(), WAY[:2]])
def test_a_version_that_nobody_has_scored_is_not_taken(scene: Scene, states: tuple[VersionState, ...]) -> None:
    scene.serve()
    for state in states:
        scene.states.move(9, state, actor="test")
    scene.pointer.version = 9
    scene.follower.poll()
    assert scene.engine.asked == []
    assert scene.pointer.version == 9, "it may be scored yet"
    for state in WAY[len(states) :]:
        scene.states.move(9, state, actor="test")
    scene.follower.poll()
    assert scene.engine.draft_version == 9


def test_without_a_watch_what_is_published_serves_and_is_promoted(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    follower = DraftFollower(scene.engine, scene.pointer, engine_id="e", lifecycle=scene.states)
    scene.pointer.version = 2
    follower.poll()
    assert scene.engine.draft_version == 2
    assert scene.states.last_good() == 2

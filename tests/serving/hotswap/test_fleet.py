"""Several followers on one Redis and one store: one tries a version, all follow its verdict, whatever dies or joins."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest
import redis

from serving.engine import SwapReport, WatchedRound
from serving.hotswap.breaker import LiveWatch, WatchRules
from serving.hotswap.canary import INSTALL_S, PATIENCE_S, PROBATION_S, SLOT_S, YIELD_S
from serving.hotswap.follower import DraftFollower
from speculator.errors import DraftFileError, EngineBusyError, StoreError, StreamError
from speculator.redis.client import RedisKeys
from speculator.redis.control_plane import CanaryHolder, CanarySlot, DraftPointer
from speculator.versions.lifecycle import VersionState
from tests.fixtures.doubles import DoubleEngine
from tests.serving.hotswap.test_hotswap import WAY, FullStore
from tests.serving.watching import CHAT, rounds, serve

MODEL = "toy"
KEYS = RedisKeys(model_key=MODEL)


class Line(DraftPointer):
    """One engine's connection to Redis, which may be cut; `on_hold` is called before the canary's slot is asked for."""

    is_cut = is_reply_lost = False
    on_hold: Callable[[], None] = staticmethod(lambda: None)

    def desired(self) -> int | None:
        self._reach()
        return super().desired()

    def pinned(self) -> int | None:
        self._reach()
        return super().pinned()

    def replace(self, old: int, new: int) -> bool:
        self._reach()
        return super().replace(old, new)

    def report_engine(self, engine_id: str, status: Mapping[str, str | int | float]) -> None:
        self._reach()
        super().report_engine(engine_id, status)

    def hold_canary(self, holder: CanaryHolder, *, ttl_s: float, on_probation: bool) -> CanarySlot:
        self._reach()
        self.on_hold()
        slot = super().hold_canary(holder, ttl_s=ttl_s, on_probation=on_probation)
        if self.is_reply_lost:
            raise StreamError("Redis is away")
        return slot

    def release_canary(self, holder: CanaryHolder, *, forget_crashes: bool = False) -> None:
        self._reach()
        super().release_canary(holder, forget_crashes=forget_crashes)

    def _reach(self) -> None:
        if self.is_cut:
            raise StreamError("Redis is away")


class RankedEngine(DoubleEngine):
    """Its ranks cannot agree on a swap while they are idle; it cannot read the `damaged` version."""

    is_idle, damaged = False, 0

    def install_draft(self, version: int) -> SwapReport:
        if version == self.damaged:
            raise DraftFileError("fc.weight is not finite")
        if self.is_idle:
            raise EngineBusyError("the ranks did not all meet with this version")
        return super().install_draft(version)


class Member:
    """One engine's process."""

    def __init__(self, scene: Scene, name: str, *, poll_s: float = 0) -> None:
        self.name, self._scene, self._rng = name, scene, random.Random(name)
        self.engine = RankedEngine(draft_version=scene.states.last_good() or 1)
        self.watch = LiveWatch(self.engine.draft_version, WatchRules(enough_rounds=1000))
        self.line = Line(scene.client, MODEL)
        self.follower = DraftFollower(
            self.engine,
            self.line,
            engine_id=name,
            poll_s=poll_s,
            watch=self.watch,
            lifecycle=scene.states,
            clock=lambda: scene.now_s,
        )

    def serve(self, count: int = 2000, *, target_version: int = 0) -> None:
        """Rounds of the version in service, as good as it is."""
        length = 1.0 if self.engine.draft_version in self._scene.bad else 1.5 + 0.5 * self.engine.draft_version
        lengths = {CHAT: min(length, 4.5)}
        serve(self.watch, rounds(self._rng, self.engine.draft_version, lengths, target_version=target_version), count)

    @property
    def draft(self) -> int:
        return self.engine.draft_version

    @property
    def installed(self) -> list[int]:
        return [report.version for _, report in self.follower.log.installed]

    @property
    def role(self) -> str:
        return self._scene.pointer.engines()[self.name]["role"]


class Scene:
    """Version 1 is promoted; 2, 3 and 4 are scored. All but those in `bad` are better than the one before."""

    def __init__(self, root: Path, client: redis.Redis) -> None:
        self.client, self.states, self.pointer = client, FullStore(root), DraftPointer(client, MODEL)
        self.now_s, self.bad = 1000.0, set[int]()
        for version in (1, 2, 3, 4):
            self.add(version)
        for state in (VersionState.LIVE, VersionState.PROMOTED):
            self.states.move(1, state, actor="test")
        self.pointer.publish(1)
        self.members: list[Member] = []

    def add(self, version: int) -> None:
        for state in WAY:
            self.states.move(version, state, actor="test")

    def start(self, *names: str) -> list[Member]:
        """Engines that have served for a while."""
        begun = [Member(self, name) for name in names]
        self.members += begun
        for member in begun:
            member.serve()
        self.follow()
        return begun

    def follow(self, times: int = 1) -> None:
        for _ in range(times):
            for member in self.members:
                member.follower.poll()

    def die(self, member: Member) -> None:
        """Killed; its report and, where it had it, the canary's slot have expired."""
        self.members.remove(member)
        self.client.delete(KEYS.engine(member.name))
        if self.canary == member.name:
            self.client.delete(KEYS.canary)

    @property
    def canary(self) -> str | None:
        """The engine that has the slot."""
        held = self.client.get(KEYS.canary)
        return None if held is None else msgspec.json.decode(held, type=CanaryHolder).engine_id  # type: ignore[arg-type]

    @property
    def drafts(self) -> list[int]:
        return [member.draft for member in self.members]


@pytest.fixture
def scene(tmp_path: Path, redis_client: redis.Redis) -> Scene:
    return Scene(tmp_path, redis_client)


# -- verdicts ------------------------------------------------------------------------------------------------------


def test_a_good_version_goes_from_the_canary_to_all(scene: Scene) -> None:
    scene.start("a", "b", "c", "d")
    scene.pointer.publish(2)
    scene.follow(3)
    assert scene.drafts == [2, 1, 1, 1]
    assert [member.role for member in scene.members] == ["canary", "waiting", "waiting", "waiting"]
    scene.members[0].serve(1000)
    scene.follow(2)
    assert scene.drafts == [2, 2, 2, 2]
    assert [member.role for member in scene.members] == ["settled"] * 4
    last = scene.states.history(2)[-1]
    assert (last.state, last.actor) == (VersionState.PROMOTED, "engine:a")
    assert [member.follower.log.verdicts["promoted"] for member in scene.members] == [1, 0, 0, 0]
    assert scene.canary is None


def test_a_bad_version_never_leaves_the_canary(scene: Scene) -> None:
    scene.start("a", "b", "c", "d")
    scene.bad.add(2)
    scene.pointer.publish(2)
    scene.follow(3)
    for member in scene.members:
        member.serve(300)
    scene.follow(3)
    assert scene.drafts == [1, 1, 1, 1]
    assert scene.states.state(2) is VersionState.QUARANTINED
    assert [member.installed for member in scene.members[1:]] == [[], [], []]
    assert scene.pointer.desired() == 1
    scene.pointer.publish(3)
    scene.follow()
    assert sorted(scene.drafts) == [1, 1, 1, 3], "the next one has its canary at once"


def test_a_version_that_is_judged_just_before_an_engine_takes_the_slot_is_not_tried(scene: Scene) -> None:
    (a,) = scene.start("a")
    scene.pointer.publish(2)
    a.line.on_hold = lambda: scene.states.bar(2, actor="engine:b", reason="worse")
    scene.follow()
    assert (a.installed, scene.canary) == ([], None)


def test_a_version_that_is_promoted_just_before_an_engine_takes_the_slot_serves_without_a_trial(scene: Scene) -> None:
    (a,) = scene.start("a")
    scene.pointer.publish(2)

    def promote() -> None:
        for state in (VersionState.LIVE, VersionState.PROMOTED):
            scene.states.move(2, state, actor="engine:b")

    a.line.on_hold = promote
    scene.follow()
    assert (a.installed, scene.canary) == ([], None)
    scene.follow()
    assert (a.draft, a.watch.watched) == (2, None)


@pytest.mark.parametrize("is_promoted", [True, False])
def test_every_engine_leaves_a_version_that_is_barred(scene: Scene, is_promoted: bool) -> None:
    """By the trainer's review, or by an operator."""
    a, *_ = scene.start("a", "b", "c")
    scene.pointer.publish(2)
    scene.follow()
    if is_promoted:
        a.serve(1000)
        scene.follow(2)
    assert scene.drafts == ([2, 2, 2] if is_promoted else [2, 1, 1])
    scene.states.bar(2, actor="trainer:review", reason="worse on newer traces")
    scene.follow(2)
    assert scene.drafts == [1, 1, 1]
    assert (scene.pointer.desired(), scene.canary) == (1, None)


def test_a_newer_version_waits_for_the_verdict(scene: Scene) -> None:
    a, b = scene.start("a", "b")
    scene.pointer.publish(2)
    scene.follow()
    scene.pointer.publish(3)
    scene.follow(2)
    assert scene.drafts == [2, 1]
    a.serve(1000)
    b.follower.poll()
    scene.follow()
    assert scene.states.state(2) is VersionState.PROMOTED
    a.serve(600)
    scene.follow(2)
    assert scene.drafts == [3, 2], "the other one has what was confirmed meanwhile"


def test_a_version_whose_trial_a_moving_target_ended_is_tried_by_others(scene: Scene) -> None:
    """The canary keeps it, without a verdict; a verdict of another engine is for all."""
    a, b, c = scene.start("a", "b", "c")
    scene.pointer.publish(2)
    scene.follow()
    a.serve(100, target_version=5)
    scene.follow()
    assert (scene.drafts, scene.canary) == ([2, 2, 1], "b")
    scene.bad.add(2)
    b.serve(300)
    scene.follow(2)
    assert scene.drafts == [1, 1, 1]
    assert c.installed == []


def test_an_engine_on_a_version_without_a_verdict_gets_what_others_confirmed_since(scene: Scene) -> None:
    a, b = scene.start("a", "b")
    scene.pointer.publish(2)
    scene.follow()
    a.serve(100, target_version=5)
    scene.pointer.publish(3)
    scene.follow()
    assert (scene.drafts, scene.canary) == ([2, 3], "b")
    scene.pointer.publish(4)
    scene.follow()
    b.serve(600)
    scene.follow(2)
    assert scene.states.last_good() == 3
    assert a.installed == [2, 3]


# -- engines that join, end, or have no traffic --------------------------------------------------------------------


def test_an_engine_without_traffic_gets_what_the_canary_confirmed(scene: Scene) -> None:
    (a,) = scene.start("a")
    idle = Member(scene, "idle")
    scene.members.append(idle)
    scene.pointer.publish(2)
    scene.follow()
    assert (a.draft, idle.draft, idle.role) == (2, 1, "needs traffic")
    scene.pointer.publish(3)
    a.serve(1000)
    scene.follow(2)
    assert idle.draft == 2, "also with the next one published"


def test_a_dead_canary_makes_room_for_another(scene: Scene) -> None:
    a, b, c = scene.start("a", "b", "c")
    scene.pointer.publish(2)
    scene.follow(2)
    scene.die(a)
    scene.follow()
    assert scene.drafts == [2, 1]
    b.serve(1000)
    scene.follow(2)
    assert (c.draft, scene.states.state(2)) == (2, VersionState.PROMOTED)
    (again,) = scene.start("a")
    assert again.draft == 2, "it begins with what was promoted last"


def test_a_canary_that_starts_again_goes_on_as_the_canary(scene: Scene) -> None:
    """Before its slot has expired."""
    a, _ = scene.start("a", "b")
    scene.pointer.publish(2)
    scene.follow(2)
    scene.members.remove(a)
    again = Member(scene, "a")
    scene.members.append(again)
    assert again.draft == 1
    again.serve()
    scene.follow(2)
    assert (scene.drafts, scene.canary) == ([1, 2], "a")


@pytest.mark.parametrize("names", [("a", "a", "a"), ("a", "b", "c")])
def test_a_version_that_ends_its_engines_is_tried_twice_and_barred(scene: Scene, names: tuple[str, ...]) -> None:
    """Whether an engine starts again under its own name or under a new one."""
    scene.pointer.publish(2)
    for name in names[:2]:
        (alone,) = scene.start(name)
        scene.follow()
        assert alone.draft == 2
        scene.die(alone)
    (third,) = scene.start(names[2])
    scene.follow(2)
    assert (third.draft, third.installed) == (1, [])
    last = scene.states.history(2)[-1]
    assert (last.state, last.actor) == (VersionState.QUARANTINED, f"engine:{names[2]}")
    assert (last.reason, last.numbers["engines_that_ended"]) == ("engines ended as they tried it", 2)
    assert scene.pointer.desired() == 1
    scene.pointer.publish(3)
    scene.follow()
    assert third.draft == 3, "the next one has its turn"


def test_an_engine_that_fails_as_it_tries_a_version_has_not_stopped_in_order(scene: Scene) -> None:
    scene.pointer.publish(2)
    for name in ("a", "b"):
        (alone,) = scene.start(name)
        scene.follow()
        assert alone.draft == 2
        alone.follower.start()
        alone.follower.stop(is_in_order=False)
        scene.die(alone)
    (third,) = scene.start("c")
    scene.follow(2)
    assert (third.draft, scene.states.state(2)) == (1, VersionState.QUARANTINED)


def test_an_engine_that_only_follows_goes_back_to_the_version_before(scene: Scene) -> None:
    a, b = scene.start("a", "b")
    for version in (2, 3):
        scene.pointer.publish(version)
        scene.follow()
        a.serve(1000)
        scene.follow(3)
        assert scene.drafts == [version, version]
    scene.states.bar(3, actor="trainer", reason="the review")
    scene.follow()
    assert b.draft == 2, "and not what it started with"


def two_end_as_they_try(scene: Scene) -> None:
    scene.pointer.publish(2)
    for name in ("a", "b"):
        (alone,) = scene.start(name)
        scene.follow()
        scene.die(alone)


def test_the_count_of_ends_outlives_who_could_not_write_it_down(scene: Scene) -> None:
    """While the store takes nothing the version is not tried either, and a crash then forgets nothing."""
    two_end_as_they_try(scene)
    scene.states.is_full = True
    third = Member(scene, "c")
    third.serve()
    for _ in range(3):
        with pytest.raises(StoreError):
            third.follower.poll()
    assert (third.draft, third.installed) == (1, [])
    scene.states.is_full = False
    scene.client.delete(KEYS.canary)
    (fourth,) = scene.start("d")
    scene.follow(2)
    assert (fourth.draft, fourth.installed) == (1, [])
    assert scene.states.state(2) is VersionState.QUARANTINED


@pytest.mark.parametrize("is_full_first", [True, False])
def test_a_version_that_an_operator_releases_is_tried_again(scene: Scene, is_full_first: bool) -> None:
    two_end_as_they_try(scene)
    third = Member(scene, "c")
    third.serve()
    scene.states.is_full = is_full_first
    if is_full_first:
        with pytest.raises(StoreError):
            third.follower.poll()
    scene.states.is_full = False
    third.follower.poll()
    assert scene.states.state(2) is VersionState.QUARANTINED
    scene.states.move(2, VersionState.SCORED, actor="operator:test")
    scene.pointer.publish(2)
    third.follower.poll()
    assert third.draft == 2


def test_engines_that_stop_in_order_are_not_held_against_the_version(scene: Scene) -> None:
    scene.pointer.publish(2)
    for _ in range(3):
        (alone,) = scene.start("a")
        scene.follow()
        assert alone.draft == 2
        alone.follower.start()
        alone.follower.stop()
        assert scene.canary is None
        scene.die(alone)
    assert scene.states.state(2) is VersionState.LIVE


@pytest.mark.parametrize("is_reply_lost", [True, False])
def test_engines_that_stop_in_order_before_the_trial_are_not_held_against_the_version(
    scene: Scene, is_reply_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim is in Redis, and then its reply is lost, or the store cannot be read."""
    scene.pointer.publish(2)
    for name in ("a", "b"):
        member = Member(scene, name)
        member.serve()
        with monkeypatch.context() as broken:
            if is_reply_lost:
                member.line.is_reply_lost = True
            else:
                member.line.on_hold = lambda broken=broken: broken.setattr(scene.states, "state", store_is_away)
            with pytest.raises(StreamError if is_reply_lost else StoreError):
                member.follower.poll()
            assert scene.canary == name
            member.follower.start()
            member.follower.stop()
        assert scene.canary is None
    (third,) = scene.start("c")
    scene.follow()
    assert third.draft == 2


def test_engines_that_go_on_to_a_newer_version_are_not_held_against_the_one_before(scene: Scene) -> None:
    """They had the slot, and could not install the one before the newer one came."""
    for name in ("a", "b"):
        member = Member(scene, name)
        member.serve()
        member.engine.is_idle = True
        for version in (2, 3):
            scene.pointer.publish(version)
            with pytest.raises(EngineBusyError):
                member.follower.poll()
        scene.client.delete(KEYS.canary)
    scene.pointer.publish(2)
    (third,) = scene.start("c")
    scene.follow()
    assert (third.draft, scene.states.state(2)) == (2, VersionState.LIVE)


def store_is_away(version: int) -> VersionState | None:
    raise StoreError("the store is away")


def test_an_engine_that_ends_after_its_probation_is_not_held_against_the_version(scene: Scene) -> None:
    scene.pointer.publish(2)
    for _ in range(3):
        (alone,) = scene.start("a")
        scene.follow(2)
        assert alone.draft == 2
        scene.now_s += PROBATION_S
        scene.follow()
        scene.die(alone)
    assert scene.states.state(2) is VersionState.LIVE


def test_an_idle_canary_gives_its_place_on(scene: Scene) -> None:
    a, b = scene.start("a", "b")
    scene.pointer.publish(2)
    scene.follow(2)
    assert scene.drafts == [2, 1]
    scene.now_s += PATIENCE_S
    b.follower.poll()
    assert scene.drafts == [2, 1], "the slot is free once the other has left the version"
    scene.follow(2)
    assert scene.drafts == [1, 2]
    assert a.follower.log.last_verdict == "version 2 withdrawn: another engine tries it"
    assert b.role == "canary"


def test_an_idle_canary_alone_stays(scene: Scene) -> None:
    scene.start("a")
    scene.pointer.publish(2)
    scene.follow(2)
    scene.now_s += 100 * PATIENCE_S
    scene.follow(2)
    assert (scene.drafts, scene.canary) == ([2], "a")


def test_its_patience_doubles_each_time_that_an_engine_gives_the_version_on(scene: Scene) -> None:
    """Or engines with little traffic would hand a version round for ever."""
    scene.start("a", "b")
    scene.pointer.publish(2)
    scene.follow(2)
    for patience_s, drafts in ((PATIENCE_S, [1, 2]), (PATIENCE_S, [2, 1]), (PATIENCE_S, [2, 1]), (PATIENCE_S, [1, 2])):
        scene.now_s += patience_s
        scene.follow(3)
        assert scene.drafts == drafts


def test_an_idle_canary_that_cannot_go_back_does_not_keep_its_slot(scene: Scene) -> None:
    a, b = scene.start("a", "b")
    scene.pointer.publish(2)
    scene.follow(2)
    a.engine.is_idle = True
    scene.now_s += PATIENCE_S
    for _ in range(2):
        with pytest.raises(EngineBusyError):
            a.follower.poll()
    assert scene.canary == "a"
    scene.client.delete(KEYS.canary)  # it expires, for it is not renewed
    with pytest.raises(EngineBusyError):
        a.follower.poll()
    b.follower.poll()
    assert (scene.drafts, scene.canary) == ([2, 2], "b")
    a.engine.is_idle = False
    scene.follow(2)
    assert (scene.drafts, scene.canary) == ([1, 2], "b")


def test_a_canary_with_nothing_to_compare_gives_its_place_to_one_that_has(scene: Scene) -> None:
    """Its incumbent hardly drafted, so it was ready at once; the new version has all the traffic there is."""
    a, b = Member(scene, "a"), Member(scene, "b")
    scene.members += [a, b]
    serve(a.watch, itertools.repeat(WatchedRound(1, 1, False, 0.03, 1, ())), 500)
    scene.pointer.publish(2)
    scene.follow()
    b.serve()
    scene.follow()
    a.serve(5000)
    scene.follow()
    assert (a.draft, b.draft, a.watch.watched) == (2, 1, 2)
    scene.now_s += PATIENCE_S
    scene.follow(3)
    assert (a.draft, b.draft) == (1, 2)
    b.serve(1000)
    scene.follow(2)
    assert b.follower.log.verdicts["promoted"] == 1
    assert a.draft == 2


def test_an_engine_that_cannot_swap_holds_nobody_for_long(scene: Scene) -> None:
    a, b = scene.start("a", "b")
    a.engine.is_idle = True
    scene.pointer.publish(2)
    with pytest.raises(EngineBusyError):
        a.follower.poll()
    b.follower.poll()
    assert (b.draft, scene.canary) == (1, "a")
    assert scene.client.pttl(KEYS.canary) <= 1000 * INSTALL_S, "the slot expires by itself"
    scene.now_s += INSTALL_S
    a.follower.poll()
    b.follower.poll()
    assert (b.draft, scene.canary) == (2, "b")
    scene.now_s += YIELD_S
    a.follower.poll()
    assert a.draft == 1


def test_a_canary_that_cannot_read_the_version_gives_its_slot_back(scene: Scene) -> None:
    (a,) = scene.start("a")
    a.engine.damaged = 2
    scene.pointer.publish(2)
    scene.follow(2)
    assert (a.draft, a.role, scene.canary) == (1, "settled", None)
    assert scene.states.state(2) is VersionState.QUARANTINED


def test_the_slot_is_asked_for_and_renewed_now_and_then_and_expires_soon(scene: Scene) -> None:
    """Engines look twice a second, and each request is a write in Redis."""
    scene.members += [Member(scene, name, poll_s=0.5) for name in "ab"]
    asked = Counter[str]()
    for member in scene.members:
        member.serve()
        member.line.on_hold = lambda name=member.name: asked.update([name])
    scene.pointer.publish(2)
    scene.follow()
    assert 1000 * SLOT_S < scene.client.pttl(KEYS.canary) <= 1000 * INSTALL_S, "an installation may take long"
    for _ in range(8):
        scene.now_s += 0.5
        scene.follow()
    assert scene.drafts == [2, 1]
    assert asked == {"a": 3, "b": 3}, "every two seconds, and as soon as it is installed"
    assert 0 < scene.client.pttl(KEYS.canary) <= 1000 * SLOT_S


def test_a_version_that_is_barred_before_it_could_be_installed_is_not_installed(scene: Scene) -> None:
    (a,) = scene.start("a")
    a.engine.is_idle = True
    scene.pointer.publish(2)
    with pytest.raises(EngineBusyError):
        scene.follow()
    a.engine.is_idle = False
    scene.states.bar(2, actor="trainer:review", reason="worse on newer traces")
    scene.pointer.publish(3)
    scene.follow()
    assert a.installed == [3]


# -- Redis ---------------------------------------------------------------------------------------------------------


def test_what_redis_loses_leaves_known_versions_and_converges(scene: Scene) -> None:
    a, *_ = scene.start("a", "b", "c")
    scene.pointer.publish(2)
    scene.follow()
    scene.client.flushall()
    scene.follow(2)
    assert (scene.drafts, scene.canary) == ([2, 1, 1], "a"), "the canary takes its slot again"
    scene.pointer.publish(2)
    a.serve(1000)
    scene.follow(2)
    assert scene.drafts == [2, 2, 2]
    assert scene.states.state(2) is VersionState.PROMOTED


@pytest.mark.parametrize("is_bad", [True, False])
def test_a_verdict_does_not_wait_for_redis(scene: Scene, is_bad: bool) -> None:
    a, b = scene.start("a", "b")
    scene.bad |= {2} if is_bad else set()
    scene.pointer.publish(2)
    scene.follow()
    a.line.is_cut = True
    a.serve(1000)
    with pytest.raises(StreamError):
        a.follower.poll()
    assert scene.states.state(2) is (VersionState.QUARANTINED if is_bad else VersionState.PROMOTED)
    b.follower.poll()
    assert scene.drafts == ([1, 1] if is_bad else [2, 2])
    a.line.is_cut = False
    scene.follow()
    assert (scene.canary, scene.pointer.desired()) == (None, 1 if is_bad else 2)


def test_a_canary_that_was_cut_off_keeps_what_another_has_promoted_meanwhile(scene: Scene) -> None:
    a, b = scene.start("a", "b")
    scene.pointer.publish(2)
    scene.follow()
    a.line.is_cut = True
    scene.client.delete(KEYS.canary)  # it expires
    b.follower.poll()
    b.serve(1000)
    b.follower.poll()
    assert scene.states.state(2) is VersionState.PROMOTED
    scene.pointer.publish(3)
    b.follower.poll()
    assert (scene.drafts, scene.canary) == ([2, 3], "b")
    a.line.is_cut = False
    a.follower.poll()
    assert (a.installed, a.role) == ([2], "needs traffic")


def test_an_operator_who_publishes_a_version_again_has_the_last_word(scene: Scene) -> None:
    """Though the engine that took it back could not reach Redis until then."""
    (a,) = scene.start("a")
    scene.bad.add(2)
    scene.pointer.publish(2)
    scene.follow()
    a.line.is_cut = True
    a.serve(300)
    with pytest.raises(StreamError):
        a.follower.poll()
    assert (a.draft, scene.states.state(2)) == (1, VersionState.QUARANTINED)
    scene.states.move(2, VersionState.SCORED, actor="operator:o")
    scene.pointer.publish(2)
    a.line.is_cut = False
    a.follower.poll()
    assert scene.pointer.desired() == 2


def test_a_canary_that_was_cut_off_for_too_long_leaves_the_version_to_the_next(scene: Scene) -> None:
    a, b = scene.start("a", "b")
    scene.pointer.publish(2)
    scene.follow()
    a.line.is_cut = True
    scene.client.delete(KEYS.canary)  # expired
    b.follower.poll()
    assert scene.drafts == [2, 2]
    a.line.is_cut = False
    scene.follow(2)
    assert (scene.drafts, scene.canary) == ([1, 2], "b")
    scene.die(b)
    (c,) = scene.start("c")
    scene.follow()
    assert c.draft == 2, "one engine has ended, and not two"


# -- all of it -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_a_bad_version_stays_on_its_canary_and_engines_converge(scene: Scene, seed: int) -> None:
    """Engines die, join, serve and poll in any order while good and bad versions are published."""
    rng, newest = random.Random(seed), 4
    scene.start("a", "b", "c")
    for _ in range(40):
        match rng.choice(["publish", "die", "join", "lose", "serve", "serve", "follow", "follow", "follow"]):
            case "publish":
                newest += 1
                scene.add(newest)
                scene.bad |= {newest} if rng.random() < 0.5 else set()
                scene.pointer.publish(newest)
            case "die" if scene.members:
                scene.die(rng.choice(scene.members))
            case "join" if len(scene.members) < 4:
                name = rng.choice("abcdef")
                if name not in {member.name for member in scene.members}:
                    scene.start(name)
            case "lose" if scene.canary is None:
                scene.client.delete(*(KEYS.canary_trials(version) for version in range(newest + 1)))
            case "serve" if scene.members:
                rng.choice(scene.members).serve(500)
            case "follow" if scene.members:
                scene.now_s += rng.choice([1.0, 30.0, 130.0])
                rng.choice(scene.members).follower.poll()
        for version in scene.bad:
            assert scene.drafts.count(version) <= 1
            assert scene.states.state(version) is not VersionState.PROMOTED
    if not scene.members:
        scene.start("a")
    for _ in range(12):
        scene.now_s += 130
        for member in scene.members:
            member.serve(1000)
        scene.follow(2)
    settled = scene.states.last_good()
    assert set(scene.drafts) == {settled} == {scene.pointer.desired()}
    assert not any(scene.states.state(version) is VersionState.PROMOTED for version in scene.bad)

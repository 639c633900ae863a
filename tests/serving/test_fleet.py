"""Several followers on one Redis and one store: how a version spreads, and what any of their ends leaves behind."""

from __future__ import annotations

import itertools
import random
import threading
from pathlib import Path

import pytest
import redis

import serving.turn
from serving.engine import SwapReport
from serving.evidence import WatchedRound
from serving.hotswap import DraftFollower
from serving.judgement import WatchRules
from serving.place import InWaves
from serving.watch import LiveWatch
from speculator.errors import EngineBusyError, StoreError, StreamError
from speculator.fleet import Fleet
from speculator.keys import RedisKeys
from speculator.lifecycle import Lifecycle, State
from speculator.pointer import DraftPointer
from speculator.waves import Spread, WaveRules, admit, begin
from tests.doubles import DoubleEngine
from tests.serving.watching import CHAT, rounds, serve

MODEL = "toy"
RULES = WaveRules()
WAY = (State.WRITTEN, State.VALIDATED, State.SCORED)


class Member:
    """One engine's process; `now_s` is the clock that all share."""

    def __init__(self, scene: Scene, name: str) -> None:
        self.name, self._scene, self._rng = name, scene, random.Random(name)
        self.engine = DoubleEngine(draft_version=scene.states.last_good() or 1)
        self.watch = LiveWatch(self.engine.draft_version, WatchRules(max_verifications=1000))
        self.follower = DraftFollower(
            self.engine,
            scene.pointer,
            engine_id=name,
            poll_s=0,
            watch=self.watch,
            lifecycle=scene.states,
            fleet=scene.fleet,
        )
        assert isinstance(self.follower._place, InWaves)
        self.turn = self.follower._place._turn
        self.turn._clock = lambda: scene.now_s

    def serve(self, count: int = 2000, *, target_version: int = 0) -> None:
        """Rounds of the version in service, as good as it is."""
        length = 1.0 if self.engine.draft_version in self._scene.bad else 1.5 + 0.5 * self.engine.draft_version
        made = rounds(self._rng, self.engine.draft_version, {CHAT: length})
        serve(self.watch, (one._replace(target_version=target_version) for one in made), count)

    @property
    def draft(self) -> int:
        return self.engine.draft_version

    @property
    def role(self) -> str:
        return self._scene.pointer.engines()[self.name]["role"]


class Scene:
    """Version 1 is promoted; 2, 3 and 4 are scored. All but those in `bad` are better than the one before."""

    def __init__(self, root: Path, client: redis.Redis) -> None:
        self.client, self.states = client, Lifecycle(root)
        self.pointer, self.fleet = DraftPointer(client, MODEL), Fleet(client, MODEL)
        self.now_s, self.bad = 1000.0, set[int]()
        for version in (1, 2, 3, 4):
            for state in WAY:
                self.states.move(version, state, actor="test")
        for state in (State.LIVE, State.PROMOTED):
            self.states.move(1, state, actor="test")
        self.pointer.publish(1)
        self.members: list[Member] = []

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
                member.follower.follow()

    def die(self, member: Member) -> None:
        """Killed, and its report has expired."""
        self.members.remove(member)
        self.client.delete(RedisKeys(model_key=MODEL).engine(member.name))

    @property
    def drafts(self) -> list[int]:
        return [member.draft for member in self.members]


@pytest.fixture
def scene(tmp_path: Path, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(serving.turn, "LOOK_S", 0.0)
    monkeypatch.setattr(serving.turn, "RETURN_S", 0.0)
    return Scene(tmp_path, redis_client)


def test_a_good_version_goes_from_the_canary_to_all_in_waves(scene: Scene) -> None:
    scene.start("a", "b", "c", "d")
    scene.pointer.publish(2)
    scene.follow(3)
    assert scene.drafts == [2, 1, 1, 1]
    assert [member.role for member in scene.members] == ["canary", "waiting", "waiting", "waiting"]
    scene.members[0].serve(1000)
    scene.follow(2)
    assert scene.drafts == [2, 2, 2, 1]
    assert [member.role for member in scene.members] == ["canary", "wave 1", "wave 1", "waiting"]
    assert scene.states.state(2) is State.LIVE, "one engine's verdict is not enough"
    for member in scene.members[1:3]:
        member.serve(1000)
    scene.follow(2)
    assert scene.drafts == [2, 2, 2, 2]
    scene.members[3].serve(1000)
    scene.follow(2)
    last = scene.states.history(2)[-1]
    assert (last.state, last.numbers["engines"], last.numbers["engines_that_kept_it"]) == (State.PROMOTED, 4, 4)
    scene.follow()
    assert {member.role for member in scene.members} == {"settled"}


def test_a_bad_version_never_leaves_the_canary(scene: Scene) -> None:
    scene.start("a", "b", "c", "d")
    scene.bad.add(2)
    scene.pointer.publish(2)
    scene.follow(3)
    scene.members[0].serve(300)
    for member in scene.members[1:]:
        member.serve(300)
    scene.follow(3)
    assert scene.drafts == [1, 1, 1, 1]
    assert scene.states.state(2) is State.QUARANTINED
    assert [member.follower.log.installed for member in scene.members[1:]] == [[], [], []]
    assert scene.pointer.desired() == 1
    scene.pointer.publish(3)
    scene.follow()
    assert sorted(scene.drafts) == [1, 1, 1, 3], "the next one has its canary at once"


def test_a_version_that_is_bad_for_one_of_the_wave_is_left_by_all(scene: Scene) -> None:
    a, b, c = scene.start("a", "b", "c")
    scene.pointer.publish(2)
    scene.follow()
    a.serve(1000)
    scene.follow()
    assert scene.drafts == [2, 2, 2]
    scene.bad.add(2)
    b.serve(300)
    scene.follow(2)
    assert scene.drafts == [1, 1, 1]
    assert scene.states.state(2) is State.QUARANTINED
    assert (a.follower.log.verdicts["promoted"], c.follower.log.verdicts["withdrawn"]) == (1, 1)


def test_one_engine_alone_promotes_with_its_verdict(scene: Scene) -> None:
    (a,) = scene.start("a")
    scene.pointer.publish(2)
    scene.follow()
    assert a.draft == 2
    a.serve(1000)
    scene.follow()
    last = scene.states.history(2)[-1]
    assert (last.state, last.reason) == (State.PROMOTED, "accepts more than the incumbent")


def test_a_dead_canary_makes_room_for_another(scene: Scene) -> None:
    a, b, c = scene.start("a", "b", "c")
    scene.pointer.publish(2)
    scene.follow(2)
    scene.die(a)
    scene.follow()
    assert scene.drafts == [2, 1]
    b.serve(1000)
    scene.follow()
    c.serve(1000)
    scene.follow()
    assert scene.states.state(2) is State.PROMOTED
    (again,) = scene.start("a")
    assert again.draft == 2, "it begins with what was promoted last"


def unwritable(*_: object, **__: object) -> None:
    raise StoreError("the disk is full")


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
    assert (third.draft, third.follower.log.installed) == (1, [])
    last = scene.states.history(2)[-1]
    assert (last.state, last.actor) == (State.QUARANTINED, f"engine:{names[2]}")
    assert (last.reason, last.numbers["engines_that_ended"]) == ("engines ended as they tried it", 2)
    assert scene.pointer.desired() == 1
    scene.pointer.publish(3)
    scene.follow()
    assert third.draft == 3, "the next one has its turn"


def test_engines_that_are_back_before_anybody_misses_them_have_ended_all_the_same(scene: Scene) -> None:
    """Without traffic they do not ask for a place again: their reports alone say that another process has the name."""
    scene.start("a", "b", "c")
    scene.pointer.publish(2)
    for number in range(2):
        scene.follow(2)
        assert scene.members[number].draft == 2
        scene.members[number] = Member(scene, scene.members[number].name)
        scene.follow(3)
        scene.now_s += RULES.install_s
    scene.follow()
    assert scene.members[2].follower.log.installed == []
    last = scene.states.history(2)[-1]
    assert (last.state, last.actor, last.numbers["engines_that_ended"]) == (State.QUARANTINED, "engine:c", 2)


def two_end_as_they_try(scene: Scene) -> None:
    scene.pointer.publish(2)
    for name in ("a", "b"):
        (alone,) = scene.start(name)
        scene.follow()
        scene.die(alone)


def test_the_count_of_ends_outlives_who_could_not_write_it_down(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the store takes nothing the version is not tried either, and a crash then forgets nothing."""
    two_end_as_they_try(scene)
    with monkeypatch.context() as while_full:
        while_full.setattr(scene.states, "bar", unwritable)
        (third,) = scene.start("c")
        for _ in range(3):
            scene.pointer.publish(2)
            scene.follow()
        assert (third.draft, third.follower.log.installed) == (1, [])
        scene.die(third)
    (fourth,) = scene.start("d")
    scene.follow(2)
    assert (fourth.draft, fourth.follower.log.installed) == (1, [])
    assert scene.states.state(2) is State.QUARANTINED


def test_what_the_store_takes_later_is_held_against_a_released_version_no_more(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_end_as_they_try(scene)
    with monkeypatch.context() as while_full:
        while_full.setattr(scene.states, "bar", unwritable)
        (third,) = scene.start("c")
    scene.follow()
    assert scene.states.state(2) is State.QUARANTINED
    scene.states.move(2, State.SCORED, actor="operator:test")
    scene.pointer.publish(2)
    scene.follow()
    assert third.draft == 2


def test_a_version_that_an_operator_releases_is_tried_again(scene: Scene) -> None:
    scene.pointer.publish(2)
    for _ in range(2):
        (alone,) = scene.start("a")
        scene.follow()
        scene.die(alone)
    (alone,) = scene.start("a")
    scene.follow()
    scene.states.move(2, State.SCORED, actor="operator:test")
    scene.pointer.publish(2)
    scene.follow()
    assert alone.draft == 2


def test_engines_that_stop_in_order_are_not_held_against_the_version(scene: Scene) -> None:
    scene.pointer.publish(2)
    for _ in range(3):
        (alone,) = scene.start("a")
        scene.follow()
        assert alone.draft == 2
        alone.follower.start()
        alone.follower.stop()
        scene.die(alone)
    assert scene.states.state(2) is State.LIVE


def test_an_engine_that_ends_for_other_reasons_is_not_held_against_the_version(scene: Scene) -> None:
    scene.pointer.publish(2)
    for _ in range(3):
        (alone,) = scene.start("a")
        scene.follow()
        assert alone.draft == 2
        scene.now_s += RULES.early_s
        scene.follow()
        scene.die(alone)
    assert scene.states.state(2) is State.LIVE


def test_a_canary_is_heard_of_before_it_loads_its_first_version(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or others would take it for dead meanwhile."""
    scene.pointer.publish(2)
    new = Member(scene, "new")
    new.serve()
    heard: list[set[str]] = []
    install = new.engine.install_draft

    def loading(version: int) -> SwapReport:
        heard.append(set(scene.fleet.views()))
        return install(version)

    monkeypatch.setattr(new.engine, "install_draft", loading)
    new.follower.follow()
    assert heard == [{"new"}]


def test_an_idle_canary_gives_its_place_on(scene: Scene) -> None:
    a, b = scene.start("a", "b")
    scene.pointer.publish(2)
    scene.follow(2)
    assert scene.drafts == [2, 1]
    scene.now_s += RULES.canary_s
    b.follower.follow()
    assert scene.drafts == [2, 1], "the place is free once the other has left the version"
    scene.follow()
    assert scene.drafts == [1, 2]
    assert a.follower.log.last_verdict == "version 2 withdrawn: its place is another's"
    assert b.role == "canary"


def test_an_idle_canary_that_cannot_go_back_does_not_keep_its_place(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = scene.start("a", "b")
    scene.pointer.publish(2)
    scene.follow(2)

    def busy(version: int) -> None:
        raise EngineBusyError("the server is idle and its ranks cannot agree on a step")

    monkeypatch.setattr(a.engine, "install_draft", busy)
    for seconds in (RULES.canary_s, RULES.install_s):
        scene.now_s += seconds
        b.follower.follow()
        with pytest.raises(EngineBusyError):
            a.follower.follow()
    b.follower.follow()
    assert scene.drafts == [2, 2]
    assert b.role == "canary"


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
    scene.now_s += RULES.canary_s
    scene.follow(3)
    assert (a.draft, b.draft) == (1, 2)
    b.serve(1000)
    scene.follow(2)
    assert b.follower.log.verdicts["promoted"] == 1


def test_a_newcomer_gets_the_settled_version_and_its_turn_later(scene: Scene) -> None:
    a, b = scene.start("a", "b")
    scene.pointer.publish(2)
    scene.follow()
    (late,) = scene.start("late")
    assert (a.draft, b.draft, late.draft) == (2, 1, 1)
    a.serve(1000)
    scene.follow(2)
    assert scene.drafts == [2, 2, 2]


def test_a_newer_version_waits_until_all_have_the_one_before(scene: Scene) -> None:
    a, b = scene.start("a", "b")
    scene.pointer.publish(2)
    scene.follow()
    scene.pointer.publish(3)
    a.serve(1000)
    scene.follow(2)
    assert scene.drafts == [2, 2]
    b.serve(1000)
    a.serve(2000)
    scene.follow(2)
    assert scene.states.state(2) is State.PROMOTED
    scene.follow()
    assert scene.drafts == [3, 2]


def test_an_engine_without_traffic_gets_what_the_others_confirmed(scene: Scene) -> None:
    a, _ = scene.start("a", "b")
    idle = Member(scene, "idle")
    scene.members.append(idle)
    scene.pointer.publish(2)
    scene.follow()
    a.serve(1000)
    scene.follow(2)
    scene.members[1].serve(1000)
    scene.follow()
    assert scene.states.state(2) is State.LIVE, "the idle one may want it yet"
    scene.pointer.publish(3)
    scene.now_s += RULES.wave_s
    scene.follow(2)
    assert scene.states.state(2) is State.PROMOTED
    assert idle.draft == 2, "also with the next one published"


def test_a_pin_reaches_everybody_at_once(scene: Scene) -> None:
    scene.start("a", "b", "c")
    scene.pointer.publish(2)
    scene.follow()
    scene.pointer.pin(3)
    scene.follow()
    assert scene.drafts == [3, 3, 3]
    scene.pointer.unpin()
    scene.pointer.publish(1)
    scene.follow()
    assert scene.drafts == [1, 1, 1]


def test_a_canary_that_starts_again_goes_on_as_the_canary(scene: Scene) -> None:
    a, _ = scene.start("a", "b")
    scene.pointer.publish(2)
    scene.follow(2)
    scene.members.remove(a)
    again = Member(scene, "a")
    scene.members.insert(0, again)
    assert again.draft == 1
    again.serve()
    scene.follow(2)
    assert scene.drafts == [2, 1]


def test_engines_whose_target_differs_take_no_part(scene: Scene) -> None:
    a, b = scene.start("a", "b")
    other = Member(scene, "other")
    scene.members.append(other)
    other.serve(target_version=5)
    scene.follow()
    scene.pointer.publish(2)
    scene.follow()
    a.serve(1000)
    scene.follow(2)
    assert (a.draft, b.draft, other.draft) == (2, 2, 1)
    b.serve(1000)
    scene.follow()
    assert scene.states.state(2) is State.PROMOTED, "without asking it"


def test_what_redis_loses_leaves_known_versions_and_converges(scene: Scene) -> None:
    a, b, c = scene.start("a", "b", "c")
    scene.pointer.publish(2)
    scene.follow()
    a.serve(1000)
    scene.follow()
    assert scene.drafts == [2, 2, 2]
    scene.client.flushall()
    scene.follow(2)
    assert set(scene.drafts) <= {1, 2}
    scene.pointer.publish(2)
    for _ in range(4):
        scene.follow()
        for member in (a, b, c):
            member.serve(1000)
    scene.follow()
    assert scene.drafts == [2, 2, 2]
    assert scene.states.state(2) is State.PROMOTED


def test_a_verdict_waits_for_redis(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    (a,) = scene.start("a")
    scene.pointer.publish(2)
    scene.follow()
    a.serve(1000)

    def away(_: object) -> None:
        raise StreamError("Redis is away")

    with monkeypatch.context() as outage:
        outage.setattr(scene.fleet, "change_spread", away)
        with pytest.raises(StreamError):
            scene.follow()
    assert (a.draft, scene.states.state(2)) == (2, State.LIVE)
    a.follower.follow()
    assert scene.states.state(2) is State.PROMOTED


def test_after_an_outage_others_have_time_to_report_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis was away for longer than reports last: whoever is back first is not the only engine."""
    a, b, *_ = scene.start("a", "b", "c", "d")
    scene.pointer.publish(2)
    scene.follow(2)

    def away() -> None:
        raise StreamError("Redis is away")

    with monkeypatch.context() as outage:
        outage.setattr(scene.pointer, "pinned", away)
        outage.setattr(scene.fleet, "change_spread", lambda change: away())
        outage.setattr(scene.pointer, "report_engine", lambda engine_id, status: away())
        a.serve(1000)
        for member in scene.members:
            with pytest.raises(StreamError):
                member.follower.follow()
    for member in scene.members:
        scene.client.delete(RedisKeys(model_key=MODEL).engine(member.name))
    monkeypatch.setattr(serving.turn, "RETURN_S", 60.0)
    a.follower.follow()
    b.follower.follow()
    assert scene.states.state(2) is State.LIVE, "the others have no verdict, and no word of theirs is no consent"
    assert scene.drafts == [2, 1, 1, 1]
    scene.follow()
    monkeypatch.setattr(serving.turn, "RETURN_S", 0.0)
    scene.follow(3)
    assert scene.drafts == [2, 2, 2, 1]
    assert scene.states.state(2) is State.LIVE


def test_an_engine_that_cannot_swap_holds_nobody_for_long(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = scene.start("a", "b")

    def busy(version: int) -> None:
        raise EngineBusyError("the ranks cannot agree")

    monkeypatch.setattr(a.engine, "install_draft", busy)
    scene.pointer.publish(2)
    with pytest.raises(EngineBusyError):
        a.follower.follow()
    b.follower.follow()
    assert b.draft == 1
    scene.now_s += RULES.install_s
    b.follower.follow()
    assert b.draft == 2


def test_a_version_that_is_barred_before_it_could_be_installed_is_not_installed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a,) = scene.start("a")

    def busy(version: int) -> None:
        raise EngineBusyError("the ranks cannot agree")

    scene.pointer.publish(2)
    with monkeypatch.context() as while_busy:
        while_busy.setattr(a.engine, "install_draft", busy)
        with pytest.raises(EngineBusyError):
            scene.follow()
    scene.states.bar(2, actor="trainer:review", reason="worse on newer traces")
    scene.pointer.publish(3)
    scene.follow()
    assert [report.version for _, report in a.follower.log.installed] == [3]


def test_places_are_given_once_however_many_ask_together(redis_client: redis.Redis) -> None:
    fleet, start, granted = Fleet(redis_client, MODEL), threading.Barrier(8), list[str]()
    fleet.change_spread(lambda spread, engines: Spread(version=2, target=0, wave=2, opened_s=0, members={}))

    def ask(name: str) -> None:
        start.wait()
        for _ in range(5):
            spread = fleet.change_spread(
                lambda spread, engines: admit(spread, name, target=0, now_s=0, rules=RULES) if spread else None
            )
            if spread is not None and name in spread.members:
                granted.append(name)
                return

    threads = [threading.Thread(target=ask, args=(f"engine-{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spread = fleet.spread()
    assert spread is not None
    assert len(granted) == RULES.places(2)
    assert sorted(spread.members) == sorted(granted)


def test_what_is_none_of_ours_is_named(scene: Scene) -> None:
    key = RedisKeys(model_key=MODEL).spread
    scene.client.set(key, b"[1, 2")
    with pytest.raises(StreamError, match="delete that key"):
        scene.fleet.spread()
    scene.client.delete(key)
    scene.fleet.change_spread(lambda spread, engines: begin(2, "a", target=0, now_s=0))
    assert scene.fleet.spread() == begin(2, "a", target=0, now_s=0)

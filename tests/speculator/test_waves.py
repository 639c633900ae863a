"""How a version spreads over engines, whatever dies, joins, falls idle or moves its target."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from speculator.waves import (
    EngineView,
    Spread,
    Standing,
    WaveRules,
    admit,
    begin,
    is_complete,
    keep,
    look,
    succeed,
    withdraw,
)

RULES = WaveRules()
IDS = [f"engine-{number}" for number in range(5)]


def views(number: int, *, target: int = 0) -> dict[str, EngineView]:
    return {each: EngineView(draft=1, target=target) for each in IDS[:number]}


def running(spread: Spread, engines: dict[str, EngineView]) -> dict[str, EngineView]:
    """Every member has it in service."""
    return {
        each: EngineView(draft=spread.version, target=view.target) if each in spread.members else view
        for each, view in engines.items()
    }


def test_waves_double() -> None:
    assert [RULES.places(wave) for wave in range(4)] == [1, 3, 7, 15]
    assert [WaveRules(growth=1).places(wave) for wave in range(3)] == [1, 2, 3]


def test_one_engine_alone_confirms_by_itself() -> None:
    spread = keep(begin(2, "a", target=0, now_s=0), "a", target=0)
    engines = {"a": EngineView(draft=2)}
    assert is_complete(look(spread, engines, now_s=0, rules=RULES), engines, now_s=0, rules=RULES)


def test_the_next_wave_comes_with_the_canarys_verdict_and_not_before() -> None:
    engines = views(5)
    spread = begin(2, IDS[0], target=0, now_s=0)
    spread = look(spread, running(spread, engines), now_s=10_000, rules=RULES)
    assert admit(spread, IDS[1], target=0, now_s=10_000, rules=RULES) is None, "no time is too long for a canary"
    spread = keep(spread, IDS[0], target=0)
    spread = look(spread, running(spread, engines), now_s=10_000, rules=RULES)
    for each in IDS[1:3]:
        admitted = admit(spread, each, target=0, now_s=10_000, rules=RULES)
        assert admitted is not None
        spread = admitted
    assert admit(spread, IDS[3], target=0, now_s=10_000, rules=RULES) is None


def test_a_wave_ends_when_its_members_kept_it_or_after_its_time() -> None:
    engines = views(5)
    spread = keep(begin(2, IDS[0], target=0, now_s=0), IDS[0], target=0)
    spread = look(spread, running(spread, engines), now_s=0, rules=RULES)
    for each in IDS[1:3]:
        spread = admit(spread, each, target=0, now_s=0, rules=RULES) or spread
    assert look(spread, running(spread, engines), now_s=RULES.wave_s - 1, rules=RULES).wave == 1
    assert look(spread, running(spread, engines), now_s=RULES.wave_s, rules=RULES).wave == 2
    for each in IDS[1:3]:
        spread = keep(spread, each, target=0)
    assert look(spread, running(spread, engines), now_s=1, rules=RULES).wave == 2


def test_an_engine_without_traffic_is_not_waited_for_longer_than_a_wave() -> None:
    engines = views(2)
    spread = keep(begin(2, IDS[0], target=0, now_s=0), IDS[0], target=0)
    engines = running(spread, engines)
    spread = look(spread, engines, now_s=0, rules=RULES)
    assert not is_complete(spread, engines, now_s=RULES.wave_s - 1, rules=RULES)
    assert is_complete(spread, engines, now_s=RULES.wave_s, rules=RULES)


def test_a_canary_that_sees_too_little_gives_its_place_on_once_it_has_left_the_version() -> None:
    spread = begin(2, IDS[0], target=0, now_s=0)
    engines = {IDS[0]: EngineView(draft=2), IDS[1]: EngineView(draft=1, wants=2)}
    spread = look(spread, engines, now_s=RULES.canary_s, rules=RULES)
    assert spread.members[IDS[0]].standing is Standing.LEAVING
    assert admit(spread, IDS[1], target=0, now_s=RULES.canary_s, rules=RULES) is None
    spread = look(spread, {**engines, IDS[0]: EngineView(draft=1)}, now_s=RULES.canary_s + 1, rules=RULES)
    assert admit(spread, IDS[0], target=0, now_s=RULES.canary_s + 1, rules=RULES) is None, "others first"
    assert admit(spread, IDS[1], target=0, now_s=RULES.canary_s + 1, rules=RULES) is not None


def test_a_canary_that_cannot_go_back_holds_the_others_for_a_while_only() -> None:
    """Ranks that have no step to swap at, because nobody asks them."""
    engines = {IDS[0]: EngineView(draft=2), IDS[1]: EngineView(draft=1, wants=2)}
    left_s = RULES.canary_s
    spread = look(begin(2, IDS[0], target=0, now_s=0), engines, now_s=left_s, rules=RULES)
    spread = look(spread, engines, now_s=left_s + RULES.install_s - 1, rules=RULES)
    assert admit(spread, IDS[1], target=0, now_s=left_s + RULES.install_s - 1, rules=RULES) is None
    spread = look(spread, engines, now_s=left_s + RULES.install_s, rules=RULES)
    assert not spread.is_under_way
    assert admit(spread, IDS[1], target=0, now_s=left_s + RULES.install_s, rules=RULES) is not None


@pytest.mark.parametrize(
    "views_now",
    [
        {IDS[0]: EngineView(draft=2, verifications=10 * RULES.enough), IDS[1]: EngineView(draft=1, wants=2)},
        {IDS[0]: EngineView(draft=2), IDS[1]: EngineView(draft=1)},
    ],
)
def test_a_canary_keeps_its_place_while_it_learns_or_nobody_waits(views_now: dict[str, EngineView]) -> None:
    spread = look(begin(2, IDS[0], target=0, now_s=0), views_now, now_s=10 * RULES.canary_s, rules=RULES)
    assert spread.members[IDS[0]].standing is Standing.TRYING


def test_a_canary_whose_traffic_ends_gives_its_place_on() -> None:
    engines = {IDS[0]: EngineView(draft=2, verifications=2 * RULES.enough), IDS[1]: EngineView(draft=1, wants=2)}
    spread = begin(2, IDS[0], target=0, now_s=0)
    spread = look(spread, engines, now_s=2 * RULES.canary_s, rules=RULES)
    assert spread.members[IDS[0]].standing is Standing.TRYING
    spread = look(spread, engines, now_s=2 * RULES.canary_s + 1, rules=RULES)
    assert spread.members[IDS[0]].standing is Standing.LEAVING


def test_starting_again_gives_no_further_time() -> None:
    spread = begin(2, IDS[0], target=0, now_s=0)
    again = admit(spread, IDS[0], target=0, now_s=50, rules=RULES)
    assert again is not None
    assert again.members[IDS[0]].since_s == 0


def test_the_place_of_a_dead_canary_is_free() -> None:
    spread = look(begin(2, IDS[0], target=0, now_s=0), {IDS[1]: EngineView(draft=1)}, now_s=1, rules=RULES)
    assert not spread.is_under_way
    assert admit(spread, IDS[1], target=0, now_s=1, rules=RULES) is not None


def test_engines_that_end_soon_after_they_got_their_place_are_counted() -> None:
    spread = begin(2, "a", target=0, now_s=0, life="first")
    spread = look(spread, {"a": EngineView(draft=2)}, now_s=RULES.early_s - 1, rules=RULES)
    assert succeed(spread, "a", life="first", rules=RULES) == spread, "a process that asks twice has not ended"
    assert succeed(spread, "a", life="second", rules=RULES).num_early == 1
    spread = look(spread, {"b": EngineView(draft=1)}, now_s=10_000, rules=RULES)
    assert (spread.num_early, spread.members) == (1, {})
    again = admit(spread, "b", target=0, now_s=10_000, rules=RULES, life="third")
    assert again is not None
    assert look(again, {}, now_s=10_001, rules=RULES).num_early == 2


def test_an_end_is_counted_once_whoever_sees_it_first() -> None:
    """The report of the next process, its question for a place, and the silence after that."""
    spread = begin(2, "a", target=0, now_s=0, life="first")
    of_release_before, next_one = {"a": EngineView(draft=1)}, {"a": EngineView(draft=1, life="second")}
    assert look(spread, of_release_before, now_s=1, rules=RULES).num_early == 0
    assert look(spread, {"a": EngineView(draft=2, life="first")}, now_s=1, rules=RULES).num_early == 0
    spread = look(spread, next_one, now_s=2, rules=RULES)
    assert spread.num_early == 1
    spread = look(spread, next_one, now_s=3, rules=RULES)
    assert succeed(spread, "a", life="second", rules=RULES).num_early == 1
    assert look(spread, {}, now_s=4, rules=RULES).num_early == 1, "the next one had no place yet"
    again = admit(spread, "a", target=0, now_s=4, rules=RULES, life="second")
    assert again is not None
    assert look(again, {}, now_s=5, rules=RULES).num_early == 2


@pytest.mark.parametrize("is_kept", [True, False])
def test_an_engine_that_ends_later_or_with_a_good_verdict_is_not_counted(is_kept: bool) -> None:
    spread = begin(2, "a", target=0, now_s=0, life="first")
    spread = keep(spread, "a", target=0) if is_kept else spread
    seen_s = 1 if is_kept else RULES.early_s
    spread = look(spread, {"a": EngineView(draft=2)}, now_s=seen_s, rules=RULES)
    assert succeed(spread, "a", life="second", rules=RULES).num_early == 0
    assert look(spread, {}, now_s=seen_s + 1, rules=RULES).num_early == 0


def test_what_ends_other_engines_is_not_for_all_although_one_kept_it() -> None:
    engines = {"a": EngineView(draft=2), "b": EngineView(draft=2), "c": EngineView(draft=2)}
    spread = begin(2, "a", target=0, now_s=0, life="1")
    spread = keep(spread, "a", target=0)
    for one in ("b", "c"):
        admitted = admit(msgspec.structs.replace(spread, wave=1), one, target=0, now_s=1, rules=RULES, life=one)
        assert admitted is not None
        spread = admitted
    spread = look(spread, engines, now_s=2, rules=RULES)
    alone = {"a": engines["a"]}
    spread = look(spread, alone, now_s=40, rules=RULES)
    assert (spread.num_early, set(spread.members)) == (RULES.most_early, {"a"})
    assert not is_complete(spread, alone, now_s=40, rules=RULES)
    assert is_complete(keep(spread, "a", target=0), alone, now_s=40, rules=RULES), "who keeps it speaks for it"


def test_an_engine_that_stops_in_order_gives_its_place_back() -> None:
    spread = begin(2, "a", target=0, now_s=0, life="1")
    assert look(withdraw(spread, "a"), {}, now_s=1, rules=RULES).num_early == 0
    assert not withdraw(spread, "a").is_under_way
    assert withdraw(spread, "b") == spread
    kept = keep(spread, "a", target=0)
    assert withdraw(kept, "a") == kept


def test_targets_do_not_mix() -> None:
    """A verdict holds for one target, and engines with another get no place."""
    spread = keep(begin(2, IDS[0], target=4, now_s=0), IDS[0], target=4)
    engines = {IDS[0]: EngineView(draft=2, target=4), IDS[1]: EngineView(draft=1, target=3)}
    spread = look(spread, engines, now_s=0, rules=RULES)
    assert admit(spread, IDS[1], target=3, now_s=0, rules=RULES) is None
    assert is_complete(spread, engines, now_s=0, rules=RULES), "the other is not waited for"
    moved = {IDS[0]: EngineView(draft=2, target=5), IDS[1]: EngineView(draft=1, target=5)}
    spread = look(spread, moved, now_s=1, rules=RULES)
    assert spread.members[IDS[0]].standing is Standing.MOVED
    assert not is_complete(spread, moved, now_s=1000, rules=RULES)
    assert not spread.is_under_way, "a newer version need not wait for it"


def test_a_canary_whose_target_moved_holds_the_others_for_a_wave_only() -> None:
    spread = begin(2, IDS[0], target=0, now_s=0)
    engines = {IDS[0]: EngineView(draft=2, target=1), IDS[1]: EngineView(draft=1, target=1)}
    spread = look(spread, engines, now_s=RULES.wave_s - 1, rules=RULES)
    assert admit(spread, IDS[1], target=1, now_s=RULES.wave_s - 1, rules=RULES) is None
    spread = look(spread, engines, now_s=RULES.wave_s, rules=RULES)
    assert admit(spread, IDS[1], target=1, now_s=RULES.wave_s, rules=RULES) is not None


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_member_left_behind_on_an_old_target_holds_no_version_up(is_kept: bool) -> None:
    """It has had no traffic since the target moved, so it does not know."""
    spread = keep(begin(2, IDS[0], target=1, now_s=0), IDS[0], target=1)
    engines = {each: EngineView(draft=2, target=1) for each in IDS[:3]}
    spread = look(spread, engines, now_s=0, rules=RULES)
    for each in IDS[1:3]:
        spread = admit(spread, each, target=1, now_s=0, rules=RULES) or spread
    if is_kept:
        spread = keep(spread, IDS[1], target=1)
    moved = {**engines, IDS[0]: EngineView(draft=2, target=2), IDS[2]: EngineView(draft=2, target=2)}
    spread = look(spread, moved, now_s=10 * RULES.wave_s, rules=RULES)
    assert spread.target == 2
    assert not is_complete(spread, moved, now_s=100 * RULES.wave_s, rules=RULES), "nobody kept it on this target"
    assert not spread.is_under_way


@dataclass
class Engine:
    """A model of serving/turn.py: it runs what it may run, and knows what the store says."""

    draft: int = 1
    before: int = 1
    place: int = 0
    wants: int = 0
    is_kept: bool = False


class Waves(RuleBasedStateMachine):
    """Version 1 is good. Dead engines have no report; one that starts again begins with the confirmed version."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.spread: Spread | None = None
        self.engines = {each: Engine() for each in IDS[:3]}
        self.desired = self.confirmed = 1
        self.bad: set[int] = set()
        self.barred: set[int] = set()
        self.newest = 1
        self.tried_by: dict[int, list[str]] = {}
        self.given_up: dict[int, int] = {}
        """Bad version: canaries that died or gave their place on before a verdict."""

    def views(self) -> dict[str, EngineView]:
        return {each: EngineView(draft=one.draft, wants=one.wants) for each, one in self.engines.items()}

    @rule(is_bad=st.booleans())
    def publish(self, is_bad: bool) -> None:
        self.newest = self.desired = self.newest + 1
        if is_bad:
            self.bad.add(self.newest)

    @rule(seconds=st.sampled_from([1.0, 30.0, 70.0, 500.0]))
    def wait(self, seconds: float) -> None:
        """Whoever is to leave has polled meanwhile."""
        members = self.spread.members if self.spread is not None else {}
        for engine_id, member in members.items():
            if member.standing is Standing.LEAVING:
                self.poll(engine_id, has_verdict=False)
        self.now_s += seconds

    @rule(engine_id=st.sampled_from(IDS))
    def die(self, engine_id: str) -> None:
        one = self.engines.pop(engine_id, None)
        if one is not None and one.place in self.bad and one.draft == one.place:
            self.given_up[one.place] = self.given_up.get(one.place, 0) + 1

    @rule(engine_id=st.sampled_from(IDS))
    def join(self, engine_id: str) -> None:
        self.engines.setdefault(engine_id, Engine(draft=self.confirmed, before=self.confirmed))

    @rule(engine_id=st.sampled_from(IDS))
    def lose_redis(self, engine_id: str) -> None:
        """Only while nothing is tried: what Redis loses in between is in the follower's tests."""
        if self.spread is not None and not self.spread.is_under_way:
            self.spread = None

    @rule(engine_id=st.sampled_from(IDS), has_verdict=st.booleans())
    def poll(self, engine_id: str, has_verdict: bool) -> None:
        one = self.engines.get(engine_id)
        if one is None:
            return
        if one.draft in self.barred:
            one.draft, one.place = one.before, 0
        if has_verdict and one.place and one.draft == one.place and not one.is_kept:
            self.judge(engine_id, one)
        if one.place:
            self.look(engine_id, one)
        elif one.draft != self.desired:
            self.ask(engine_id, one)

    def judge(self, engine_id: str, one: Engine) -> None:
        if one.place not in self.bad:
            one.is_kept = True
            return
        self.barred.add(one.place)
        if self.desired == one.place:
            self.desired = one.before
        one.draft, one.place = one.before, 0

    def look(self, engine_id: str, one: Engine) -> None:
        assert self.spread is not None
        if self.spread.version != one.place:
            one.place = 0
            return
        if one.is_kept:
            self.spread = keep(self.spread, engine_id, target=0)
        self.spread = look(self.spread, self.views(), now_s=self.now_s, rules=RULES)
        if is_complete(self.spread, self.views(), now_s=self.now_s, rules=RULES):
            self.confirmed, one.place = one.place, 0
            return
        member = self.spread.members.get(engine_id)
        if member is None or member.standing is Standing.LEAVING:
            if one.place in self.bad:
                self.given_up[one.place] = self.given_up.get(one.place, 0) + 1
            one.draft, one.place = one.before, 0

    def ask(self, engine_id: str, one: Engine) -> None:
        one.wants = 0
        if self.desired == self.confirmed or one.draft < self.confirmed:
            one.draft = one.before = self.confirmed
            return
        spread = self.spread
        if spread is not None and spread.version > self.confirmed and spread.version not in self.barred:
            spread = look(spread, self.views(), now_s=self.now_s, rules=RULES)
            if spread.is_under_way or spread.version == self.desired:
                self.spread = spread
                one.wants = spread.version
                admitted = admit(spread, engine_id, target=0, now_s=self.now_s, rules=RULES)
                if admitted is not None:
                    self.take(engine_id, one, admitted)
                return
        self.take(engine_id, one, begin(self.desired, engine_id, target=0, now_s=self.now_s))

    def take(self, engine_id: str, one: Engine, spread: Spread) -> None:
        self.spread = spread
        one.before, one.draft, one.place, one.wants, one.is_kept = one.draft, spread.version, spread.version, 0, False
        self.tried_by.setdefault(spread.version, []).append(engine_id)

    @invariant()
    def a_bad_version_is_on_one_engine(self) -> None:
        for version in self.bad:
            assert sum(one.draft == version for one in self.engines.values()) <= 1
            assert len(self.tried_by.get(version, ())) <= 1 + self.given_up.get(version, 0)
        assert self.confirmed not in self.bad

    def teardown(self) -> None:
        """With a little traffic everywhere, all come to run the same confirmed version."""
        if not self.engines:
            self.join(IDS[0])
        for _ in range(60):
            for engine_id in list(self.engines):
                self.poll(engine_id, has_verdict=True)
            self.now_s += 10
        assert {one.draft for one in self.engines.values()} == {self.confirmed}
        assert self.desired == self.confirmed


def test_whatever_happens_a_bad_version_stays_on_its_canary_and_engines_converge() -> None:
    run_state_machine_as_test(Waves, settings=settings(max_examples=150, stateful_step_count=40, deadline=None))

"""Which engines may run a version that has not been confirmed yet: first one, the canary, then waves that double.

    asked by an engine that is ready ─▶ canary ─▶ kept ─▶ wave 1: 2 more ─▶ wave 2: 4 more ─▶ … ─▶ all: promoted
                                          └─▶ rolled back: barred in the store, and every engine leaves it

A wave is a number of places and not a list: engines take a place when they are ready for a trial, so nobody waits for
one that is idle or has died. It ends when its places are taken and every trial in them ended well, or after
`wave_s`. The canary's does not end before its own verdict; where it learns too little for one, and another engine
that is ready has asked, its place is given on. What no engine can say is said by the store: a version that is barred
or promoted there is not spread any more, and engines that never had traffic take it once it is promoted.

An engine whose process ends as it tries the version says nothing at all. Where that comes soon after it got its place
the version may be why, and is counted; the second time whoever asks next bars it (serving/turn.py). That it ended is
seen when its report expires, or when the next process reports under its engine id.

A verdict holds for one target. Engines whose target is of another version than the one that the spread is for get no
place and are not waited for; a member whose target moves stays, without a verdict (serving/watch.py), and the spread is
for the newest target of its members.

All functions are pure: reports of living engines and the time go in, and what is written to Redis comes out
(speculator/fleet.py). Times are in seconds, of any clock that those who ask share.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

_MOST_DOUBLINGS = 5


@dataclass(frozen=True, kw_only=True)
class WaveRules:
    growth: int = 2
    """How many times as many engines each wave adds as the one before; the canary is one."""
    wave_s: float = 60.0
    """A wave in which nobody has spoken against the version for so long has ended; so has the canary's when its target
    moved, so that it will have no verdict."""
    canary_s: float = 120.0
    """How long a canary may take for every `enough` verifications of its trial, if another engine waits for its place;
    twice as long for each that gave the place on before."""
    enough: int = 300
    install_s: float = 60.0
    """How long an engine may take to put the version into service, and another in its place."""
    early_s: float = 60.0
    """An engine that ends, or falls silent, so soon after it got its place may have ended of the version."""
    most_early: int = 2
    """Engines that end so before the version is held to be why."""

    def places(self, wave: int) -> int:
        """Engines that may run the version in a wave, those of the waves before among them; 0 is the canary's."""
        return sum(self.growth**each for each in range(wave + 1))


@dataclass(frozen=True, kw_only=True)
class EngineView:
    """What a living engine that takes part says of itself."""

    draft: int
    """The version that it has in service."""
    target: int = 0
    """The version of its target."""
    wants: int = 0
    """The version that it is ready to try and has no place for; 0 where there is none."""
    verifications: int = 0
    """Of its trial, those that could be compared with the version before; 0 where it has none."""
    life: str = ""
    """Names its process, as a member's does; empty where it does not say."""


class Standing(enum.StrEnum):
    TRYING = "trying"
    """It has a place, and is on its way to a verdict."""
    KEPT = "kept"
    """Its trial ended well, on the target that it has."""
    MOVED = "moved"
    """Its target moved: it runs the version without a verdict."""
    LEAVING = "leaving"
    """Its place is given on as soon as it runs another version, or has not managed to for `install_s`."""
    GONE = "gone"
    """It has left; others go first for a while."""


class Member(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    standing: Standing
    since_s: float
    """When it got its place; where it is leaving or gone, since when."""
    target: int
    wave: int
    """In which it got its place; 0 is the canary's."""
    life: str = ""
    """While it is trying, names its process: one that starts again under the same engine id is another. Empty where
    that has ended, and the next has not asked."""
    began_s: float = 0
    """When this process got it."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """How far one version has come."""

    version: int
    target: int
    """The target's version on which it is tried."""
    wave: int
    opened_s: float
    """When this wave began."""
    members: dict[str, Member]
    """By engine id."""
    num_passed: int = 0
    """Canaries that gave their place on."""
    num_early: int = 0
    """Engines that ended soon after they got their place."""
    looked_s: float = 0
    """When `look` was last applied: one look every few seconds does for all engines."""

    @property
    def is_under_way(self) -> bool:
        """Whether other versions wait for it. One that nobody tries any more, on the target that counts, makes room."""
        return any(
            member.standing is Standing.LEAVING
            or (member.standing in (Standing.TRYING, Standing.KEPT) and member.target == self.target)
            for member in self.members.values()
        )

    @property
    def taken(self) -> int:
        """Places that are taken."""
        return sum(member.standing is not Standing.GONE for member in self.members.values())

    @property
    def confirmed(self) -> frozenset[str]:
        """Members that kept it, on the target that it is tried on."""
        return frozenset(
            engine_id
            for engine_id, member in self.members.items()
            if member.standing is Standing.KEPT and member.target == self.target
        )


def begin(version: int, engine_id: str, *, target: int, now_s: float, life: str = "") -> Spread:
    """The engine is the canary; `life` names its process."""
    member = Member(standing=Standing.TRYING, since_s=now_s, target=target, wave=0, life=life, began_s=now_s)
    return Spread(version=version, target=target, wave=0, opened_s=now_s, members={engine_id: member})


def admit(
    spread: Spread, engine_id: str, *, target: int, now_s: float, rules: WaveRules, life: str = ""
) -> Spread | None:
    """With a place for this engine, which is about to try the version; None where there is none for it.

    A member that asks again has its trial before it, but no more time than it had.
    """
    before = spread.members.get(engine_id)
    since_s, wave = now_s, spread.wave
    if before is not None:
        if before.standing in (Standing.LEAVING, Standing.GONE):
            return None
        since_s, wave = before.since_s, before.wave
    elif spread.taken and (target != spread.target or spread.taken >= rules.places(spread.wave)):
        return None
    member = Member(standing=Standing.TRYING, since_s=since_s, target=target, wave=wave, life=life, began_s=now_s)
    others = {each: one for each, one in spread.members.items() if one.standing is not Standing.GONE}
    return _for_newest_target(msgspec.structs.replace(spread, members={**others, engine_id: member}))


def succeed(spread: Spread, engine_id: str, *, life: str, rules: WaveRules) -> Spread:
    """A process speaks for this engine: where another one had its place, that has ended."""
    member = spread.members.get(engine_id)
    if member is None or member.life == life or member.standing is not Standing.TRYING:
        return spread
    members = {**spread.members, engine_id: msgspec.structs.replace(member, life="")}
    num_early = spread.num_early + _ended_early(spread, member, rules)
    return msgspec.structs.replace(spread, members=members, num_early=num_early)


def keep(spread: Spread, engine_id: str, *, target: int) -> Spread:
    """Its trial on this target ended well; nothing changes where it has no place any more."""
    member = spread.members.get(engine_id)
    if member is None or member.standing in (Standing.LEAVING, Standing.GONE):
        return spread
    kept = Member(standing=Standing.KEPT, since_s=member.since_s, target=target, wave=member.wave)
    members = {**spread.members, engine_id: kept}
    # Engines that ended before ended with a version that others can serve with.
    return _for_newest_target(msgspec.structs.replace(spread, members=members, num_early=0))


def withdraw(spread: Spread, engine_id: str) -> Spread:
    """It stops in order, or is stopped: its trial ends without a verdict, and says nothing about the version."""
    member = spread.members.get(engine_id)
    if member is None or member.standing is not Standing.TRYING:
        return spread
    others = {each: one for each, one in spread.members.items() if each != engine_id}
    return msgspec.structs.replace(spread, members=others)


def look(spread: Spread, engines: Mapping[str, EngineView], *, now_s: float, rules: WaveRules) -> Spread:
    """What follows from the reports of all living engines: who is gone, whose place is given on, which wave it is."""
    for engine_id, view in engines.items():
        if view.life:
            spread = succeed(spread, engine_id, life=view.life, rules=rules)
    members, num_early = {}, spread.num_early
    for engine_id, member in spread.members.items():
        seen = _seen(member, engines.get(engine_id), spread.version, now_s, rules)
        if seen is not None:
            members[engine_id] = seen
        elif engine_id not in engines:
            num_early += _ended_early(spread, member, rules)
    changed = msgspec.structs.replace(spread, members=members, num_early=num_early, looked_s=now_s)
    spread = _for_newest_target(changed)
    spread = _give_on(spread, engines, now_s, rules)
    if _has_wave_ended(spread, engines, now_s, rules):
        return msgspec.structs.replace(spread, wave=spread.wave + 1, opened_s=now_s)
    return spread


def is_complete(spread: Spread, engines: Mapping[str, EngineView], *, now_s: float, rules: WaveRules) -> bool:
    """Whether the version is confirmed for all engines: the last wave has ended, and somebody kept it."""
    confirmed, able = spread.confirmed, _able(spread, engines)
    if not confirmed or spread.num_early >= rules.most_early:
        return False
    if able <= confirmed:
        return True
    is_last = spread.wave > 0 and rules.places(spread.wave) >= len(able)
    return is_last and now_s - spread.opened_s >= rules.wave_s


def _seen(member: Member, view: EngineView | None, version: int, now_s: float, rules: WaveRules) -> Member | None:
    """None where its place is free again."""
    if view is None:
        return None
    is_late = now_s - member.since_s >= rules.install_s
    runs = view.draft == version
    if member.standing is Standing.GONE:
        return None if is_late else member
    if member.standing is Standing.LEAVING:
        if runs:
            # Idle ranks cannot swap, and nobody is served by them: others need not wait for their next step.
            return None if is_late else member
        return msgspec.structs.replace(member, standing=Standing.GONE, since_s=now_s)
    if not runs:
        is_coming = member.standing is Standing.TRYING and not is_late
        return msgspec.structs.replace(member, target=view.target) if is_coming else None
    if view.target != member.target:
        return msgspec.structs.replace(member, standing=Standing.MOVED, target=view.target)
    return member


def _ended_early(spread: Spread, member: Member, rules: WaveRules) -> bool:
    """Of a member whose process has ended, and is not counted yet. Nobody has seen it since the last look."""
    is_trying = member.standing is Standing.TRYING and member.life != ""
    return is_trying and spread.looked_s - member.began_s < rules.early_s


def _for_newest_target(spread: Spread) -> Spread:
    target = max((member.target for member in spread.members.values()), default=spread.target)
    return msgspec.structs.replace(spread, target=target)


def _give_on(spread: Spread, engines: Mapping[str, EngineView], now_s: float, rules: WaveRules) -> Spread:
    """The place of a canary that learns too little, where another engine waits for it."""
    if spread.wave > 0 or not _is_awaited(spread, engines):
        return spread
    patience_s = rules.canary_s * 2 ** min(spread.num_passed, _MOST_DOUBLINGS)
    for engine_id, member in spread.members.items():
        periods = (now_s - member.since_s) / patience_s
        learns_little = engines[engine_id].verifications < rules.enough * periods
        if member.standing is Standing.TRYING and periods >= 1 and learns_little:
            leaving = msgspec.structs.replace(member, standing=Standing.LEAVING, since_s=now_s)
            members = {**spread.members, engine_id: leaving}
            return msgspec.structs.replace(spread, members=members, num_passed=spread.num_passed + 1)
    return spread


def _is_awaited(spread: Spread, engines: Mapping[str, EngineView]) -> bool:
    return any(
        view.wants == spread.version and view.target == spread.target
        for engine_id, view in engines.items()
        if engine_id not in spread.members
    )


def _has_wave_ended(spread: Spread, engines: Mapping[str, EngineView], now_s: float, rules: WaveRules) -> bool:
    """And another one follows."""
    is_over = now_s - spread.opened_s >= rules.wave_s
    standings = [member.standing for member in spread.members.values() if member.standing is not Standing.GONE]
    if spread.wave == 0:
        has_moved = Standing.MOVED in standings and bool(_able(spread, engines) - spread.members.keys())
        return bool(spread.confirmed) or (has_moved and is_over)
    places = rules.places(spread.wave)
    if places >= len(_able(spread, engines)):
        return False
    return is_over or (spread.taken >= places and set(standings) == {Standing.KEPT})


def _able(spread: Spread, engines: Mapping[str, EngineView]) -> frozenset[str]:
    """The engines on whose target it is tried."""
    return frozenset(engine_id for engine_id, view in engines.items() if view.target == spread.target)

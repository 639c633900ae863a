"""A fleet of engines that a new draft version spreads over: the real policy (speculator/waves.py), simulated engines.

Time goes in steps of one poll. In each step every engine does what its follower does (serving/hotswap.py, turn.py): it
asks for a place, reads the version from a store that all share, has its trial, tells what became of it, and looks now
and then. Its trials are real ones: `trials` lets the real watch (serving/watch.py) judge simulated verifications, and
each engine draws one of those verdicts with the time that it took.

Left out: clocks that differ, engines that die, and others being quicker at the document in Redis. A place that is asked
for is had at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from serving.judgement import Outcome
from serving.watch import LiveWatch
from speculator.waves import EngineView, Spread, Standing, WaveRules, admit, begin, is_complete, keep, look
from tests.serving.watching import CHAT, rounds

OLD, NEW = 1, 2
_BASELINE = 4000
"""Verifications that the incumbent is known by; some 1,500 would do."""
_LONGEST_TRIAL_POLLS = 2000


@dataclass(frozen=True, kw_only=True)
class Trial:
    seconds: float
    verifications: int
    is_kept: bool


@dataclass(frozen=True, kw_only=True)
class Setup:
    num_engines: int
    version_bytes: float
    store_bytes_per_s: float
    """Of the store, for all who read at once."""
    engine_bytes_per_s: float
    """What one engine reads and verifies at most."""
    poll_s: float
    look_s: float
    report_s: float
    rules: WaveRules = field(default_factory=WaveRules)
    longest_s: float = 3600.0


@dataclass
class Spreading:
    """Times in seconds from the publication."""

    settled_s: float = 0.0
    """When every engine runs the new version, or none does any more."""
    promoted_s: float | None = None
    barred_s: float | None = None
    num_touched: int = 0
    """Engines that ran the new version."""
    exposed_s: float = 0.0
    """Seconds in which they ran it before the verdict on it was known to all, together."""
    asks: int = 0
    looks: int = 0
    spread_bytes: float = 0.0
    """Read from Redis by asking and looking."""
    most_staging: int = 0
    waves: int = 0
    kept: int = 0


@dataclass
class _Engine:
    draft: int = OLD
    staging: int = 0
    """The version that it reads from the store; 0 where none."""
    left_bytes: float = 0.0
    has_place: bool = False
    trial: Trial | None = None
    began_s: float = 0.0
    asked_s: float = -1e9
    looked_s: float = -1e9
    wants: int = 0
    reported: EngineView = field(default_factory=lambda: EngineView(draft=OLD))
    reported_s: float = -1e9
    was_touched: bool = False


def trials(
    change: float,
    *,
    accept_length: float,
    spread: float,
    batch: int,
    verifications_per_s: float,
    poll_s: float,
    count: int,
) -> list[Trial]:
    """Verdicts of the real watch on a version whose accept length differs by `change` from the incumbent's."""
    return [
        _trial(random.Random(seed), change, accept_length, spread, batch, verifications_per_s, poll_s)
        for seed in range(count)
    ]


def _trial(
    rng: random.Random, change: float, length: float, spread: float, batch: int, per_s: float, poll_s: float
) -> Trial:
    clock = [0.0]
    watch = LiveWatch(OLD, clock=lambda: clock[0])
    incumbent = rounds(rng, OLD, {CHAT: length}, spread=spread, batch=batch)
    for _ in range(_BASELINE // batch):
        watch.observe(next(incumbent))
    watch.begin(NEW)
    source = rounds(rng, NEW, {CHAT: max(1.0, length * (1 + change))}, spread=spread, batch=batch)
    rounds_a_poll = max(1, round(per_s * poll_s / batch))
    for _ in range(_LONGEST_TRIAL_POLLS):
        clock[0] += poll_s
        for _ in range(rounds_a_poll):
            watch.observe(next(source))
        verdict = watch.judge()
        if verdict.outcome is not Outcome.WATCHING:
            break
    seen = int(verdict.numbers["verifications"] or 0)
    return Trial(seconds=clock[0], verifications=seen, is_kept=verdict.outcome is not Outcome.ROLLED_BACK)


def spread_over(setup: Setup, draw: Callable[[], Trial], rng: random.Random) -> Spreading:
    """From the publication of a version to its end: on all engines, or on none."""
    return _Fleet(setup, draw, rng).run()


class _Fleet:
    def __init__(self, setup: Setup, draw: Callable[[], Trial], rng: random.Random) -> None:
        self._setup, self._draw, self._rng = setup, draw, rng
        self._engines = {f"sglang-{number}": _Engine() for number in range(setup.num_engines)}
        self._spread: Spread | None = None
        self._spread_bytes = 0
        self._out = Spreading()

    def run(self) -> Spreading:
        names, now_s, out = list(self._engines), 0.0, self._out
        while now_s < self._setup.longest_s:
            now_s += self._setup.poll_s
            self._read_from_store(now_s)
            self._rng.shuffle(names)
            for name in names:
                self._poll(name, self._engines[name], now_s)
            if self._is_settled():
                break
        out.settled_s, out.waves = now_s, 0 if self._spread is None else self._spread.wave
        out.num_touched = sum(engine.was_touched for engine in self._engines.values())
        return out

    def _is_settled(self) -> bool:
        end = NEW if self._out.promoted_s is not None else OLD if self._out.barred_s is not None else 0
        return all(engine.draft == end and not engine.staging for engine in self._engines.values())

    def _read_from_store(self, now_s: float) -> None:
        """Everybody who reads has an equal share."""
        reading = [engine for engine in self._engines.values() if engine.staging]
        self._out.most_staging = max(self._out.most_staging, len(reading))
        for engine in reading:
            rate = min(self._setup.engine_bytes_per_s, self._setup.store_bytes_per_s / len(reading))
            engine.left_bytes -= rate * self._setup.poll_s
            if engine.left_bytes <= 0:
                engine.draft, engine.staging = engine.staging, 0
                engine.began_s, engine.reported_s = now_s, -1e9
                engine.was_touched |= engine.draft == NEW
                engine.trial = self._draw() if engine.draft == NEW and self._out.promoted_s is None else None

    def _poll(self, name: str, engine: _Engine, now_s: float) -> None:
        if engine.draft == NEW and self._out.promoted_s is None:
            self._out.exposed_s += self._setup.poll_s
        if not engine.staging:
            self._follow(name, engine, now_s)
        if now_s - engine.reported_s >= self._setup.report_s:
            engine.reported, engine.reported_s = self._view(engine, now_s), now_s

    def _follow(self, name: str, engine: _Engine, now_s: float) -> None:
        trial = engine.trial
        if trial is not None and now_s - engine.began_s >= trial.seconds:
            engine.trial = None
            if trial.is_kept:
                self._out.kept += 1
                self._look(name, engine, now_s, has_kept=True)
            elif self._out.promoted_s is None:
                self._out.barred_s = self._out.barred_s or now_s
        if self._out.barred_s is not None:
            self._stage(engine, OLD)
        elif self._out.promoted_s is not None:
            self._stage(engine, NEW)
        elif engine.has_place:
            if now_s - engine.looked_s >= self._setup.look_s:
                self._look(name, engine, now_s)
        elif now_s - engine.asked_s >= self._setup.look_s:
            self._ask(name, engine, now_s)

    def _stage(self, engine: _Engine, version: int) -> None:
        if engine.draft != version:
            engine.staging, engine.left_bytes, engine.trial = version, self._setup.version_bytes, None

    def _ask(self, name: str, engine: _Engine, now_s: float) -> None:
        """As `Turn.ask`."""
        engine.asked_s = now_s
        self._out.asks += 1
        self._out.spread_bytes += self._spread_bytes
        spread = self._spread
        if spread is None:
            admitted: Spread | None = begin(NEW, name, target=0, now_s=now_s)
        else:
            if now_s - spread.looked_s >= self._setup.look_s:
                spread = self._looked(spread, name, engine, now_s)
            admitted = admit(spread, name, target=0, now_s=now_s, rules=self._setup.rules)
        self._write(admitted or spread)
        engine.has_place, engine.wants = admitted is not None, 0 if admitted else NEW
        if engine.has_place:
            engine.looked_s = now_s
            self._stage(engine, NEW)

    def _look(self, name: str, engine: _Engine, now_s: float, *, has_kept: bool = False) -> None:
        """As `Turn.look`."""
        engine.looked_s = now_s
        self._out.spread_bytes += self._spread_bytes
        spread = self._spread
        assert spread is not None
        member = spread.members.get(name)
        if member is None or member.standing in (Standing.LEAVING, Standing.GONE):
            engine.has_place = False
            self._stage(engine, OLD)
            return
        if has_kept:
            spread = keep(spread, name, target=0)
        elif now_s - spread.looked_s < self._setup.look_s:
            return
        spread = self._looked(spread, name, engine, now_s)
        self._write(spread)
        living = self._living(name, engine, now_s)
        if is_complete(spread, living, now_s=now_s, rules=self._setup.rules):
            self._out.promoted_s = now_s

    def _looked(self, spread: Spread, name: str, engine: _Engine, now_s: float) -> Spread:
        self._out.looks += 1
        return look(spread, self._living(name, engine, now_s), now_s=now_s, rules=self._setup.rules)

    def _living(self, name: str, engine: _Engine, now_s: float) -> dict[str, EngineView]:
        reported = {each: one.reported for each, one in self._engines.items()}
        return {**reported, name: self._view(engine, now_s)}

    def _view(self, engine: _Engine, now_s: float) -> EngineView:
        seen = 0
        if engine.trial is not None:
            share = min(1.0, (now_s - engine.began_s) / engine.trial.seconds)
            seen = round(share * engine.trial.verifications)
        return EngineView(draft=engine.draft, wants=engine.wants, verifications=seen)

    def _write(self, spread: Spread | None) -> None:
        if spread is not None and spread is not self._spread:
            self._spread, self._spread_bytes = spread, len(msgspec.json.encode(spread))

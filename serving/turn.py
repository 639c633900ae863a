"""One engine's part in how a version spreads over the engines (speculator/waves.py): its place, and what it waits for.

Used by the follower's thread. An engine without a place asks when it is ready for a trial, and again every few seconds;
one that has a place looks every few seconds whether it still has it. Whoever comes first after `LOOK_S` reads the
reports of all engines, for all of them. Where Redis is away nothing changes: who runs the version goes on, and rolls it
back by itself if it must. Who asks for a version that engines have ended of bars it, for they cannot.
"""

from __future__ import annotations

import enum
import logging
import secrets
import time
from collections.abc import Callable, Mapping

import msgspec

from serving.versions import VersionRecord
from speculator.fleet import ChangesSpread, Views
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

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""Between two looks at all reports, whoever takes them."""
RETURN_S = 15.0
"""When Redis is back, engines report again within so long: their pauses have grown to 10 s. Nobody is missed before."""


class Place(enum.Enum):
    """What has become of a place."""

    HELD = "held"
    CONFIRMED = "confirmed"
    """The version is confirmed for all engines."""
    LOST = "lost"
    """It was given on, or Redis lost what was written there."""


class Turn:
    """`look_s` lies between two questions of this engine; `clock` is one that engines share, roughly."""

    def __init__(
        self,
        fleet: ChangesSpread,
        record: VersionRecord,
        *,
        engine_id: str,
        look_s: float = LOOK_S,
        rules: WaveRules | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._fleet, self._record, self._engine_id = fleet, record, engine_id
        self.life = secrets.token_hex(4)
        """Names this process among those that have had, or will have, its engine id."""
        self._look_s, self._rules, self._clock = look_s, rules or WaveRules(), clock
        self._asked_s = self._looked_s = self._lost_s = float("-inf")
        self._is_kept = self._is_confirmed = False
        self._granted = self._wave = self._num_early = self._barring = 0
        self.place = 0
        """The version that this engine may run before it is confirmed; 0 where there is none."""
        self.wants = 0
        """The version for which there was no place."""
        self.engines: tuple[int, int] = (0, 0)
        """Those that kept the version, and those that could have, when it was confirmed."""

    @property
    def role(self) -> str:
        if self.place:
            return f"wave {self._wave}" if self._wave else "canary"
        return "waiting" if self.wants else "settled"

    @property
    def is_due(self) -> bool:
        """Whether to ask again."""
        return time.monotonic() - self._asked_s >= self._look_s

    def ask(self, desired: int, view: EngineView) -> int:
        """The version that this engine may try now: the one that is under way, else the desired one; 0 for none yet.

        Raises StreamError or StoreError.
        """
        self._asked_s = time.monotonic()
        spread = self._fleet.change_spread(lambda spread, engines: self._asked(spread, engines, desired, view))
        self.wants = self.place = 0
        if spread is not None and self._num_early:
            self._bar(spread.version, view.draft)
            return 0
        if spread is None or spread.version == view.draft:
            return 0
        member = spread.members.get(self._engine_id)
        if self._granted != spread.version or member is None or member.standing is not Standing.TRYING:
            self.wants = spread.version if spread.is_under_way else desired
            return 0
        self._asked_s, self._looked_s = float("-inf"), time.monotonic()
        self._wave, self._is_kept, self.place = member.wave, False, spread.version
        return self.place

    def kept(self) -> None:
        """The trial has ended well; told at the next look, which comes at once."""
        self._is_kept, self._looked_s = True, float("-inf")

    def give_up(self) -> None:
        """This engine has no use for its place any more; others see by its report that it is free."""
        self.place = self.wants = 0

    def leave(self) -> None:
        """This engine stops: what it was trying is not to be blamed for that. Raises StreamError."""
        if self.place:
            self._fleet.change_spread(lambda spread, _: spread and withdraw(spread, self._engine_id))
            self.give_up()

    def lost_contact(self) -> None:
        """Redis could not be asked, so the reports of others may have expired."""
        self._lost_s = time.monotonic()

    def look(self, view: EngineView) -> Place:
        """What has become of the place that it has. Raises StreamError."""
        if time.monotonic() - self._looked_s < self._look_s:
            return Place.HELD
        spread = self._fleet.change_spread(lambda spread, engines: self._seen(spread, engines, view))
        self._looked_s = time.monotonic()
        if self._is_confirmed:
            return Place.CONFIRMED
        member = spread.members.get(self._engine_id) if spread and spread.version == self.place else None
        if member is None or member.standing in (Standing.LEAVING, Standing.GONE):
            return Place.LOST
        return Place.HELD

    def _asked(self, spread: Spread | None, engines: Views, desired: int, view: EngineView) -> Spread | None:
        now_s, self._granted, self._num_early = self._clock(), 0, 0
        if spread is not None and self._record.is_on_trial(spread.version):
            spread = succeed(spread, self._engine_id, life=self.life, rules=self._rules)
            if _is_old(spread, now_s) and not self._is_back_lately:
                spread = look(spread, self._with_own(engines(), view), now_s=now_s, rules=self._rules)
            if spread.num_early >= self._rules.most_early:
                self._num_early = spread.num_early
                return spread
            if spread.is_under_way and spread.version == view.draft:
                return spread
            if spread.is_under_way or spread.version == desired:
                admitted = admit(
                    spread, self._engine_id, target=view.target, now_s=now_s, rules=self._rules, life=self.life
                )
                self._granted = 0 if admitted is None else spread.version
                return admitted or spread
        if not self._record.may_serve(desired):
            return None
        self._granted = desired
        return begin(desired, self._engine_id, target=view.target, now_s=now_s, life=self.life)

    def _bar(self, version: int, in_service: int) -> None:
        """The count stays until the store has it: should this process end before, the next to ask bars it."""
        if version == self._barring:
            return
        self._barring = version
        log.error("draft version %d barred: %d engines ended as they tried it", version, self._num_early)
        good = self._record.last_good(other_than=version) or in_service
        reason = "engines ended as they tried it"
        numbers = {"engines_that_ended": self._num_early, "within_s": self._rules.early_s}
        self._record.barred(version, good, reason, numbers, then=lambda: self._clear(version))

    def _clear(self, version: int) -> None:
        """Nothing is held against a barred version where an operator releases it. Raises StreamError."""

        def cleared(spread: Spread | None, _: Views) -> Spread | None:
            if spread is None or spread.version != version or spread.num_early < self._rules.most_early:
                return None
            return msgspec.structs.replace(spread, members={}, num_early=0)

        self._fleet.change_spread(cleared)
        self._barring = 0

    def _seen(self, spread: Spread | None, engines: Views, view: EngineView) -> Spread | None:
        self._is_confirmed = False
        now_s = self._clock()
        if spread is None and view.draft == self.place:
            # Redis has lost it: the first that misses it is the canary.
            spread = begin(self.place, self._engine_id, target=view.target, now_s=now_s, life=self.life)
        if spread is None or spread.version != self.place:
            return None
        standing = spread.members[self._engine_id].standing if self._engine_id in spread.members else None
        is_told = self._is_kept and standing is Standing.TRYING
        if is_told:
            spread = keep(spread, self._engine_id, target=view.target)
        if self._is_back_lately or not (is_told or _is_old(spread, now_s)):
            return spread
        living = self._with_own(engines(), view)
        spread = look(spread, living, now_s=now_s, rules=self._rules)
        self._is_confirmed = is_complete(spread, living, now_s=now_s, rules=self._rules)
        self.engines = len(spread.confirmed), len(living)
        return spread

    @property
    def _is_back_lately(self) -> bool:
        return time.monotonic() - self._lost_s < RETURN_S

    def _with_own(self, engines: Mapping[str, EngineView], view: EngineView) -> dict[str, EngineView]:
        """What it says of itself now: its report is from a moment ago."""
        return {**engines, self._engine_id: view}


def _is_old(spread: Spread, now_s: float) -> bool:
    """Whether nobody has looked lately; clocks that differ must not keep everybody from it."""
    return not 0 <= now_s - spread.looked_s < LOOK_S

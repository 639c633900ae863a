"""Whether an engine may try a version now, and how far its verdict reaches: for all engines, or for its own part.

A place in the waves (serving/turn.py) ends when the version is confirmed for all engines, and when it is given on to
another. All of this is for the follower's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from serving.judgement import Verdict
from serving.turn import Place, Turn
from serving.versions import VersionRecord
from serving.watch import LiveWatch
from speculator.waves import EngineView

log = logging.getLogger(__name__)


class Alone:
    """An engine that tries versions whatever others do: it has no place, and what it keeps is promoted."""

    def __init__(self, record: VersionRecord) -> None:
        self._record = record

    @property
    def role(self) -> str:
        return ""

    def status(self) -> dict[str, str | int]:
        """What others want to know of it."""
        return {}

    def may_try(self, desired: int) -> int:
        """The version whose turn it is here, which may be one from before the desired one; 0 where none is."""
        return desired

    @property
    def may_catch_up(self) -> bool:
        """Whether it may have missed what others have confirmed."""
        return False

    def look(self) -> int:
        """What has become of the place; returns the version that has to leave because it is another's, else 0."""
        return 0

    def keep(self, version: int, verdict: Verdict) -> None:
        """The trial of this version has ended well."""
        self._record.promoted(version, verdict.reason, verdict.numbers)

    def give_up(self) -> None:
        """There is no use for the place any more."""

    def leave(self) -> None:
        """The engine stops. Raises StreamError."""

    def want_nothing(self) -> None:
        """No version is desired that is not in service."""

    def lost_contact(self) -> None:
        """Redis could not be asked."""


class InWaves(Alone):
    """One of several engines, which try a version one after another; `in_service` gives this one's version."""

    def __init__(self, record: VersionRecord, turn: Turn, watch: LiveWatch, in_service: Callable[[], int]) -> None:
        super().__init__(record)
        self._turn, self._watch, self._in_service = turn, watch, in_service
        self._kept: Verdict | None = None
        """Why this engine keeps the version that it has a place for."""

    @property
    def role(self) -> str:
        return self._turn.role

    def status(self) -> dict[str, str | int]:
        view = self._view()
        return {
            "wants": view.wants,
            "trial_verifications": view.verifications,
            "trial_target": view.target,
            "trial_life": view.life,
        }

    def may_try(self, desired: int) -> int:
        turn = self._turn
        if turn.place == self._in_service() or not turn.is_due:
            return 0
        return turn.place or turn.ask(desired, self._view())

    @property
    def may_catch_up(self) -> bool:
        return not self._turn.place

    def look(self) -> int:
        version = self._turn.place
        if not version:
            return 0
        place = self._turn.look(self._view())
        if self._in_service() != version:
            if place is Place.LOST or not self._record.is_on_trial(version):
                # Others may have spoken against it while this engine could not install it.
                self.give_up()
        elif place is Place.CONFIRMED or (place is Place.LOST and self._record.is_promoted(version)):
            self._confirmed(version)
        elif place is Place.LOST:
            return version
        return 0

    def keep(self, version: int, verdict: Verdict) -> None:
        if self._turn.place == version:
            self._kept = verdict
            self._turn.kept()
        else:
            super().keep(version, verdict)

    def give_up(self) -> None:
        self._kept = None
        self._turn.give_up()

    def leave(self) -> None:
        self._turn.leave()

    def want_nothing(self) -> None:
        self._turn.wants = 0

    def lost_contact(self) -> None:
        self._turn.lost_contact()

    def _confirmed(self, version: int) -> None:
        kept, could = self._turn.engines
        verdict = self._kept
        reason = "in service on every engine that is ready" if verdict is None else verdict.reason
        numbers = {} if verdict is None else verdict.numbers
        self._record.promoted(version, reason, {**numbers, "engines": could, "engines_that_kept_it": kept})
        self.give_up()
        log.info("draft version %d promoted: %s; %d of %d engines kept it", version, reason, kept, could)

    def _view(self) -> EngineView:
        return EngineView(
            draft=self._in_service(),
            target=self._watch.target_version,
            wants=self._turn.wants,
            verifications=self._watch.trial_compared,
            life=self._turn.life,
        )

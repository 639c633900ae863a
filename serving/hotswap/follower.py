"""Keeps the draft in service equal to the draft that is desired, and takes a version back that does not keep up.

A loop on its own thread. It waits for the poll interval or the stop; when Redis is away it keeps the version in
service and asks again with growing pauses, while a version on trial is judged at every poll.

A published version goes its way (states as in speculator/versions/lifecycle.py):

    waits until the version in service is known well enough (breaker.py), and this engine may try it (canary.py)
    installed ─▶ live, on trial ─▶ kept ─▶ promoted: all engines install it
                               └─▶ the version before is installed again ─▶ rolled back, quarantined, pointer moved

One that is published meanwhile waits for the verdict. Engines that are not the canary wait for it, too. A version that
the operator has pinned, or that is promoted already, is taken at once and not tried; a version that is barred while it
is in service is left at once. A version whose file is refused is quarantined, remembered and not tried again. An engine
that has missed the version promoted last takes it before it tries another.

Here is where the way leads; the trial and its end are in trial.py, a single installation in installer.py.

What an engine says about itself: at once after an attempt to change its version, now and then otherwise.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from serving.hotswap.breaker import LiveWatch
from serving.hotswap.canary import Canary, HoldsCanarySlot
from serving.hotswap.installer import Installer, SwapsDrafts
from serving.hotswap.lifecycle_writer import Replaces, VersionRecord
from serving.hotswap.trial import Trials
from speculator.errors import SlipstreamError, StreamError, type_and_place
from speculator.versions.lifecycle import Lifecycle

Status = Mapping[str, str | int | float]


class TakesReports(Protocol):
    """The part of the pointer that engines report to; see `speculator.redis.control_plane.DraftPointer`."""

    def report_engine(self, engine_id: str, status: Status) -> None: ...


class Reporter:
    """Used by the follower's thread; `more` adds to what is said."""

    def __init__(
        self,
        pointer: TakesReports,
        installer: Installer,
        watch: LiveWatch | None,
        canary: Canary,
        *,
        engine_id: str,
        every_s: float,
        more: Callable[[], Status],
    ) -> None:
        self._pointer, self._installer, self._watch, self._canary = pointer, installer, watch, canary
        self._engine_id, self._every_s, self._more = engine_id, every_s, more
        self._sent_s, self._num_attempts_told = float("-inf"), 0

    @property
    def is_due(self) -> bool:
        is_news = self._installer.num_attempts > self._num_attempts_told
        return is_news or time.monotonic() - self._sent_s >= self._every_s

    def send(self) -> None:
        """Raises StreamError; it is then still due."""
        num_attempts, log = self._installer.num_attempts, self._installer.log
        refused = ",".join(map(str, sorted(log.refused)))
        status = {"version": self._installer.in_service, "refused": refused, **self._trial(), **self._more()}
        self._pointer.report_engine(self._engine_id, status)
        self._sent_s, self._num_attempts_told = time.monotonic(), num_attempts

    def _trial(self) -> dict[str, str | int | float]:
        log = self._installer.log
        status: dict[str, str | int | float] = {
            "watched": log.watched,
            "verdicts": ",".join(f"{outcome}={count}" for outcome, count in log.verdicts.items()),
            "last_verdict": log.last_verdict,
        }
        if self._watch is not None:
            log.role = status["role"] = self._canary.role
            status["baseline_verifications"] = self._watch.baseline_verifications
            log.accept_length = self._watch.accept_length
            if log.accept_length is not None:
                status["draft_accept_length"] = round(log.accept_length, 4)
        return status


log = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 10.0
_REPORT_EVERY_POLLS = 4
_LOOK_S = 2.0
"""Between two looks at the canary's slot, which expires otherwise."""


class Pointer(Replaces, TakesReports, HoldsCanarySlot, Protocol):
    """Where the desired version stands and engines report theirs; implemented by `speculator.redis.control_plane`."""

    def desired(self) -> int | None: ...

    def pinned(self) -> int | None: ...


class DraftFollower:
    """Drives one engine towards the pointer's version.

    `status` adds to what the engine reports. Without a `watch` every version is taken as it comes; without a
    `lifecycle` its state is not asked for and not written. `clock` times the canary, in seconds.
    """

    def __init__(
        self,
        engine: SwapsDrafts,
        pointer: Pointer,
        *,
        engine_id: str,
        poll_s: float = 0.5,
        status: Callable[[], Status] = dict,
        watch: LiveWatch | None = None,
        lifecycle: Lifecycle | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        every_s = _REPORT_EVERY_POLLS * poll_s
        self._pointer, self._poll_s = pointer, poll_s
        self._record = record = VersionRecord(lifecycle, pointer, engine_id=engine_id)
        self._installer = Installer(engine, record)
        self._canary = Canary(
            pointer, self._installer, record, watch, engine_id=engine_id, look_s=min(every_s, _LOOK_S), clock=clock
        )
        self._trials = Trials(self._installer, watch, record, self._canary)
        self._reporter = Reporter(
            pointer, self._installer, watch, self._canary, engine_id=engine_id, every_s=every_s, more=status
        )
        self._pinned: int | None = None
        self._turned_away: set[int] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="draft-follower", daemon=True)
        self.log = self._installer.log

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, is_in_order: bool = True) -> None:
        """End, and give the canary's slot back where this engine has it.

        An engine that has failed does not stop `in order`: the slot expires, and the failure counts against the
        version that it tried.
        """
        self._stop.set()
        self._thread.join()
        if not is_in_order:
            return
        try:
            self._canary.leave()
        except StreamError as error:
            log.warning("others were not told that this engine stops: %s", error)

    def _run(self) -> None:
        pause_s = self._poll_s
        while not self._stop.wait(self._poll_s if self.log.watched else pause_s):
            try:
                self.follow()
                pause_s = self._poll_s
            except Exception as error:
                # Of any kind: no memory to stage a version now may be there at the next look.
                reason = error if isinstance(error, SlipstreamError) else type_and_place(error)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                log.warning("draft pointer not followed: %s (next look in %.1f s)", reason, pause_s)

    def follow(self) -> None:
        """One look at the trial and at the pointer, and a swap where one of them asks for it.

        Raises StreamError, StoreError, EngineError, or whatever loading a version raises, when this look came to
        nothing and the next may succeed.
        """
        try:
            self._record.flush()
            self._trials.look(self._pinned)
            self._leave_barred()
            self._release_lost_slot()
            self._pinned = self._pointer.pinned()
            desired = self._pointer.desired()
            if desired not in (None, self._installer.in_service) and desired not in self.log.refused:
                self._move_to_desired(desired)
            else:
                self._canary.stop_waiting()
        finally:
            # Also where this look came to nothing: an engine that falls silent would pass for dead.
            if self._reporter.is_due:
                self._reporter.send()

    def _leave_barred(self) -> None:
        """Whoever barred the version in service, it goes."""
        version = self._installer.in_service
        if not self._record.is_barred(version):
            return
        if self._trials.go_back(version, "barred while in service"):
            self._record.barred(version, self._installer.in_service, "barred while in service")

    def _release_lost_slot(self) -> None:
        version = self._canary.look()
        if version:
            self._trials.go_back(version, "another engine tries it")

    def _move_to_desired(self, desired: int) -> None:
        if not self._record.may_serve(desired):
            self._turn_away(desired)
            return
        if not self._trials.are_held or desired == self._pinned or self._record.is_promoted(desired):
            self._trials.take(desired)
            return
        may_try = self._trials.is_ready() and self._canary.may_try(desired)
        # With the report, as the store is read for it.
        missed = self._missed(desired) if may_try or self._reporter.is_due else None
        if missed is not None:
            self._trials.take(missed)
        elif may_try:
            self._trials.begin(desired)

    def _missed(self, desired: int) -> int | None:
        """The version that others have confirmed while this engine was away, waited, or had no traffic."""
        in_service = self._installer.in_service
        if not self._record.is_promoted(in_service):
            return None
        good = self._record.last_good(other_than=desired)
        return None if good == in_service or good in self.log.refused else good

    def _turn_away(self, version: int) -> None:
        """Barred, and whoever barred it has perhaps not come to the pointer; or nobody has verified it yet."""
        if version not in self._turned_away:
            self._turned_away.add(version)
            log.warning("draft version %d may not serve, `slipstream drafts show` says why", version)
        if self._record.is_barred(version):
            good = self._record.last_good(other_than=version) or self._installer.in_service
            self._record.barred(version, good, "barred before it came into service")

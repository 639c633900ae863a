"""Keeps the draft in service equal to the draft that is desired, and takes a version back that does not keep up.

A loop on its own thread. It waits for the poll interval or the stop; when Redis is away it keeps the version in
service and asks again with growing pauses, while a version on trial is judged at every poll.

A published version goes its way (states as in speculator/lifecycle.py):

    waits until the version in service is known well enough (serving/watch.py), and this engine may try it (turn.py)
    installed ─▶ live, on trial ─▶ kept ─▶ promoted, once it is confirmed for all engines; alone, at once
                               └─▶ the version before is installed again ─▶ rolled back, quarantined, pointer moved

One that is published meanwhile waits for the verdict. A version that the operator has pinned, or that is promoted
already, is taken at once and not tried; a version that is barred while it is in service is left at once. A version
whose file is refused is quarantined, remembered and not tried again. An engine that may not try the desired version
takes the one that was promoted last, if it has missed that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from serving.engine import SwapReport
from serving.turn import Place, Turn
from serving.versions import VersionRecord
from serving.watch import LiveWatch, Outcome, Verdict
from speculator.errors import DraftError, EngineBusyError, EngineError, StoreError, StreamError
from speculator.fleet import ChangesSpread
from speculator.lifecycle import Lifecycle
from speculator.spans import span
from speculator.waves import EngineView

log = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 10.0
_REPORT_EVERY_POLLS = 4


class SwapsDrafts(Protocol):
    """What the follower needs of an engine; see `serving.engine.Engine`."""

    @property
    def draft_version(self) -> int: ...

    def install_draft(self, version: int) -> SwapReport: ...


class Pointer(Protocol):
    """Where the desired version stands and engines report theirs; implemented by `speculator.stream`."""

    def desired(self) -> int | None: ...

    def pinned(self) -> int | None: ...

    def replace(self, old: int, new: int) -> bool: ...

    def report_engine(self, engine_id: str, status: Mapping[str, str | int | float]) -> None: ...


@dataclass
class SwapLog:
    """What the follower did, for the status of this engine."""

    installed: list[tuple[float, SwapReport]] = field(default_factory=list)
    """(unix time in seconds, report), oldest first; the last 100."""
    refused: dict[int, str] = field(default_factory=dict)
    """Versions that can never be installed here, with the reason."""
    num_installed: int = 0
    num_failed: int = 0
    """Attempts that left the version before in service: refused files, and files or engines that could not be used."""
    verdicts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("promoted", "rolled_back", "withdrawn"), 0))
    """How trials ended; withdrawn are those that an operator, or another engine, has ended."""
    last_verdict: str = ""
    watched: int = 0
    """The version on trial; 0 where none is."""
    role: str = ""
    """canary, wave N, waiting, settled; empty where engines do not wait for each other."""
    accept_length: float | None = None
    """Tokens a verification of the version in service, lately."""

    def add(self, report: SwapReport) -> None:
        self.num_installed += 1
        self.installed.append((time.time(), report))
        del self.installed[:-100]

    def end_trial(self, version: int, outcome: str, reason: str) -> None:
        # One assignment: another thread may be reading it.
        self.verdicts = {**self.verdicts, outcome: self.verdicts[outcome] + 1}
        self.last_verdict = f"version {version} {outcome}: {reason}"
        self.watched = 0


class DraftFollower:
    """Drives one engine towards the pointer's version.

    `on_swap` is told of each swap; `status` adds to what the engine reports. Without a `watch` every version is taken
    as it comes; without a `lifecycle` its state is not asked for and not written; without a `fleet` this engine tries
    versions whatever others do.
    """

    def __init__(
        self,
        engine: SwapsDrafts,
        pointer: Pointer,
        *,
        engine_id: str,
        poll_s: float = 0.5,
        on_swap: Callable[[SwapReport], object] | None = None,
        status: Callable[[], Mapping[str, str | int | float]] = dict,
        watch: LiveWatch | None = None,
        lifecycle: Lifecycle | None = None,
        fleet: ChangesSpread | None = None,
    ) -> None:
        self._engine, self._pointer, self._engine_id = engine, pointer, engine_id
        self._poll_s, self._on_swap, self._status = poll_s, on_swap, status
        self._watch, self._record = watch, VersionRecord(lifecycle, pointer, engine_id=engine_id)
        self._turn: Turn | None = None
        if fleet is not None and watch is not None:
            look_s = _REPORT_EVERY_POLLS * poll_s
            self._turn = Turn(fleet, self._record, engine_id=engine_id, look_s=look_s)
        self._pinned: int | None = None
        self._incumbent = engine.draft_version
        self._verdict: Verdict | None = None
        """A rollback that has been decided and not yet been carried out."""
        self._kept: Verdict | None = None
        """Why this engine keeps the version that it has a place for."""
        self._turned_away: set[int] = set()
        self._reported_s: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="draft-follower", daemon=True)
        self.log = SwapLog()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        pause_s = self._poll_s
        while not self._stop.wait(self._poll_s if self.log.watched else pause_s):
            try:
                self.follow()
                pause_s = self._poll_s
            except (StreamError, StoreError, EngineError) as error:
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                log.warning("draft pointer not followed: %s (next look in %.1f s)", error, pause_s)

    def follow(self) -> None:
        """One look at the trial and at the pointer, and a swap where one of them asks for it.

        Raises StreamError, StoreError or EngineError when this look came to nothing and the next may succeed.
        """
        try:
            self._follow()
        except StreamError:
            if self._turn is not None:
                self._turn.lost_contact()
            raise

    def _follow(self) -> None:
        try:
            self._record.flush()
            self._look_at_trial()
            self._leave_barred()
            self._look_at_place()
            self._pinned = self._pointer.pinned()
            desired = self._pointer.desired()
            if desired not in (None, self._engine.draft_version) and desired not in self.log.refused:
                self._towards(desired)
            elif self._turn is not None:
                self._turn.wants = 0
        finally:
            # Also where it came to nothing: an engine that falls silent would pass for dead.
            self._report()

    def _look_at_trial(self) -> None:
        watch = self._watch
        if watch is None:
            return
        while watch.target_moved():
            self._withdraw("the target has moved")
        version = watch.watched
        if version is None:
            self._look_back(watch)
            return
        if version == self._pinned:
            self._withdraw("pinned by the operator")
            watch.restart(version)
            return
        verdict = self._verdict or watch.judge()
        if verdict.outcome is Outcome.PROMOTED:
            watch.settle(verdict)
            self.log.end_trial(version, "promoted", verdict.reason)
            self._keep(version, verdict)
            log.info("draft version %d kept: %s, %s", version, verdict.reason, verdict.numbers)
        elif verdict.outcome is Outcome.ROLLED_BACK:
            self._verdict = verdict
            self._roll_back(watch, version, verdict)

    def _keep(self, version: int, verdict: Verdict) -> None:
        if self._turn is not None and self._turn.place == version:
            self._kept = verdict
            self._turn.kept()
        else:
            self._record.promoted(version, verdict.reason, verdict.numbers)

    def _look_at_place(self) -> None:
        """A place ends when the version is confirmed for all engines, and when it is given on to another."""
        turn = self._turn
        if turn is None or not turn.place:
            return
        version = turn.place
        place = turn.look(self._view())
        if self._engine.draft_version != version:
            if place is Place.LOST or not self._record.is_on_trial(version):
                # Others may have spoken against it while this engine could not install it.
                self._give_up_place()
        elif place is Place.CONFIRMED or (place is Place.LOST and self._record.is_promoted(version)):
            self._confirmed(version, turn)
        elif place is Place.LOST:
            self._go_back(version, "its place is another's")

    def _confirmed(self, version: int, turn: Turn) -> None:
        kept, could = turn.engines
        verdict = self._kept
        reason = "in service on every engine that is ready" if verdict is None else verdict.reason
        numbers = {} if verdict is None else verdict.numbers
        self._record.promoted(version, reason, {**numbers, "engines": could, "engines_that_kept_it": kept})
        self._give_up_place()
        log.info("draft version %d promoted: %s; %d of %d engines kept it", version, reason, kept, could)

    def _give_up_place(self) -> None:
        self._kept = None
        if self._turn is not None:
            self._turn.give_up()

    def _go_back(self, version: int, why: str) -> bool:
        """From a version that this engine may not run any more; False where no other can be installed."""
        good = self._fallback(version)
        if good is None or not self._install(good):
            return False
        if self._watch is not None and self._watch.watched == version and good == self._incumbent:
            self._withdraw(why)
            self._watch.give_up()
        else:
            self._taken(good, why)
        return True

    def _roll_back(self, watch: LiveWatch, version: int, verdict: Verdict) -> None:
        good = self._fallback(version)
        if good is None or not self._install(good):
            log.error("draft version %d %s, and no other can be installed", version, verdict.reason)
            return
        self._verdict = None
        log.warning("draft version %d rolled back, %d in service: %s", version, good, verdict.reason)
        if good == self._incumbent:
            watch.settle(verdict)
        else:
            watch.restart(good)
        self.log.end_trial(version, "rolled_back", verdict.reason)
        self._give_up_place()
        self._record.barred(version, good, verdict.reason, {**verdict.numbers, "back_to": good})

    def _look_back(self, watch: LiveWatch) -> None:
        """Where the incumbent does as badly as the version that was rolled back, the traffic changed."""
        change = watch.rollback_doubt()
        if change is not None:
            log.warning("the accept length has changed by %.1f%% with the incumbent, too", 100 * change)
            in_service = self._engine.draft_version
            self._record.event("rollback_unconfirmed", version=in_service, accept_change=round(change, 4))

    def _leave_barred(self) -> None:
        """Whoever barred the version in service, it goes."""
        version = self._engine.draft_version
        if not self._record.is_barred(version):
            return
        if self._go_back(version, "barred while in service"):
            self._record.barred(version, self._engine.draft_version, "barred while in service")

    def _towards(self, desired: int) -> None:
        if not self._record.may_serve(desired):
            self._turn_away(desired)
            return
        watch = self._watch
        if watch is None or desired == self._pinned or self._record.is_promoted(desired):
            if self._install(desired):
                self._taken(desired, f"version {desired} taken in its place")
            return
        watch.expect()
        if watch.watched is None and watch.is_ready():
            version = self._may_try(desired)
            if version:
                self._try_out(watch, version)
                return
        self._catch_up(desired)

    def _may_try(self, desired: int) -> int:
        """The version whose turn it is here, which may be one from before the desired one; 0 where none is."""
        turn = self._turn
        if turn is None:
            return desired
        if turn.place == self._engine.draft_version or not turn.is_due:
            return 0
        version = turn.place or turn.ask(desired, self._view())
        return 0 if version in self.log.refused else version

    def _catch_up(self, desired: int) -> None:
        """What other engines have confirmed, while this one was away or had no traffic, is taken without a trial."""
        in_service = self._engine.draft_version
        if self._turn is None or self._turn.place or not self._is_report_due:
            return
        if not self._record.is_promoted(in_service):
            return
        good = self._record.last_good(other_than=desired)
        if good not in (None, in_service) and good not in self.log.refused and self._install(good):
            self._taken(good, f"version {good} taken in its place")

    def _view(self) -> EngineView:
        assert self._watch is not None
        return EngineView(
            draft=self._engine.draft_version,
            target=self._watch.target_version,
            wants=0 if self._turn is None else self._turn.wants,
            verifications=self._watch.trial_compared,
        )

    def _turn_away(self, version: int) -> None:
        """Barred, and whoever barred it has perhaps not come to the pointer; or nobody has verified it yet."""
        if version not in self._turned_away:
            self._turned_away.add(version)
            log.warning("draft version %d may not serve, `slipstream drafts show` says why", version)
        if self._record.is_barred(version):
            good = self._record.last_good(other_than=version) or self._engine.draft_version
            self._record.barred(version, good, "barred before it came into service")

    def _taken(self, version: int, why: str) -> None:
        """A version is in service without a trial."""
        self._withdraw(why)
        if self._watch is not None:
            self._watch.restart(version)
            return
        self._record.live(version)
        self._record.promoted(version, "in service without a watch", {})

    def _try_out(self, watch: LiveWatch, version: int) -> None:
        self._incumbent = self._engine.draft_version
        if self._install(version):
            watch.begin(version)
            self.log.watched = version
            self._record.live(version)
        else:
            self._give_up_place()

    def _withdraw(self, why: str) -> None:
        if self.log.watched:
            self._verdict = None
            self.log.end_trial(self.log.watched, "withdrawn", why)
        # Also where the trial has ended well: the verdict was about another target, or another has the place.
        self._give_up_place()

    def _fallback(self, bad: int) -> int | None:
        """The version before, else the last good one."""
        for version in (self._incumbent, self._record.last_good(other_than=bad)):
            if version is None or version == bad or version in self.log.refused or self._record.is_barred(version):
                continue
            return version
        return None

    def _report(self) -> None:
        """Tell what is in service: at once after an attempt to change it, now and then otherwise."""
        if not self._is_report_due:
            return
        self._pointer.report_engine(
            self._engine_id,
            {
                "version": self._engine.draft_version,
                "refused": ",".join(map(str, sorted(self.log.refused))),
                **self._watch_status(),
                **self._status(),
            },
        )
        self._reported_s = time.monotonic()

    @property
    def _is_report_due(self) -> bool:
        reported_s, every_s = self._reported_s, _REPORT_EVERY_POLLS * self._poll_s
        return reported_s is None or time.monotonic() - reported_s >= every_s

    def _watch_status(self) -> dict[str, str | int | float]:
        status: dict[str, str | int | float] = {
            "watched": self.log.watched,
            "verdicts": ",".join(f"{outcome}={count}" for outcome, count in self.log.verdicts.items()),
            "last_verdict": self.log.last_verdict,
        }
        if self._watch is not None:
            status["baseline_verifications"] = self._watch.baseline_verifications
            self.log.accept_length = self._watch.accept_length
            if self.log.accept_length is not None:
                status["draft_accept_length"] = round(self.log.accept_length, 4)
        if self._turn is not None:
            self.log.role, view = self._turn.role, self._view()
            status |= {
                "role": self.log.role,
                "wants": view.wants,
                "trial_verifications": view.verifications,
                "trial_target": view.target,
            }
        return status

    def _install(self, version: int) -> bool:
        """Whether the version is in service now; False where its file is refused, for good.

        Raises StoreError or EngineError when a later attempt may succeed.
        """
        self._reported_s = None
        try:
            with span("swap", version=version) as swap:
                report = self._engine.install_draft(version)
                swap.set(previous=report.previous, stall_ms=report.stall_ms, step=report.step)
        except DraftError as error:
            self.log.num_failed += 1
            self.log.refused[version] = str(error)
            in_service = self._engine.draft_version
            log.error("draft version %d refused, %d stays in service: %s", version, in_service, error)
            self._record.barred(version, in_service, str(error))
            return False
        except EngineBusyError:
            raise
        except (StoreError, EngineError):
            self.log.num_failed += 1
            raise
        self.log.add(report)
        log.info("draft version %d in service at step %d, %.2f ms", report.version, report.step, report.stall_ms)
        if self._on_swap is not None:
            self._on_swap(report)
        return True

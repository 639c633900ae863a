"""Keep the draft in service equal to the desired draft, and take back a version that does worse on live traffic.

A loop on its own thread. It waits for the poll interval or the stop; when Redis is away it keeps the version in service
and asks again with growing pauses, while a version on trial is judged at every poll.

The way of a published version (states as in speculator/versions/lifecycle.py):

    waits until the version in service is known well enough (breaker.py), and this engine may try it (canary.py)
    installed ─▶ live, on trial ─▶ kept ─▶ promoted: all engines install it
                               └─▶ the version before is installed again ─▶ rolled back, quarantined, pointer moved

A version that is published during a trial waits for the verdict. So do engines that are not the canary. A version that
the operator has pinned, or that is promoted already, is installed at once without a trial; a version that is barred
while it is in service is left at once. A version whose file is refused is quarantined, remembered and not tried again.
An engine that has missed the version promoted last installs it before it tries another.

`DraftFollower` decides what comes next; `Installer` brings versions into service, on trial or without, and takes them
back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from serving.engine import SwapReport
from serving.hotswap.breaker import LiveWatch, TrialOutcome, Verdict
from serving.hotswap.canary import Canary, Pointer, VersionRecord
from speculator.errors import DraftError, EngineBusyError, SlipstreamError, StreamError, type_and_place
from speculator.tracing import prefixed, span
from speculator.versions.lifecycle import Lifecycle

Status = Mapping[str, str | int | float]

log = structlog.get_logger(__name__)

_LONGEST_PAUSE_S = 10.0
_REPORT_EVERY_POLLS = 4
_POLL_S = 2.0
"""Seconds between two looks at the canary's slot, which expires otherwise."""


class SwapsDrafts(Protocol):
    """What the follower needs of an engine; see `serving.engine.Engine`."""

    @property
    def draft_version(self) -> int: ...

    def install_draft(self, version: int) -> SwapReport: ...


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
    """How trials ended; withdrawn are those without a verdict, as where an operator or another engine ended them."""
    last_verdict: str = ""
    watched: int = 0
    """The version on trial; 0 where none is."""
    role: str = ""
    """canary, waiting, needs traffic, settled; empty where versions are not tried."""
    accept_length: float | None = None
    """Recent tokens a verification of the version in service."""

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
    """Keeps one engine at the pointer's version; any thread may read `log`.

    `status` gives more fields of the engine's report, which is written after each attempt to change the version and
    every few polls. Without a `watch` every version is installed without a trial; without a `lifecycle` states of
    versions are neither read nor written. `clock` times the canary, in seconds.
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
        self._engine, self._pointer, self._watch, self._more = engine, pointer, watch, status
        self._engine_id, self._poll_s, self._report_every_s = engine_id, poll_s, _REPORT_EVERY_POLLS * poll_s
        self._record = VersionRecord(lifecycle, pointer, engine_id=engine_id)
        self._canary = Canary(
            pointer,
            self._record,
            watch,
            lambda: engine.draft_version,
            engine_id=engine_id,
            poll_s=min(self._report_every_s, _POLL_S),
            clock=clock,
        )
        self.log = SwapLog()
        self._installer = Installer(engine, watch, self._record, self._canary, self.log)
        self._pinned: int | None = None
        self._waiting: int | None = None
        """The version that was desired at the last poll, where it was to be tried."""
        self._refused: set[int] = set()
        self._reported_s, self._num_attempts_reported = float("-inf"), 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="draft-follower", daemon=True)

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
            self._canary.close()
        except StreamError as error:
            log.warning("the canary's slot is not released at the stop", error=str(error))

    def _run(self) -> None:
        pause_s = self._poll_s
        while not self._stop.wait(self._poll_s if self.log.watched else pause_s):
            try:
                self.poll()
                pause_s = self._poll_s
            except EngineBusyError as error:
                # All ranks must offer the version at the same time, so it is offered again soon.
                pause_s = self._poll_s
                log.info("the desired draft version is not installed yet", reason=str(error))
            except Exception as error:
                # Any error: memory to stage a version may be free at the next look.
                reason = str(error) if isinstance(error, SlipstreamError) else type_and_place(error)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                log.warning("cannot follow the desired draft version", error=reason, retry_in_s=round(pause_s, 1))

    def poll(self) -> None:
        """One look at the trial and at the pointer, and a swap where one of them asks for it.

        Raises StreamError, StoreError, EngineError, or whatever loading a version raises, when this look came to
        nothing and the next may succeed.
        """
        try:
            self._record.flush()
            is_successor_waiting = self._waiting not in (None, self._engine.draft_version)
            self._installer.judge_trial(self._pinned, is_successor_waiting=is_successor_waiting)
            self._leave_barred()
            if version := self._canary.poll():
                self._installer.fall_back(version, "another engine tries it")
            self._pinned = self._pointer.pinned()
            desired, self._waiting = self._pointer.desired(), None
            if desired in (None, self._engine.draft_version) or desired in self.log.refused:
                self._canary.stop_waiting()
            else:
                self._move_to_desired(desired)
        finally:
            # Also after a failed look: an engine that falls silent would pass for dead.
            if self._is_report_due:
                self._report()

    def _leave_barred(self) -> None:
        """Leave the version in service if it is barred, whoever barred it."""
        version, reason = self._engine.draft_version, "barred while in service"
        if self._record.is_barred(version) and self._installer.fall_back(version, reason):
            self._record.bar_and_replace(version, self._engine.draft_version, reason)

    def _move_to_desired(self, desired: int) -> None:
        if not self._record.may_serve(desired):
            self._refuse(desired)
            return
        if self._watch is None or desired == self._pinned or self._record.is_promoted(desired):
            self._installer.install_without_trial(desired)
            return
        self._waiting = desired
        is_ready = self._watch.watched is None and self._watch.is_ready()
        may_try = is_ready and self._canary.may_try(desired)
        # Otherwise only with the report, because this reads the store.
        missed = self._missed(desired) if may_try or self._is_report_due else None
        if missed is not None:
            self._installer.install_without_trial(missed)
        elif may_try:
            self._installer.install_on_trial(desired)

    def _missed(self, desired: int) -> int | None:
        """The version that others have confirmed while this engine was away, waited, or had no traffic."""
        good = self._record.promoted_since(self._engine.draft_version, other_than=desired)
        return None if good in self.log.refused else good

    def _refuse(self, version: int) -> None:
        """Refuse a version that is barred or that nobody has verified; move the pointer away from a barred one."""
        if version not in self._refused:
            self._refused.add(version)
            log.warning("draft version may not serve, `slipstream drafts show` says why", version=version)
        if self._record.is_barred(version):
            good = self._record.last_good(other_than=version) or self._engine.draft_version
            self._record.bar_and_replace(version, good, "barred before it came into service")

    @property
    def _is_report_due(self) -> bool:
        is_news = self._installer.num_attempts > self._num_attempts_reported
        return is_news or time.monotonic() - self._reported_s >= self._report_every_s

    @property
    def _role(self) -> str:
        role, wants_other = self._canary.role, self._waiting not in (None, self._engine.draft_version)
        return "needs traffic" if role == "settled" and wants_other else role

    def _report(self) -> None:
        """Raises StreamError; the report is then still due."""
        num_attempts = self._installer.num_attempts
        status: dict[str, str | int | float] = {
            "version": self._engine.draft_version,
            "refused": ",".join(map(str, sorted(self.log.refused))),
            "watched": self.log.watched,
            "verdicts": ",".join(f"{outcome}={count}" for outcome, count in self.log.verdicts.items()),
            "last_verdict": self.log.last_verdict,
        }
        if self._watch is not None:
            self.log.role = status["role"] = self._role
            status["baseline_verifications"] = self._watch.baseline_verifications
            self.log.accept_length = self._watch.accept_length
            if self.log.accept_length is not None:
                status["draft_accept_length"] = round(self.log.accept_length, 4)
        self._pointer.report_engine(self._engine_id, {**status, **self._more()})
        self._reported_s, self._num_attempts_reported = time.monotonic(), num_attempts


class Installer:
    """Brings versions into service in one engine, on trial or without, and takes them back; for the follower's thread.

    Methods that install a version raise StoreError, EngineError, or whatever loading it raises, when a later attempt
    may succeed.
    """

    def __init__(
        self, engine: SwapsDrafts, watch: LiveWatch | None, record: VersionRecord, canary: Canary, swaps: SwapLog
    ) -> None:
        self._engine, self._watch, self._record, self._canary, self._log = engine, watch, record, canary, swaps
        self.num_attempts = 0
        self._incumbent = engine.draft_version
        self._verdict: Verdict | None = None
        """A rollback that has been decided and not yet been carried out."""

    def judge_trial(self, pinned: int | None, *, is_successor_waiting: bool) -> None:
        """Judge the trial, if there is one; the version `pinned` by the operator is kept whatever the trial shows."""
        watch = self._watch
        if watch is None:
            return
        if watch.update():
            self._withdraw("the target has moved")
        version = watch.watched
        if version is None:
            return
        if version == pinned:
            self._withdraw("pinned by the operator")
            watch.restart(version)
            return
        verdict = self._verdict or watch.judge(is_successor_waiting=is_successor_waiting)
        if verdict.outcome is TrialOutcome.PROMOTED:
            watch.end(is_kept=True)
            self._log.end_trial(version, "promoted", verdict.reason)
            self._record.mark_promoted(version, verdict.reason, verdict.numbers)
            self._canary.release()
            log.info("draft version kept", version=version, reason=verdict.reason, **verdict.numbers)
        elif verdict.outcome is TrialOutcome.WITHDRAWN:
            watch.end(is_kept=True)
            self._withdraw(verdict.reason)
        elif verdict.outcome is TrialOutcome.ROLLED_BACK:
            self._verdict = verdict
            self._roll_back(watch, version, verdict)

    def install_on_trial(self, version: int) -> None:
        """Install a version on trial."""
        assert self._watch is not None
        self._incumbent = self._engine.draft_version
        if self._install(version):
            self._watch.begin(version)
            self._log.watched = version
            self._record.mark_live(version)
        else:
            self._canary.release()

    def install_without_trial(self, version: int) -> None:
        """Install a version without a trial."""
        if self._install(version):
            self._note_untried(version, f"version {version} taken in its place")

    def fall_back(self, version: int, why: str) -> bool:
        """Leave a version that this engine must not run; returns False where no other can be installed."""
        good = self._fallback(version)
        if good is None or not self._install(good):
            return False
        if self._watch is not None and self._watch.watched == version and good == self._incumbent:
            self._withdraw(why)
            self._watch.end(is_kept=False)
        else:
            self._note_untried(good, why)
        return True

    def _roll_back(self, watch: LiveWatch, version: int, verdict: Verdict) -> None:
        good = self._fallback(version)
        numbers = {**verdict.numbers, "back_to": good or 0}
        try:
            is_back = good is not None and self._install(good)
        except Exception:
            # The next attempt may take long: bar the version now, so that no other engine tries it.
            if good is not None and not self._record.is_barred(version):
                self._record.bar_and_replace(version, good, verdict.reason, numbers)
            raise
        if good is None or not is_back:
            log.error("draft version is bad, and no other can be installed", version=version, reason=verdict.reason)
            return
        self._verdict = None
        log.warning("draft version rolled back", version=version, in_service=good, reason=verdict.reason)
        if good == self._incumbent:
            watch.end(is_kept=False)
        else:
            watch.restart(good)
        self._log.end_trial(version, "rolled_back", verdict.reason)
        self._canary.release()
        self._record.bar_and_replace(version, good, verdict.reason, numbers)

    def _fallback(self, bad: int) -> int | None:
        """The version before, else the last good one."""
        for version in (self._incumbent, self._record.last_good(other_than=bad)):
            if version not in (None, bad) and version not in self._log.refused and self._record.may_return_to(version):
                return version
        return None

    def _note_untried(self, version: int, why: str) -> None:
        """Note that a version is in service without a trial."""
        self._withdraw(why)
        if self._watch is not None:
            self._incumbent = version
            self._watch.restart(version)
            return
        self._record.mark_live(version)
        self._record.mark_promoted(version, "in service without a watch", {})

    def _withdraw(self, why: str) -> None:
        if self._log.watched:
            self._verdict = None
            self._log.end_trial(self._log.watched, "withdrawn", why)
        # Also where the trial has ended well: the verdict was about another target, or another engine tries it.
        self._canary.release()

    def _install(self, version: int) -> bool:
        """Whether the version is in service now; False where its file is refused, for good."""
        self.num_attempts += 1
        try:
            with span("swap", version=version) as swap:
                report = self._engine.install_draft(version)
                swap.set_attributes(prefixed(previous=report.previous, stall_ms=report.stall_ms, step=report.step))
        except DraftError as error:
            self._log.num_failed += 1
            self._log.refused[version] = str(error)
            log.error("draft version refused, the one before stays in service", version=version, error=str(error))
            self._record.bar_and_replace(version, self._engine.draft_version, str(error))
            return False
        except EngineBusyError:
            raise
        except Exception:
            self._log.num_failed += 1
            raise
        self._log.add(report)
        log.info(
            "draft version in service", version=report.version, step=report.step, stall_ms=round(report.stall_ms, 2)
        )
        return True

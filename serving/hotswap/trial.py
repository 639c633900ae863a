"""Brings versions into service on trial, and takes back what does not keep up with the one before."""

from __future__ import annotations

import logging

from serving.hotswap.breaker import LiveWatch, Outcome, Verdict
from serving.hotswap.canary import Canary
from serving.hotswap.installer import Installer
from serving.hotswap.lifecycle_writer import VersionRecord

log = logging.getLogger(__name__)


class Trials:
    """One engine's trials; used by the follower's thread. Without a `watch` every version is taken as it comes.

    What installs a version raises StoreError or EngineError when a later attempt may succeed.
    """

    def __init__(self, installer: Installer, watch: LiveWatch | None, record: VersionRecord, canary: Canary) -> None:
        self._installer, self._watch, self._record, self._canary = installer, watch, record, canary
        self._log = installer.log
        self._incumbent = installer.in_service
        self._verdict: Verdict | None = None
        """A rollback that has been decided and not yet been carried out."""

    @property
    def are_held(self) -> bool:
        return self._watch is not None

    def look(self, pinned: int | None) -> None:
        """At the trial, if there is one; `pinned` is the version that the operator wants whatever it shows."""
        watch = self._watch
        if watch is None:
            return
        while watch.target_moved():
            self._withdraw("the target has moved")
        version = watch.watched
        if version is None:
            return
        if version == pinned:
            self._withdraw("pinned by the operator")
            watch.restart(version)
            return
        verdict = self._verdict or watch.judge()
        if verdict.outcome is Outcome.PROMOTED:
            watch.settle(verdict)
            self._log.end_trial(version, "promoted", verdict.reason)
            self._canary.keep(version, verdict)
            log.info("draft version %d kept: %s, %s", version, verdict.reason, verdict.numbers)
        elif verdict.outcome is Outcome.ROLLED_BACK:
            self._verdict = verdict
            self._roll_back(watch, version, verdict)

    def is_ready(self) -> bool:
        """Whether another version, which waits, can be tried now: nothing is on trial, and the incumbent is known."""
        if self._watch is None:
            return False
        self._watch.expect()
        return self._watch.watched is None and self._watch.is_ready()

    def begin(self, version: int) -> None:
        assert self._watch is not None
        self._incumbent = self._installer.in_service
        if self._installer.install(version):
            self._watch.begin(version)
            self._log.watched = version
            self._record.live(version)
        else:
            self._canary.give_up()

    def take(self, version: int) -> None:
        """Without a trial."""
        if self._installer.install(version):
            self._taken(version, f"version {version} taken in its place")

    def go_back(self, version: int, why: str) -> bool:
        """From a version that this engine may not run any more; False where no other can be installed."""
        good = self._fallback(version)
        if good is None or not self._installer.install(good):
            return False
        if self._watch is not None and self._watch.watched == version and good == self._incumbent:
            self._withdraw(why)
            self._watch.give_up()
        else:
            self._taken(good, why)
        return True

    def _roll_back(self, watch: LiveWatch, version: int, verdict: Verdict) -> None:
        good = self._fallback(version)
        numbers = {**verdict.numbers, "back_to": good or 0}
        try:
            is_back = good is not None and self._installer.install(good)
        except Exception:
            # It is tried again, and may take long: no other engine is to try this version meanwhile.
            if good is not None and not self._record.is_barred(version):
                self._record.barred(version, good, verdict.reason, numbers)
            raise
        if good is None or not is_back:
            log.error("draft version %d %s, and no other can be installed", version, verdict.reason)
            return
        self._verdict = None
        log.warning("draft version %d rolled back, %d in service: %s", version, good, verdict.reason)
        if good == self._incumbent:
            watch.settle(verdict)
        else:
            watch.restart(good)
        self._log.end_trial(version, "rolled_back", verdict.reason)
        self._canary.give_up()
        self._record.barred(version, good, verdict.reason, numbers)

    def _fallback(self, bad: int) -> int | None:
        """The version before, else the last good one."""
        for version in (self._incumbent, self._record.last_good(other_than=bad)):
            if version is None or version == bad or version in self._log.refused or self._record.is_barred(version):
                continue
            return version
        return None

    def _taken(self, version: int, why: str) -> None:
        """A version is in service without a trial."""
        self._withdraw(why)
        if self._watch is not None:
            self._incumbent = version
            self._watch.restart(version)
            return
        self._record.live(version)
        self._record.promoted(version, "in service without a watch", {})

    def _withdraw(self, why: str) -> None:
        if self._log.watched:
            self._verdict = None
            self._log.end_trial(self._log.watched, "withdrawn", why)
        # Also where the trial has ended well: the verdict was about another target, or another engine tries it.
        self._canary.give_up()

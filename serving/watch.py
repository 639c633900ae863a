"""Watches a version that has just come into service, and says whether it stays.

When it stays is told in serving/judgement.py. The baseline is the record of what was in service lately: a version that
is kept adds its own to it.

When the target moves, nothing that was known of any version holds: a draft may accept less because it is worse, or
because its target is another. So the record begins anew and a trial ends without a verdict; the version stays. A target
that keeps moving may never let an incumbent be known: then a newer version is tried after `patience_s` all the same. It
has the gate behind it, and the trainer's second look ahead (trainer/release/live_review.py), which both ask about the
newest target.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from serving.evidence import WatchedRound
from serving.judgement import Outcome, Record, Trial, Verdict, WatchRules

_MAX_ARRIVED = 8192
"""Rounds between two looks; older ones are dropped when the judge is that late."""


class LiveWatch:
    """One engine's watch. `observe` is for the decode thread and never waits; everything else for one other thread."""

    def __init__(
        self, version: int, rules: WatchRules | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`version` is the one in service."""
        self.rules, self._clock = rules or WatchRules(), clock
        self._arrived: deque[WatchedRound] = deque(maxlen=_MAX_ARRIVED)
        self._version, self._baseline = version, Record()
        """The version that serves, or served before the one on trial; and what was in service lately."""
        self._trial: Trial | None = None
        self._waiting_since_s: float | None = None
        self._target_version = 0
        self._of_next_target: WatchedRound | None = None
        self._has_moved = False
        """Since the incumbent was last known well enough."""

    def observe(self, round_: WatchedRound) -> None:
        self._arrived.append(round_)

    # -- on the judge's thread --------------------------------------------------------------------------------------

    @property
    def watched(self) -> int | None:
        """The version on trial."""
        return None if self._trial is None else self._trial.version

    @property
    def baseline_verifications(self) -> int:
        return len(self._baseline.verifications)

    @property
    def trial_compared(self) -> int:
        """Verifications of the trial that could be compared with the incumbent's."""
        return 0 if self._trial is None else self._trial.num_compared

    @property
    def target_version(self) -> int:
        """Of the target whose rounds are counted."""
        return self._target_version

    @property
    def accept_length(self) -> float | None:
        """Tokens a verification of the version in service, over the last 1,000; None before the first."""
        return (self._baseline if self._trial is None else self._trial.record).accept_length()

    def restart(self, version: int) -> None:
        """Another version is in service without a trial: whatever was known is of no use."""
        self._trial = self._waiting_since_s = None
        self._version, self._baseline = version, Record()

    def target_moved(self) -> bool:
        """Whether rounds of another target have come: the record of the version in service then begins anew."""
        self._drain()
        first, self._of_next_target = self._of_next_target, None
        if first is None:
            return False
        self._target_version, self._has_moved = first.target_version, True
        self._version = self._version if self._trial is None else self._trial.version
        self._trial, self._baseline = None, Record()
        self._take(first)
        return True

    def expect(self) -> None:
        """Some newer version waits to be tried; it may be replaced by a newer one still."""
        if self._waiting_since_s is None:
            self._waiting_since_s = self._clock()

    def is_ready(self) -> bool:
        """Whether the incumbent is known well enough to try a version against it. An idle engine has no need of one."""
        self._drain()
        if self._baseline.num_rounds >= self.rules.min_baseline:
            self._has_moved = False
            return True
        waited_s = 0.0 if self._waiting_since_s is None else self._clock() - self._waiting_since_s
        return self._has_moved and waited_s >= self.rules.patience_s

    def begin(self, version: int) -> None:
        """A new version is in service, on trial."""
        self._drain()
        self._waiting_since_s = None
        self._trial = Trial(version, self._baseline, self.rules, started_s=self._clock())

    def judge(self) -> Verdict:
        """What the evidence so far says about the version on trial; it stays on trial until `settle`."""
        assert self._trial is not None
        self._drain()
        return self._trial.judge(self._clock(), is_successor_waiting=self._waiting_since_s is not None)

    def settle(self, verdict: Verdict) -> None:
        """The version on trial has been promoted, or the incumbent is in service again."""
        assert self._trial is not None
        trial, self._trial = self._trial, None
        if verdict.outcome is Outcome.PROMOTED:
            self._version = trial.version
            self._baseline.extend(trial.record)

    def give_up(self) -> None:
        """Somebody else spoke against the version on trial, and the incumbent is in service again."""
        self._trial = None

    def _drain(self) -> None:
        """Up to the first round of another target."""
        while self._arrived and self._of_next_target is None:
            round_ = self._arrived.popleft()
            if round_.target_version == self._target_version:
                self._take(round_)
            else:
                self._of_next_target = round_

    def _take(self, round_: WatchedRound) -> None:
        """A round of a version that is neither in service nor on trial was launched before the swap."""
        trial = self._trial
        if trial is not None and round_.version == trial.version:
            trial.add(round_)
        elif trial is None and round_.version == self._version:
            self._baseline.add(round_)

"""Watches a version that has just come into service, and says whether it stays.

When it stays is told in serving/judgement.py.

The baseline is what the version in service has earned lately. A version that is better, and confidently not worse,
brings its own: the incumbent's would be too easy a measure for the next. One that passes for as good shares the pool
with those before it: a chain of versions, each a little worse than the last but none of them by enough, is compared
with the pool and not with the last one, so it cannot creep far.

When the target moves, nothing that was known of any version holds: a draft may accept less because it is worse, or
because its target is another. So the record begins anew and a trial ends without a verdict; the version stays. A target
that keeps moving may never let an incumbent be known: then a newer version is tried after `patience_s` all the same. It
has the gate behind it, and the trainer's second look ahead (trainer/review.py), which both ask about the newest target.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from serving.comparison import AcceptComparison
from serving.evidence import Evidence, Strata, WatchedRound
from serving.judgement import Outcome, Trial, Verdict, WatchRules, against

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
        self._strata = Strata()
        self._baseline = Evidence(version)
        self._trial: Trial | None = None
        self._returned: tuple[AcceptComparison, float] | None = None
        """After a rollback: the incumbent against its own past, and the change for which the other went."""
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
        return None if self._trial is None else self._trial.evidence.version

    @property
    def baseline_verifications(self) -> int:
        return len(self._baseline.verifications)

    @property
    def trial_compared(self) -> int:
        """Verifications of the trial that could be compared with the incumbent's."""
        return 0 if self._trial is None else self._trial.comparison.known

    @property
    def target_version(self) -> int:
        """Of the target whose rounds are counted."""
        return self._target_version

    @property
    def accept_length(self) -> float | None:
        """Tokens a verification of the version in service, over the last ones that it earned; None before the first."""
        evidence = self._baseline if self._trial is None else self._trial.evidence
        return evidence.accept_length()

    def restart(self, version: int) -> None:
        """Another version is in service without a trial: whatever was known is of no use."""
        self._trial = self._returned = self._waiting_since_s = None
        self._baseline = Evidence(version)

    def target_moved(self) -> bool:
        """Whether rounds of another target have come: the record of the version in service then begins anew."""
        self._drain()
        first, self._of_next_target = self._of_next_target, None
        if first is None:
            return False
        self._target_version, self._has_moved = first.target_version, True
        in_service = self._baseline.version if self._trial is None else self._trial.evidence.version
        self._trial = self._returned = None
        self._baseline = Evidence(in_service)
        self._take(self._placed(first))
        return True

    def expect(self) -> None:
        """Some newer version waits to be tried; it may be replaced by a newer one still."""
        if self._waiting_since_s is None:
            self._waiting_since_s = self._clock()

    def is_ready(self) -> bool:
        """Whether the incumbent is known well enough to try a version against it. An idle engine has no need of one."""
        self._drain()
        rules = self.rules
        waited_s = 0.0 if self._waiting_since_s is None else self._clock() - self._waiting_since_s
        if self.baseline_verifications >= rules.min_baseline and self._baseline.error() <= rules.baseline_error:
            self._has_moved = False
            return True
        if self.rules.is_idle(self._baseline):
            return True
        if waited_s < rules.patience_s:
            return False
        return self._has_moved or self.baseline_verifications >= rules.min_baseline

    def begin(self, version: int) -> None:
        """A new version is in service, on trial."""
        self._drain()
        self._waiting_since_s = self._returned = None
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
            if not verdict.is_better:
                trial.evidence.pool(self._baseline)
            self._baseline = trial.evidence
        elif trial.comparison.known:
            self._returned = against(self._baseline), trial.comparison.change(self.rules.alpha).estimate

    def give_up(self) -> None:
        """Somebody else spoke against the version on trial, and the incumbent is in service again."""
        self._trial = None

    def rollback_doubt(self) -> float | None:
        """Once after a rollback: the incumbent's own change since, where it is closer to the other's than to none.

        Then it was the traffic that changed and not the draft.
        """
        self._drain()
        if self._returned is None or self._returned[0].known < self.rules.min_baseline:
            return None
        (past, rolled_back), self._returned = self._returned, None
        since = past.change(self.rules.alpha).estimate
        return since if since < rolled_back / 2 else None

    def _drain(self) -> None:
        """Up to the first round of another target."""
        while self._arrived and self._of_next_target is None:
            round_ = self._arrived.popleft()
            if round_.target_version == self._target_version:
                self._take(self._placed(round_))
            else:
                self._of_next_target = round_

    def _placed(self, round_: WatchedRound) -> WatchedRound:
        return round_._replace(
            verifications=tuple(
                verification._replace(stratum=self._strata.place(verification.stratum))
                for verification in round_.verifications
            )
        )

    def _take(self, round_: WatchedRound) -> None:
        """A round of a version that is neither in service nor on trial was launched before the swap."""
        trial = self._trial
        if trial is not None and round_.version == trial.evidence.version:
            trial.add(round_)
        elif trial is None and round_.version == self._baseline.version:
            self._baseline.add(round_)
            if self._returned is not None:
                for verification in round_.verifications:
                    self._returned[0].add(verification)

"""Watches a version that has just come into service, and says whether it stays.

The accept length is compared with the incumbent's by strata, so that another mix of requests is not taken for another
draft; the time a token at equal batch sizes and on equal requests, with the control rounds of both as the measure of
the machine. Both bounds hold over all looks together, so one may look as often as one likes:

* rolled back when it is confidently more than 2% worse (accept length) or more than 10% slower;
* promoted when it is confidently not worse than the margin, and its time a token is known or cannot be;
* promoted, too, when a newer version waits and 500 verifications do not look worse: the gate found it better, and more
  of its time would be better spent on the one after it. A version that is hardly used, because drafting does not pay,
  has few: 500 rounds in which it was not found worse will do;
* after `max_verifications`: rolled back when one last, plain look says so; promoted when the estimate is within the
  margin; watched on otherwise;
* after twice as many: one more look, then promoted. (Independent verifications are counted, so with requests that
  differ much it takes more of them, at most four times as many.)

Only confidence rolls a version back: where it takes so long to tell a difference there is little of one, and good
versions would be lost for a coin's toss. So a version is promoted, too, that served only requests of strata in which
the incumbent is unknown, as long as its time a token says nothing against it. And the 2% are for the incumbent's luck:
its record may be that of a trial which it passed because it looked better than it is. The trainer finds out sooner, and
for less, since it compares both versions on the same traces (trainer/review.py).

Half of `alpha` goes to the bounds over all looks and a quarter to each of the two plain ones.

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

import enum
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from serving.comparison import AcceptComparison, Change, time_change
from serving.evidence import Evidence, Reference, Strata, WatchedRound
from speculator.lifecycle import Number

_MAX_ARRIVED = 8192
"""Rounds between two looks; older ones are dropped when the judge is that late."""
_MOST_INFLATION = 4
"""Verifications that are waited for in the place of an independent one."""


@dataclass(frozen=True, kw_only=True)
class WatchRules:
    alpha: float = 0.01
    """Share of good versions that may be rolled back."""
    margin: float = 0.03
    """A version is as good as the incumbent when its accept length is at most this much smaller."""
    worse_margin: float = 0.02
    """How much smaller than the incumbent's its accept length must be at least, as far as is known."""
    promotion_alpha: float = 0.05
    """Share of versions outside the margin that may pass for being inside."""
    slower_margin: float = 0.10
    """Time a token that a version may lose before it counts: a busy machine slows wide rounds more than narrow ones."""
    min_verifications: int = 30
    """Before these, nothing is concluded."""
    enough_for_a_successor: int = 500
    """Verifications from which on a version that does not look worse makes room for a newer one."""
    max_verifications: int = 2000
    """Independent ones, from which on the estimate decides."""
    baseline_error: float = 0.015
    """Standard error of the incumbent's accept length, relative to it, from which on another version is tried: 10%
    less can then be told in time. That takes some 1,500 verifications where 1.7 tokens are committed by each."""
    min_baseline: int = 300
    """Verifications that it takes at least, and that must do for a version that has been waiting for `patience_s`."""
    patience_s: float = 30.0
    idle_share: float = 0.25
    """Verifications a round, lately, below which a version is one that the planner hardly uses: little is at stake, so
    nothing waits until more is known of it."""


class Outcome(enum.Enum):
    WATCHING = "watching"
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled_back"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    outcome: Outcome
    reason: str
    numbers: dict[str, Number]
    is_better: bool = False
    """Better than the incumbent, and confidently not worse."""


@dataclass
class _Trial:
    evidence: Evidence
    comparison: AcceptComparison
    started_s: float
    looks: int = 0
    """Plain looks taken."""


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
        self._trial: _Trial | None = None
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
        if self._is_idle(self._baseline):
            return True
        if waited_s < rules.patience_s:
            return False
        return self._has_moved or self.baseline_verifications >= rules.min_baseline

    def begin(self, version: int) -> None:
        """A new version is in service, on trial."""
        self._drain()
        self._waiting_since_s = self._returned = None
        comparison = AcceptComparison(Reference(self._baseline.verifications, num_own=self._baseline.num_own))
        self._trial = _Trial(Evidence(version), comparison, self._clock())

    def judge(self) -> Verdict:
        """What the evidence so far says about the version on trial; it stays on trial until `settle`."""
        assert self._trial is not None
        self._drain()
        trial, rules = self._trial, self.rules
        accept = trial.comparison
        blocks, baseline = list(trial.evidence.blocks), list(self._baseline.blocks)
        timing = time_change(blocks, baseline, mix=accept.mix, alpha=rules.alpha / 2)
        if timing is not None and timing.lower > rules.slower_margin:
            return self._verdict(Outcome.ROLLED_BACK, "slower a token than the incumbent", timing)
        if accept.known >= rules.min_verifications:
            change = accept.change(rules.alpha / 2)
            if change.upper < -rules.worse_margin:
                return self._verdict(Outcome.ROLLED_BACK, "accepts less than the incumbent", timing)
            hopeful = accept.change(rules.promotion_alpha)
            if hopeful.lower > -rules.margin and self._is_time_known(timing):
                better = hopeful.estimate > 0
                reason = "accepts more than the incumbent" if better else "accepts as much as the incumbent"
                return self._verdict(Outcome.PROMOTED, reason, timing, is_better=better)
        if self._waiting_since_s is not None and self._makes_room(timing):
            return self._verdict(Outcome.PROMOTED, "looks no worse, and a newer version waits", timing)
        if self._patience() >= 1:
            return self._late_verdict(timing)
        return self._verdict(Outcome.WATCHING, "", timing)

    def settle(self, verdict: Verdict) -> None:
        """The version on trial has been promoted, or the incumbent is in service again."""
        assert self._trial is not None
        trial, self._trial = self._trial, None
        if verdict.outcome is Outcome.PROMOTED:
            if not verdict.is_better:
                trial.evidence.pool(self._baseline)
            self._baseline = trial.evidence
        elif trial.comparison.known:
            past = AcceptComparison(Reference(self._baseline.verifications, num_own=self._baseline.num_own))
            self._returned = past, trial.comparison.change(self.rules.alpha).estimate

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

    def _late_verdict(self, timing: Change | None) -> Verdict:
        """The evidence is all that is waited for: look plainly, at most twice."""
        assert self._trial is not None
        accept, rules = self._trial.comparison, self.rules
        is_last = self._patience() >= 2
        if accept.known < rules.min_verifications:
            outcome = Outcome.PROMOTED if is_last else Outcome.WATCHING
            return self._verdict(outcome, "nothing to compare its accept length with", timing)
        if self._trial.looks < 1 + is_last:
            self._trial.looks += 1
            if accept.final_change(rules.alpha / 4).upper < -rules.worse_margin:
                return self._verdict(Outcome.ROLLED_BACK, "accepts less than the incumbent", timing)
        if accept.change(rules.alpha).estimate >= -rules.margin:
            return self._verdict(Outcome.PROMOTED, "accepts as much as the incumbent", timing)
        if is_last:
            return self._verdict(Outcome.PROMOTED, "not confirmed to be worse", timing)
        return self._verdict(Outcome.WATCHING, "", timing)

    def _makes_room(self, timing: Change | None) -> bool:
        assert self._trial is not None
        accept, rules = self._trial.comparison, self.rules
        if self._is_idle(self._trial.evidence):
            return True
        is_slower = timing is not None and timing.estimate >= rules.slower_margin
        if is_slower or accept.known < rules.enough_for_a_successor:
            return False
        return accept.change(rules.alpha).estimate >= -rules.margin / 2

    def _is_idle(self, evidence: Evidence) -> bool:
        share = evidence.recent_share
        return share is not None and share < self.rules.idle_share

    def _patience(self) -> float:
        """What has been seen, in units of `max_verifications`."""
        assert self._trial is not None
        accept = self._trial.comparison
        # Rounds, too: an engine that is told not to draft has no verifications at all.
        longest = max(accept.seen, self._trial.evidence.num_rounds)
        return max(accept.effective, longest / _MOST_INFLATION) / self.rules.max_verifications

    def _is_time_known(self, timing: Change | None) -> bool:
        """Control rounds are rare: where the incumbent has them, the version on trial waits for its own."""
        if timing is not None:
            return timing.estimate < self.rules.slower_margin
        baseline = list(self._baseline.blocks)
        return time_change(baseline, baseline, alpha=self.rules.alpha) is None

    def _verdict(self, outcome: Outcome, reason: str, timing: Change | None, *, is_better: bool = False) -> Verdict:
        assert self._trial is not None
        trial, accept = self._trial, self._trial.comparison
        numbers: dict[str, Number] = {
            "verifications": accept.seen,
            "compared": accept.known,
            "rounds": trial.evidence.num_rounds,
            "seconds": round(self._clock() - trial.started_s, 2),
            "baseline_verifications": self.baseline_verifications,
        }
        if accept.seen:
            numbers["accept_length"] = round(1 + accept.accepted / accept.seen, 4)
        if accept.known:
            change = accept.change(self.rules.alpha / 2)
            numbers["incumbent_accept_length"] = round(accept.incumbent_length, 4)
            numbers |= _numbers("accept_change", change)
        if timing is not None:
            numbers |= _numbers("time_change", timing)
        return Verdict(outcome=outcome, reason=reason, numbers=numbers, is_better=is_better)

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
            trial.evidence.add(round_)
            for verification in round_.verifications:
                trial.comparison.add(verification)
        elif trial is None and round_.version == self._baseline.version:
            self._baseline.add(round_)
            if self._returned is not None:
                for verification in round_.verifications:
                    self._returned[0].add(verification)


def _numbers(name: str, change: Change) -> dict[str, Number]:
    return {
        name: round(change.estimate, 4),
        f"{name}_lower": round(change.lower, 4),
        f"{name}_upper": round(change.upper, 4),
    }

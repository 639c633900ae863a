"""Whether a version on trial stays: what has been seen of it, against the record of the version before.

Like is compared with like, so that other traffic is not taken for another draft. The accept length is compared by
strata. Times are those of rounds in which the draft took part, against the incumbent's rounds of as many proposals of
each source, with the control rounds of both as the measure of the machine. What has no like is not held against a
version. Both bounds hold over all looks together, so one may look as often as one likes:

* rolled back when it is confidently more than 2% worse (accept length) or more than 10% slower;
* promoted when it is confidently not worse than the margin, and its time a token is known or cannot be;
* promoted, too, when a newer version waits and 500 verifications do not look worse, or cannot be compared: the gate
  found it better, and more of its time would be better spent on the one after it. A version that is hardly used,
  because drafting does not pay, has few: 500 rounds in which it was not found worse will do;
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
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import partial

from serving.comparison import AcceptComparison, Change, has_controls, time_change
from serving.evidence import Evidence, Reference, WatchedRound
from speculator.lifecycle import Number

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

    def is_idle(self, evidence: Evidence) -> bool:
        share = evidence.recent_share
        return share is not None and share < self.idle_share


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


def against(baseline: Evidence) -> AcceptComparison:
    """For verifications that are to be compared with the incumbent's, as they were until now."""
    return AcceptComparison(Reference(baseline.verifications))


class Trial:
    """One version's; `baseline` is the incumbent's record, to which nothing is added meanwhile."""

    def __init__(self, version: int, baseline: Evidence, rules: WatchRules, *, started_s: float) -> None:
        self.evidence, self.comparison = Evidence(version), against(baseline)
        self._baseline, self._rules, self._started_s = baseline, rules, started_s
        self._num_looks = 0
        """Plain ones."""

    def add(self, round_: WatchedRound) -> None:
        self.evidence.add(round_)
        for verification in round_.verifications:
            self.comparison.add(verification)

    def judge(self, now_s: float, *, is_successor_waiting: bool) -> Verdict:
        """What the evidence so far says; it may be asked again as often as one likes."""
        accept, rules = self.comparison, self._rules
        blocks, baseline = list(self.evidence.blocks), list(self._baseline.blocks)
        gain = 1.0
        if accept.known >= rules.min_verifications:
            gain += max(accept.change(rules.alpha).estimate, 0.0)
        timing = time_change(blocks, baseline, gain=gain, alpha=rules.alpha / 2)
        tell = partial(Verdict, numbers=self._numbers(timing, now_s))
        if timing is not None and timing.lower > rules.slower_margin:
            return tell(outcome=Outcome.ROLLED_BACK, reason="slower a token than the incumbent")
        if accept.known >= rules.min_verifications:
            if accept.change(rules.alpha / 2).upper < -rules.worse_margin:
                return tell(outcome=Outcome.ROLLED_BACK, reason="accepts less than the incumbent")
            hopeful = accept.change(rules.promotion_alpha)
            if hopeful.lower > -rules.margin and self._is_time_known(timing):
                better = hopeful.estimate > 0
                reason = "accepts more than the incumbent" if better else "accepts as much as the incumbent"
                return tell(outcome=Outcome.PROMOTED, reason=reason, is_better=better)
        if is_successor_waiting and self._makes_room(timing):
            return tell(outcome=Outcome.PROMOTED, reason="looks no worse, and a newer version waits")
        if self._patience() >= 1:
            outcome, reason = self._late_outcome(is_last=self._patience() >= 2)
            return tell(outcome=outcome, reason=reason)
        return tell(outcome=Outcome.WATCHING, reason="")

    def _late_outcome(self, *, is_last: bool) -> tuple[Outcome, str]:
        """The evidence is all that is waited for: look plainly, at most twice."""
        accept, rules = self.comparison, self._rules
        if accept.known < rules.min_verifications:
            outcome = Outcome.PROMOTED if is_last else Outcome.WATCHING
            return outcome, "nothing to compare its accept length with"
        if self._num_looks < 1 + is_last:
            self._num_looks += 1
            if accept.final_change(rules.alpha / 4).upper < -rules.worse_margin:
                return Outcome.ROLLED_BACK, "accepts less than the incumbent"
        if accept.change(rules.alpha).estimate >= -rules.margin:
            return Outcome.PROMOTED, "accepts as much as the incumbent"
        if is_last:
            return Outcome.PROMOTED, "not confirmed to be worse"
        return Outcome.WATCHING, ""

    def _makes_room(self, timing: Change | None) -> bool:
        accept, rules = self.comparison, self._rules
        if rules.is_idle(self.evidence):
            return True
        is_slower = timing is not None and timing.estimate >= rules.slower_margin
        if is_slower or accept.seen < rules.enough_for_a_successor:
            return False
        return accept.known < rules.min_verifications or accept.change(rules.alpha).estimate >= -rules.margin / 2

    def _patience(self) -> float:
        """What has been seen, in units of `max_verifications`."""
        accept = self.comparison
        # Rounds, too: an engine that is told not to draft has no verifications at all.
        longest = max(accept.seen, self.evidence.num_rounds)
        return max(accept.effective, longest / _MOST_INFLATION) / self._rules.max_verifications

    def _is_time_known(self, timing: Change | None) -> bool:
        """Control rounds are rare: where the incumbent has them, the version on trial waits for its own."""
        if timing is not None:
            return timing.estimate < self._rules.slower_margin
        return has_controls(self.evidence.blocks) or not has_controls(self._baseline.blocks)

    def _numbers(self, timing: Change | None, now_s: float) -> dict[str, Number]:
        accept = self.comparison
        numbers: dict[str, Number] = {
            "verifications": accept.seen,
            "compared": accept.known,
            "rounds": self.evidence.num_rounds,
            "seconds": round(now_s - self._started_s, 2),
            "baseline_verifications": len(self._baseline.verifications),
        }
        if accept.seen:
            numbers["accept_length"] = round(1 + accept.accepted / accept.seen, 4)
        if accept.known:
            numbers["incumbent_accept_length"] = round(accept.incumbent_length, 4)
            numbers |= _bounds("accept_change", accept.change(self._rules.alpha / 2))
        if timing is not None:
            numbers |= _bounds("time_change", timing)
        return numbers


def _bounds(name: str, change: Change) -> dict[str, Number]:
    return {
        name: round(change.estimate, 4),
        f"{name}_lower": round(change.lower, 4),
        f"{name}_upper": round(change.upper, 4),
    }

"""The circuit breaker: compares a draft version on trial with the incumbent, and says whether it stays.

It takes back a version that is clearly worse, within some fifty rounds, or slower. A version that is a tenth worse is
the trainer's to find: it decodes the same traces with both versions (trainer/release/live_review.py).

The engine tells it of each round: a `WatchedRound`, with a `Verification` for each request with the head. `LiveWatch`
keeps the record of the incumbent, `Trial` that of the version on trial. A version that is kept adds its record to the
incumbent's.

When the target moves, nothing that was known of any version holds: a draft may accept less because it is worse, or
because its target is another. So the record begins anew and a trial ends without a verdict; the version stays. A target
that keeps moving may never let an incumbent be known: then a newer version is tried after `patience_s` all the same. It
has the gate behind it, and the trainer's second look ahead, which both ask about the newest target.

**Accepted proposals.** The new version accepts X proposals of a request where the incumbent would have accepted E: its
mean over verifications of the same stratum and depth. Some requests are harder than others, so a request's rate varies
by a gamma distribution of mean 1 and shape k, and X has a negative binomial distribution. That the version accepts c
times as many as the incumbent is then exp Λ_c times as likely as that it accepts as many:

    Λ_c = Σ_requests  X ln c + (X + k) ln((k + E) / (k + c E))

It is rolled back when the mean of exp Λ_c over `_WORSE` reaches 1 / α. This is the sequential probability ratio test
(Wald, Annals of Mathematical Statistics 16(2), 1945) of a mixture of alternatives (Robbins, ibid. 41(5), 1970): by this
model a version as good as the incumbent is rolled back with a probability of at most α, however often one looks. Λ
rises where a version accepts less than about 70% of the incumbent's proposals, and falls where it accepts more.

What is not known for sure counts in the version's favour. How much requests differ, 1 / k, is what the incumbent's did
(method of moments, with a prior of k = 4 that weighs as much as 16 requests). E is divided by 1 + 2 / √(k m) where m
requests say what the incumbent accepts: two standard errors.

**Time.** Each control round is paired with the last round before it in which the draft took part. Against the
incumbent's rounds of the same kind (`WatchedRound.kind`) the one took d times as long and the other m times, which is
the machine's part. The pair speaks against the version where d / m exceeds its gain in accept length by more than
`slower_margin`. The test is Wald's again, on signs: nine such pairs in ten against one in two.

What has no like among the incumbent's rounds is not compared. A version that is never asked is neither rolled back nor
found as good: it stays on trial until a newer one waits, or for `most_rounds`.
"""

from __future__ import annotations

import enum
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from serving.engine import Stratum, Verification, WatchedRound
from speculator.versions.lifecycle import Number

_WORSE = (0.1, 0.5)
"""c: the shares of the incumbent's accepted proposals that are tested for."""
_USUAL_VARIANCE, _USUAL_WEIGHT = 0.25, 16
"""1 / k of requests that nothing is known of, and as how many requests that counts."""
_SLOW_SHARE = 0.9
"""Share of pairs that speak against a slow version."""
_DOUBT = math.log(20)
"""Evidence against a version with which it is neither kept nor taken back."""
_FEWEST_KNOWN = 30
"""Verifications of a stratum and position from which on the incumbent is known there."""
_FEWEST_TIMED = 10
"""The same for rounds of a kind."""
_KEPT_VERIFICATIONS = 10_000
_KEPT_ROUNDS = 4096
_RECENT_VERIFICATIONS = 1000


@dataclass(frozen=True, kw_only=True)
class WatchRules:
    alpha: float = 0.001
    """Probability with which a version as good as the incumbent may be rolled back, for each of the two tests."""
    slower_margin: float = 0.10
    """Time a token that a version may lose before it counts: a busy machine slows wide rounds more than narrow ones."""
    enough_rounds: int = 2000
    """Rounds after which a version that is not found worse is kept, if `enough_compared` verifications had a like."""
    enough_compared: int = 500
    enough_for_a_successor: int = 500
    """Rounds after which it makes room for a newer version that waits."""
    most_rounds: int = 16_000
    """Rounds after which a trial ends in any case."""
    min_baseline: int = 500
    """Rounds of the incumbent before which no version is tried against it."""
    patience_s: float = 30.0
    """After which one is tried all the same where the target moves so often that no incumbent is ever known."""


class Outcome(enum.Enum):
    WATCHING = "watching"
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled_back"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    outcome: Outcome
    reason: str
    numbers: dict[str, Number]


@dataclass
class Record:
    """The last verifications and rounds that tell what to expect of a version."""

    verifications: deque[Verification] = field(default_factory=lambda: deque(maxlen=_KEPT_VERIFICATIONS))
    times: deque[tuple[Hashable, float]] = field(default_factory=lambda: deque(maxlen=_KEPT_ROUNDS))
    """(kind of round, logarithm of its seconds)."""
    num_rounds: int = 0

    def add(self, round_: WatchedRound) -> None:
        self.num_rounds += 1
        self.verifications += round_.verifications
        if round_.kind is not None:
            self.times.append((round_.kind, math.log(round_.seconds)))

    def extend(self, newer: Record) -> None:
        """Add the record of a version that has proved as good."""
        self.verifications += newer.verifications
        self.times += newer.times
        self.num_rounds += newer.num_rounds

    def accept_length(self) -> float | None:
        """Tokens a verification, bonus included, over the last 1,000; None before the first."""
        recent = [one.accepted for one in islice(reversed(self.verifications), _RECENT_VERIFICATIONS)]
        return 1 + statistics.fmean(recent) if recent else None


class _Incumbent:
    """What the incumbent's record says of verifications and rounds; frozen."""

    def __init__(self, record: Record) -> None:
        counts: dict[Stratum, list[list[int]]] = {}
        requests: dict[Stratum, set[str]] = {}
        for one in record.verifications:
            rows = counts.setdefault(one.stratum, [])
            rows += ([0, 0] for _ in range(one.depth - len(rows)))
            for position, row in enumerate(rows[: one.depth]):
                row[0] += 1
                row[1] += one.accepted > position
            requests.setdefault(one.stratum, set()).add(one.request_id)
        self._rates = {
            stratum: [accepted / tried for tried, accepted in rows if tried >= _FEWEST_KNOWN]
            for stratum, rows in counts.items()
        }
        """By stratum, for each position: how often at least so many proposals are accepted of chains that deep."""
        self.shape = self._shape(record, {stratum: len(ids) for stratum, ids in requests.items()})
        """k, see above."""
        self._doubt = {stratum: 1 + 2 / math.sqrt(self.shape * len(ids)) for stratum, ids in requests.items()}
        times: dict[Hashable, list[float]] = {}
        for kind, log_s in record.times:
            times.setdefault(kind, []).append(log_s)
        self._times = {kind: sum(each) / len(each) for kind, each in times.items() if len(each) >= _FEWEST_TIMED}

    def _shape(self, record: Record, num_requests: Mapping[Stratum, int]) -> float:
        """From the variance of X, which is E + E² / k, over the incumbent's own requests."""
        sums: dict[tuple[str, Stratum], list[float]] = {}
        for one in record.verifications:
            if num_requests[one.stratum] > 1 and (found := self.accepted(one)) is not None:
                row = sums.setdefault((one.request_id, one.stratum), [0.0, 0.0])
                row[0] += found[0]
                row[1] += found[1]
        # A request is part of the mean that it is compared with.
        correction = {stratum: num / (num - 1) for stratum, num in num_requests.items() if num > 1}
        squares = sum(correction[stratum] * (x - e) ** 2 - e for (_, stratum), (x, e) in sums.items())
        expected = sum(e * e for _, e in sums.values())
        variance = max(squares / expected, 0.0) if expected else 0.0
        weight = len({request_id for request_id, _ in sums}) if expected else 0
        return (weight + _USUAL_WEIGHT) / (weight * variance + _USUAL_WEIGHT * _USUAL_VARIANCE)

    def accepted(self, one: Verification) -> tuple[int, float] | None:
        """(accepted, expected), as far down as the incumbent is known; None where it is not."""
        rates = self._rates.get(one.stratum, [])[: one.depth]
        return (min(one.accepted, len(rates)), sum(rates)) if rates else None

    def doubt(self, stratum: Stratum) -> float:
        """By how much what is expected may be too large."""
        return self._doubt[stratum]

    def log_slowdown(self, round_: WatchedRound) -> float | None:
        """None where the incumbent had too few rounds of this kind."""
        usual = self._times.get(round_.kind)
        return None if usual is None else math.log(round_.seconds) - usual


class Trial:
    """One version's trial against the record of the version in service before it."""

    def __init__(self, version: int, baseline: Record, rules: WatchRules, *, started_s: float) -> None:
        self.version, self.record = version, Record()
        self.num_seen = self.num_compared = 0
        """Verifications, and those that have a like among the incumbent's."""
        self._rules, self._started_s = rules, started_s
        self._incumbent, self._num_baseline = _Incumbent(baseline), len(baseline.verifications)
        self._requests: dict[str, list[float]] = {}
        """(X, E) by request id."""
        self._accepted = self._compared_accepted = 0
        self._expected_accepted = 0.0
        self._drafted: float | None = None
        """Log slowdown of the last round in which the draft took part."""
        self._slowdowns: list[float] = []
        """log d / m of each pair."""

    def add(self, round_: WatchedRound) -> None:
        self.record.add(round_)
        for one in round_.verifications:
            self._compare(one)
        slowdown = self._incumbent.log_slowdown(round_)
        if slowdown is None:
            return
        if round_.drafted:
            self._drafted = slowdown
        elif self._drafted is not None:
            self._slowdowns.append(self._drafted - slowdown)
            self._drafted = None

    def _compare(self, one: Verification) -> None:
        self.num_seen += 1
        self._accepted += one.accepted
        found = self._incumbent.accepted(one)
        if found is None:
            return
        accepted, expected = found
        self.num_compared += 1
        self._compared_accepted += accepted
        self._expected_accepted += expected
        sums = self._requests.setdefault(one.request_id, [0.0, 0.0])
        sums[0] += accepted
        sums[1] += expected / self._incumbent.doubt(one.stratum)

    def judge(self, now_s: float, *, is_successor_waiting: bool) -> Verdict:
        """What the evidence so far says; it may be asked as often as one likes."""
        rules, num = self._rules, self.record.num_rounds
        worse, slower = self._worse_evidence(), self._slower_evidence()

        def tell(outcome: Outcome, reason: str) -> Verdict:
            return Verdict(outcome=outcome, reason=reason, numbers=self._numbers(worse, now_s))

        if worse >= -math.log(rules.alpha):
            return tell(Outcome.ROLLED_BACK, "accepts less than the incumbent")
        if slower >= -math.log(rules.alpha):
            return tell(Outcome.ROLLED_BACK, "slower a token than the incumbent")
        if max(worse, slower) < _DOUBT:
            if num >= rules.enough_rounds and self.num_compared >= rules.enough_compared:
                return tell(Outcome.PROMOTED, "not found worse than the incumbent")
            if is_successor_waiting and num >= rules.enough_for_a_successor:
                return tell(Outcome.PROMOTED, "looks no worse, and a newer version waits")
        if num >= rules.most_rounds:
            told = "not confirmed to be worse" if self.num_compared else "nothing to compare its accept length with"
            return tell(Outcome.PROMOTED, told)
        return tell(Outcome.WATCHING, "")

    def _worse_evidence(self) -> float:
        """The logarithm of the mean of exp Λ_c."""
        k = self._incumbent.shape
        ratios = [
            sum(x * math.log(c) + (x + k) * math.log((k + e) / (k + c * e)) for x, e in self._requests.values())
            for c in _WORSE
        ]
        most = max(ratios)
        return most + math.log(statistics.fmean(math.exp(ratio - most) for ratio in ratios))

    def _slower_evidence(self) -> float:
        """The logarithm of how much likelier a slow version makes these pairs."""
        allowed = math.log1p(self._rules.slower_margin) + math.log(self._gain)
        num_slow = sum(slowdown > allowed for slowdown in self._slowdowns)
        num_other = len(self._slowdowns) - num_slow
        return num_slow * math.log(2 * _SLOW_SHARE) + num_other * math.log(2 * (1 - _SLOW_SHARE))

    @property
    def _gain(self) -> float:
        """Its accept length over the incumbent's on equal requests; 1 where it is smaller."""
        if not self.num_compared:
            return 1.0
        length = self.num_compared + self._compared_accepted
        return max(length / (self.num_compared + self._expected_accepted), 1.0)

    def _numbers(self, worse: float, now_s: float) -> dict[str, Number]:
        numbers: dict[str, Number] = {
            "verifications": self.num_seen,
            "compared": self.num_compared,
            "rounds": self.record.num_rounds,
            "seconds": round(now_s - self._started_s, 2),
            "baseline_verifications": self._num_baseline,
        }
        if self.num_seen:
            numbers["accept_length"] = round(1 + self._accepted / self.num_seen, 4)
        if self.num_compared:
            length = 1 + self._compared_accepted / self.num_compared
            incumbent_length = 1 + self._expected_accepted / self.num_compared
            numbers["incumbent_accept_length"] = round(incumbent_length, 4)
            numbers["accept_change"] = round(length / incumbent_length - 1, 4)
            numbers["worse_evidence"] = round(worse, 2)
        if self._slowdowns:
            numbers["time_change"] = round(math.exp(statistics.median(self._slowdowns)) / self._gain - 1, 4)
        return numbers


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

"""The circuit breaker: compares a draft version on trial with the incumbent, and says whether it stays.

It takes back a version that is clearly worse, within some fifty rounds, or slower. A version that is a tenth worse is
the trainer's to find: it decodes the same traces with both versions (trainer/release/live_review.py). The engine
reports each round (`WatchedRound`). When its target moves the record begins anew and a trial ends without a verdict: a
draft may accept less because it is worse, or because its target is another.

**Accepted proposals.** The new version accepts X proposals of a request where the incumbent would have accepted E: its
mean over verifications of the same stratum and depth. Some requests are harder than others, so a request's rate varies
by a gamma distribution of mean 1 and shape k, and X has a negative binomial distribution. That the version accepts c
times as many as the incumbent is then exp Λ_c times as likely as that it accepts as many:

    Λ_c = Σ_requests  X ln c + (X + k) ln((k + E) / (k + c E))

It is rolled back when the mean of exp Λ_c over `_WORSE` reaches 1 / `_ALPHA`. This is the sequential probability ratio
test (Wald, Annals of Mathematical Statistics 16(2), 1945) of a mixture of alternatives (Robbins, ibid. 41(5), 1970): by
this model a version as good as the incumbent is rolled back with a probability of at most `_ALPHA`, however often one
looks. Λ rises where a version accepts less than about 70% of the incumbent's proposals, and falls where it accepts
more. How much requests differ, 1 / k, is what the incumbent's did (method of moments, with a prior of k = 4 that weighs
as much as 16 requests). E is divided by 1 + 2 / √(k m) where m requests say what the incumbent accepts: two standard
errors.

**Time.** Each control round is paired with the last round before it in which the draft took part. Against the
incumbent's rounds of the same kind (`WatchedRound.kind`) the one took d times as long and the other m times, which is
the machine's part. The pair speaks against the version where d / m exceeds its gain in accept length by more than
`_SLOWER_MARGIN`. The test is Wald's again, on signs: nine such pairs in ten against one in two.
"""

from __future__ import annotations

import enum
import math
import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from itertools import islice

from serving.engine import Stratum, Verification, WatchedRound
from speculator.versions.lifecycle import Number

_ALPHA = 0.001
"""Probability with which a version as good as the incumbent may be rolled back, for each of the two tests."""
_WORSE = (0.1, 0.5)
"""c: the shares of the incumbent's accepted proposals that are tested for."""
_USUAL_VARIANCE, _USUAL_WEIGHT = 0.25, 16
"""1 / k before any request is known, and the number of requests that this prior counts for."""
_SLOWER_MARGIN = 0.10
"""Time a token that a version may lose before it counts: a busy machine slows wide rounds more than narrow ones."""
_SLOW_SHARE = 0.9
"""Share of pairs that speak against a slow version."""
_DOUBT = math.log(20)
"""Evidence against a version above which it is not kept yet."""
_FEWEST_KNOWN = 30
"""Verifications of a stratum and position from which on the incumbent is known there."""
_FEWEST_TIMED = 10
"""The same for rounds of a kind."""
_ENOUGH_FOR_A_SUCCESSOR = 500
"""Rounds after which a version makes room for a newer one that waits."""
_MOST_ROUNDS = 16_000
"""Rounds after which a trial ends in any case."""
MOVING_TARGET_PATIENCE_S = 30.0
"""How long a version waits for a known incumbent where the target moves so often that none ever is; then it is tried.
The gate has passed it, and the trainer's review follows; both judge it by the newest target."""
_KEPT_ROUNDS = 4096
_KEPT_VERIFICATIONS = 10_000
_RECENT_VERIFICATIONS = 1000
_MAX_ARRIVED = 8192
"""Rounds between two looks; older ones are dropped when the judge is that late."""


@dataclass(frozen=True, kw_only=True)
class WatchRules:
    enough_rounds: int = 2000
    """Rounds after which a version that is not found worse is kept, if `enough_compared` verifications were comparable.
    """
    enough_compared: int = 500
    min_baseline: int = 500
    """Rounds of the incumbent before which no version is tried against it."""


class TrialOutcome(enum.Enum):
    WATCHING = "watching"
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled_back"
    WITHDRAWN = "withdrawn"
    """No verdict: the version stays in service, and nothing confirms it."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    outcome: TrialOutcome
    reason: str
    numbers: dict[str, Number]


class _Record:
    """The last verifications and times of a version, whatever the size of its batches."""

    def __init__(self) -> None:
        self.verifications: deque[Verification] = deque(maxlen=_KEPT_VERIFICATIONS)
        self.times: deque[tuple[Hashable, float]] = deque(maxlen=_KEPT_ROUNDS)
        """(kind of round, logarithm of its seconds)."""
        self.num_rounds = 0

    def add(self, round_: WatchedRound) -> None:
        self.num_rounds += 1
        self.verifications += round_.verifications
        if round_.kind is not None:
            self.times.append((round_.kind, math.log(round_.seconds)))

    def extend(self, newer: _Record) -> None:
        """Add the record of a version that has proved as good."""
        self.verifications += newer.verifications
        self.times += newer.times
        self.num_rounds += newer.num_rounds


class _Incumbent:
    """What the incumbent's record says of verifications and times; frozen."""

    def __init__(self, record: _Record) -> None:
        tried: Counter[tuple[Stratum, int]] = Counter()
        accepted: Counter[tuple[Stratum, int]] = Counter()
        requests: dict[Stratum, set[str]] = defaultdict(set)
        for one in record.verifications:
            tried.update((one.stratum, position) for position in range(one.depth))
            accepted.update((one.stratum, position) for position in range(one.accepted))
            requests[one.stratum].add(one.request_id)
        self._rates = {at: accepted[at] / num for at, num in tried.items() if num >= _FEWEST_KNOWN}
        """By stratum and position: how often at least so many proposals are accepted of chains that deep."""
        self.shape = self._shape(record, {stratum: len(ids) for stratum, ids in requests.items()})
        """k, see above."""
        self.doubt = {stratum: 1 + 2 / math.sqrt(self.shape * len(ids)) for stratum, ids in requests.items()}
        """Factor by which the expectation may be too large."""
        times: dict[Hashable, list[float]] = defaultdict(list)
        for kind, log_s in record.times:
            times[kind].append(log_s)
        self._times = {kind: statistics.fmean(each) for kind, each in times.items() if len(each) >= _FEWEST_TIMED}

    def _shape(self, record: _Record, num_requests: Mapping[Stratum, int]) -> float:
        """k, from the variance of X, which is E + E² / k, over the incumbent's own requests."""
        sums: dict[tuple[str, Stratum], tuple[int, float]] = {}
        for one in record.verifications:
            if num_requests[one.stratum] > 1 and (found := self.accepted(one)) is not None:
                x, e = sums.get((one.request_id, one.stratum), (0, 0.0))
                sums[one.request_id, one.stratum] = x + found[0], e + found[1]
        # A request is part of the mean that it is compared with.
        correction = {stratum: num / (num - 1) for stratum, num in num_requests.items() if num > 1}
        squares = sum(correction[stratum] * (x - e) ** 2 - e for (_, stratum), (x, e) in sums.items())
        expected = sum(e * e for _, e in sums.values())
        variance = max(squares / expected, 0.0) if expected else 0.0
        weight = len({request_id for request_id, _ in sums}) if expected else 0
        return (weight + _USUAL_WEIGHT) / (weight * variance + _USUAL_WEIGHT * _USUAL_VARIANCE)

    def accepted(self, one: Verification) -> tuple[int, float] | None:
        """(accepted, expected) proposals, as deep as the incumbent is known; None where it is not."""
        rates = [self._rates.get((one.stratum, position)) for position in range(one.depth)]
        known = [rate for rate in rates if rate is not None]
        return (min(one.accepted, len(known)), sum(known)) if known else None

    def log_slowdown(self, round_: WatchedRound) -> float | None:
        """Log of the round's time over the incumbent's; None where either time is unknown or says nothing."""
        usual = None if round_.kind is None else self._times.get(round_.kind)
        return None if usual is None else math.log(round_.seconds) - usual


class Trial:
    """One version's trial against the last rounds of the version in service before it."""

    def __init__(self, version: int, baseline: _Record, rules: WatchRules, *, started_s: float) -> None:
        self.version, self.record = version, _Record()
        self.num_compared = 0
        """Verifications that were comparable with the incumbent's."""
        self._incumbent, self._rules, self._started_s = _Incumbent(baseline), rules, started_s
        self._requests: dict[str, tuple[int, float]] = {}
        """(X, E) by request id."""
        self._num_seen = self._num_draft_rounds = self._accepted = self._compared_accepted = 0
        self._expected_accepted = 0.0
        self._drafted: float | None = None
        """Log slowdown of the last round in which the draft took part."""
        self._slowdowns: list[float] = []
        """log d / m of each pair."""

    def add(self, round_: WatchedRound) -> None:
        self.record.add(round_)
        self._num_draft_rounds += bool(round_.verifications)
        for one in round_.verifications:
            self._compare(one)
        slowdown = self._incumbent.log_slowdown(round_)
        if slowdown is not None and round_.drafted:
            self._drafted = slowdown
        elif slowdown is not None and self._drafted is not None:
            self._slowdowns.append(self._drafted - slowdown)
            self._drafted = None

    def _compare(self, one: Verification) -> None:
        self._num_seen += 1
        self._accepted += one.accepted
        if (found := self._incumbent.accepted(one)) is None:
            return
        accepted, expected = found
        self.num_compared += 1
        self._compared_accepted += accepted
        self._expected_accepted += expected
        x, e = self._requests.get(one.request_id, (0, 0.0))
        self._requests[one.request_id] = x + accepted, e + expected / self._incumbent.doubt[one.stratum]

    def judge(self, now_s: float, *, is_successor_waiting: bool) -> Verdict:
        """The verdict of the evidence so far, which may be asked for at any time."""
        outcome, reason = self._decide(is_successor_waiting)
        return Verdict(outcome=outcome, reason=reason, numbers=self._numbers(now_s))

    def _decide(self, is_successor_waiting: bool) -> tuple[TrialOutcome, str]:
        worse, slower, rules = self._worse_evidence(), self._slower_evidence(), self._rules
        if worse >= -math.log(_ALPHA):
            return TrialOutcome.ROLLED_BACK, "accepts less than the incumbent"
        if slower >= -math.log(_ALPHA):
            return TrialOutcome.ROLLED_BACK, "slower a token than the incumbent"
        if max(worse, slower) < _DOUBT:
            if self.record.num_rounds >= rules.enough_rounds and self.num_compared >= rules.enough_compared:
                return TrialOutcome.PROMOTED, "not found worse than the incumbent"
            if is_successor_waiting and self.record.num_rounds >= _ENOUGH_FOR_A_SUCCESSOR:
                if not self.num_compared:
                    return (
                        TrialOutcome.WITHDRAWN,
                        "nothing to compare its accept length with, and a newer version waits",
                    )
                return TrialOutcome.PROMOTED, "looks no worse, and a newer version waits"
        if self.record.num_rounds >= _MOST_ROUNDS:
            told = "not confirmed to be worse" if self.num_compared else "nothing to compare its accept length with"
            return TrialOutcome.PROMOTED, told
        return TrialOutcome.WATCHING, ""

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
        allowed = math.log1p(_SLOWER_MARGIN) + math.log(max(self._length_ratio, 1.0))
        num_slow = sum(slowdown > allowed for slowdown in self._slowdowns)
        num_other = len(self._slowdowns) - num_slow
        return num_slow * math.log(2 * _SLOW_SHARE) + num_other * math.log(2 * (1 - _SLOW_SHARE))

    @property
    def _length_ratio(self) -> float:
        """Its accept length over the incumbent's on equal requests; 1 where none was compared."""
        length = self.num_compared + self._compared_accepted
        return length / (self.num_compared + self._expected_accepted) if self.num_compared else 1.0

    def _numbers(self, now_s: float) -> dict[str, Number]:
        numbers: dict[str, Number] = {
            "verifications": self._num_seen,
            "compared": self.num_compared,
            "rounds": self.record.num_rounds,
            "draft_rounds": self._num_draft_rounds,
            "seconds": round(now_s - self._started_s, 2),
        }
        if self._num_seen:
            numbers["accept_length"] = round(1 + self._accepted / self._num_seen, 4)
        if self.num_compared:
            numbers["incumbent_accept_length"] = round(1 + self._expected_accepted / self.num_compared, 4)
            numbers["accept_change"] = round(self._length_ratio - 1, 4)
        if self._slowdowns:
            slowdown = math.exp(statistics.median(self._slowdowns))
            numbers["time_change"] = round(slowdown / max(self._length_ratio, 1.0) - 1, 4)
        return numbers


class LiveWatch:
    """One engine's record of its rounds, and the trial of a version. `observe` is for the decode thread and never
    waits; everything else for one other thread.

    `version` is the one in service; `clock` gives seconds, of any origin.
    """

    def __init__(
        self, version: int, rules: WatchRules | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rules, self._clock = rules or WatchRules(), clock
        self._arrived: deque[WatchedRound] = deque(maxlen=_MAX_ARRIVED)
        self._version, self._baseline = version, _Record()
        """The version in service, or before the one on trial; and the record that versions are compared with."""
        self._trial: Trial | None = None
        self._target_version = 0
        self._moved_s: float | None = None
        """When the target moved first since the incumbent was last known well enough, or since a version came later."""

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
        record = self._baseline if self._trial is None else self._trial.record
        accepted = [one.accepted for one in islice(reversed(record.verifications), _RECENT_VERIFICATIONS)]
        return 1 + statistics.fmean(accepted) if accepted else None

    def update(self) -> bool:
        """Process the rounds that have come; returns True where they are of another target.

        The record of the version in service then begins anew, and a trial has ended without a verdict.
        """
        has_moved = False
        while self._arrived:
            round_ = self._arrived.popleft()
            if round_.target_version != self._target_version:
                self._target_version, has_moved = round_.target_version, True
                self._moved_s = self._clock() if self._moved_s is None else self._moved_s
                self._version = self._version if self._trial is None else self._trial.version
                self._trial, self._baseline = None, _Record()
            # A round of a version that is neither in service nor on trial was launched before the swap.
            if self._trial is not None and round_.version == self._trial.version:
                self._trial.add(round_)
            elif self._trial is None and round_.version == self._version:
                self._baseline.add(round_)
        return has_moved

    def restart(self, version: int) -> None:
        """Begin a new record for a version that came into service without a trial."""
        self._trial, self._version, self._baseline = None, version, _Record()
        self._wait_anew()

    def is_ready(self) -> bool:
        """Whether the incumbent is known well enough to try a version against it. An idle engine tries none."""
        if self._baseline.num_rounds >= self._rules.min_baseline:
            self._moved_s = None
            return True
        return self._moved_s is not None and self._clock() - self._moved_s >= MOVING_TARGET_PATIENCE_S

    def begin(self, version: int) -> None:
        """Begin the trial of a version that has come into service."""
        self._wait_anew()
        self._trial = Trial(version, self._baseline, self._rules, started_s=self._clock())

    def judge(self, *, is_successor_waiting: bool = False) -> Verdict:
        """What the evidence so far says about the version on trial; it stays on trial until `end`."""
        assert self._trial is not None
        return self._trial.judge(self._clock(), is_successor_waiting=is_successor_waiting)

    def end(self, *, is_kept: bool) -> None:
        """End the trial: the version on trial stays in service, or the incumbent is in service again."""
        assert self._trial is not None
        if is_kept:
            self._version = self._trial.version
            self._baseline.extend(self._trial.record)
        self._trial = None

    def _wait_anew(self) -> None:
        if self._moved_s is not None:
            self._moved_s = self._clock()

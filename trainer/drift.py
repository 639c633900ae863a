"""How much more to train: drift of a domain or of all traffic, the learning curve, and training pressure.

**Drift** is a fall of acceptance: a short average against a long one, for each domain and for all traffic. Acceptance
is the share of a new trace's tokens that the draft in training would have proposed, counted before it learns from the
trace. Proposals in service do not count: the planner may propose earlier text, or nothing. As in TIDE
(arXiv 2602.05145), the trainer trains more when the short average falls below the long one by more than a margin. Here
the margin is learnt from how much requests differ, so that it fits noisy and quiet domains:

    margin = max(z · s · √(c · (1/n_short + 1/n_long)), MIN_MARGIN)        alarm: short < long − margin

with s the deviation between requests and c = (1 + ρ)/(1 − ρ) for requests that resemble the one before them (ρ, their
lag-1 correlation). The short average is that of the last SHORT requests. The long one covers only requests that have
left the short one, with an exponential memory of LONG requests, and is frozen during an alarm. Where acceptance rises
by more than the margin, the long average restarts at the short one: otherwise a fall back to the old level would pass
unnoticed. An alarm ends when short > long − margin / 2, or after MAX_ALARM more requests.

**Training pressure** is a number from 0 to 1 that says how much more training is worth its compute:

    1 during a drift alarm, and until enough candidates were judged to say whether training still changes anything
    0 where the last WINDOW candidates were trained with the same acceptance and the same loss as the WINDOW before them
    in between by the size of the change

Training pauses once the replay was learnt from `pressure · max_passes` times. At pressure 0 a new trace still gets its
first step, together with old ones. A new trace starts the count of passes again. A repeated one allows `max_passes`
times its own tokens more.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

ALL = "all"
"""Names the series of all traffic; no domain has this name."""
DEFAULT = "default"
"""Domain of traces without a label."""
OTHER = "other"
"""Domain shared by all labels that came after `max_domains` others."""
_MAX_LENGTH = 64


class DomainNames:
    """Bounds the number of domain names: the first labels keep their own, later ones share OTHER.

    `known` maps each kept label to the tenant that brought it; the checkpoint saves it.
    """

    def __init__(self, max_domains: int, known: Mapping[str, str] | None = None) -> None:
        self._max_domains = max_domains
        self._tenants = dict(known or {})
        self._num_of = Counter(self._tenants.values())

    @property
    def known(self) -> dict[str, str]:
        return self._tenants

    def name(self, label: str, tenant: str) -> str:
        """The domain name of a label in a tenant's trace: one of at most `max_domains`, or DEFAULT or OTHER."""
        label = label[:_MAX_LENGTH]
        if label in ("", DEFAULT):
            return DEFAULT
        if label in (ALL, OTHER):
            return OTHER
        if label not in self._tenants:
            if self._num_of[tenant] >= self._max_domains - len(self._tenants):
                return OTHER
            self._tenants[label] = tenant
            self._num_of[tenant] += 1
        return label


SHORT = 128
LONG = 1000
MIN_LONG = 64
Z = 5.0
MIN_MARGIN = 0.02
"""Share of an answer's tokens: a smaller fall is not worth training."""
MAX_CORRELATION = 0.8
MAX_ALARM = 1000
MIN_TOKENS = 16
"""Completion tokens that make one sample: consecutive shorter answers of a domain are counted as one."""


class AcceptanceSeries(msgspec.Struct, kw_only=True):
    """Short and long average of one domain's acceptance; the checkpoint saves all fields."""

    recent: list[float] = msgspec.field(default_factory=list)
    """The last SHORT requests, oldest first."""
    num_passing: int = 0
    """How many of the oldest in `recent` must not go into the long average when they leave."""
    num_long: int = 0
    long: float = 0.0
    variance: float = 0.0
    covariance: float = 0.0
    """Between a request and the one before."""
    last: float | None = None
    """The request that last went into the long average."""
    num_alarmed: int = 0
    """Answers of all domains since the alarm; 0 without one."""
    num_accepted: int = 0
    num_tokens: int = 0
    """With `num_accepted`: of answers too short to be a sample alone (MIN_TOKENS)."""

    @property
    def alarm(self) -> bool:
        return self.num_alarmed > 0

    @property
    def short(self) -> float:
        return sum(self.recent) / max(len(self.recent), 1)

    @property
    def deviation(self) -> float:
        """Standard deviation between requests; 0 while it is not known."""
        return math.sqrt(self.variance) if self.num_long >= MIN_LONG else 0.0

    @property
    def margin(self) -> float:
        """Infinite until both averages rest on enough requests."""
        if self.num_long < MIN_LONG or len(self.recent) < SHORT:
            return math.inf
        correlation = self.covariance / self.variance if self.variance > 0 else 0.0
        correlation = min(max(correlation, 0.0), MAX_CORRELATION)
        inflation = (1 + correlation) / (1 - correlation)
        return max(Z * math.sqrt(self.variance * inflation * (1 / SHORT + 1 / self.num_long)), MIN_MARGIN)

    def observe(self, num_accepted: int, num_tokens: int) -> bool:
        """Take one answer; True when it raises an alarm."""
        self.num_accepted += num_accepted
        self.num_tokens += num_tokens
        if self.num_tokens < MIN_TOKENS:
            return False
        acceptance = min(self.num_accepted / self.num_tokens, 1.0)
        self.num_accepted = self.num_tokens = 0
        self.recent.append(acceptance)
        if len(self.recent) > SHORT:
            self._leave(self.recent.pop(0))
        return self._judge()

    def age(self) -> None:
        """Count an answer of any domain: so an alarm also ends when its own domain gets no traffic."""
        if self.alarm:
            self.num_alarmed += 1
            if self.num_alarmed > MAX_ALARM:
                self._reset_long_average()

    def _judge(self) -> bool:
        fall, margin = self.long - self.short, self.margin
        if self.alarm:
            if fall < margin / 2:
                self._end_alarm()
        elif fall > margin:
            self.num_alarmed = 1
            return True
        elif fall < -margin:
            self._reset_long_average()
        return False

    def _leave(self, acceptance: float) -> None:
        if self.alarm:
            return
        if self.num_passing:
            self.num_passing -= 1
            return
        self.num_long = min(self.num_long + 1, LONG)
        share = 1 / self.num_long
        distance = acceptance - self.long
        self.long += share * distance
        # Welford's update, with a memory of LONG requests.
        self.variance += share * (distance * (acceptance - self.long) - self.variance)
        if self.last is not None:
            self.covariance += share * (distance * (self.last - self.long) - self.covariance)
        self.last = acceptance

    def _end_alarm(self) -> None:
        self.num_alarmed = 0
        # The requests of the alarm are no example of the normal level.
        self.num_passing = len(self.recent)

    def _reset_long_average(self) -> None:
        """Set the long average to the short one."""
        self.long, self.num_long, self.last = self.short, len(self.recent), None
        self._end_alarm()


class DriftMonitor:
    """One series for each domain name, which `DomainNames` bounds, and one for all traffic."""

    def __init__(self, series: Mapping[str, AcceptanceSeries] | None = None) -> None:
        self.series = dict(series or {})

    @property
    def alarm(self) -> bool:
        return any(series.alarm for series in self.series.values())

    def observe(self, domain: str, num_accepted: int, num_tokens: int) -> list[str]:
        """Take one answer of a domain; returns the names of the series in which it raises an alarm."""
        for series in self.series.values():
            series.age()
        names = (domain, ALL)
        return [
            name for name in names if self.series.setdefault(name, AcceptanceSeries()).observe(num_accepted, num_tokens)
        ]

    def level(self, domain: str) -> tuple[float, float]:
        """(long average, deviation between requests) of a domain's acceptance; the deviation is 0 while unknown."""
        series = self.series.get(domain)
        return (series.long, series.deviation) if series else (0.0, 0.0)


WINDOW = 8
"""Candidates on either side of the comparison: four minutes at the default interval."""
FULL_GAIN = 0.01
"""Relative change, beyond noise, at which the pressure reaches 1."""
_NOISE = 2.0
"""Standard errors that a change must exceed."""


class LearningCurve:
    """Mean acceptance length and loss of the steps between two candidates; `points` survives a restart."""

    def __init__(self, points: Iterable[Sequence[float]] = ()) -> None:
        self._points = [tuple(point) for point in points]
        self._num_steps = 0
        self._sums = (0.0, 0.0)

    @property
    def points(self) -> list[tuple[float, ...]]:
        """(acceptance length, loss) by candidate, oldest first."""
        return self._points

    def observe(self, accept_length: float, loss: float) -> None:
        """Take one step."""
        self._num_steps += 1
        self._sums = (self._sums[0] + accept_length, self._sums[1] + loss)

    def mark(self) -> None:
        """Average the steps since the last candidate into a point of the curve; call it when a candidate is made."""
        if self._num_steps:
            point = tuple(total / self._num_steps for total in self._sums)
            self._points = [*self._points, point][-2 * WINDOW :]
        self._num_steps, self._sums = 0, (0.0, 0.0)

    @property
    def gain(self) -> float | None:
        """Relative change of acceptance or loss, whichever is larger, beyond noise; None while it is too early.

        A change for the worse counts too: the traces became harder, and there is something to learn again.
        """
        if len(self._points) < 2 * WINDOW:
            return None
        lengths, losses = ([point[column] for point in self._points] for column in (0, 1))
        return max(_excess(lengths), _excess(losses))


def training_pressure(*, alarm: bool, gain: float | None) -> float:
    """How much more training is worth, in [0, 1] (**Training pressure** above)."""
    return 1.0 if alarm or gain is None else min(gain / FULL_GAIN, 1.0)


def tokens_owed(*, pressure: float, max_passes: float, replay_tokens: int, tokens_since_news: int) -> float:
    """Tokens of old traces still to learn from; at 0 or less the trainer sleeps until a new trace comes."""
    return pressure * max_passes * replay_tokens - tokens_since_news


def _excess(values: Sequence[float]) -> float:
    older, newer = values[:WINDOW], values[WINDOW:]
    noise = _NOISE * math.sqrt((statistics.variance(older) + statistics.variance(newer)) / WINDOW)
    change = abs(statistics.fmean(newer) - statistics.fmean(older))
    return max(change - noise, 0.0) / max(abs(statistics.fmean(older)), 1e-6)

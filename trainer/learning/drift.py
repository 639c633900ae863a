"""Has the traffic moved away from the draft? Acceptance by domain: a short average against a long one.

As in TIDE (arXiv 2602.05145), training is called for when the short average falls below the long one by more than a
margin; here the margin is learnt from how much requests differ, so that it fits noisy and quiet domains:

    margin = max(z · s · √(c · (1/n_short + 1/n_long)), MIN_MARGIN)        alarm: short < long − margin

with s the deviation between requests and c = (1 + ρ)/(1 − ρ) for requests that resemble the one before them (ρ, their
lag-1 correlation). The short average is that of the last SHORT requests; the long one knows only requests that have
left the short one, forgets with a memory of LONG requests, and stands still during an alarm.

Only a fall is an alarm. Where acceptance rises by more than the margin, as after a better draft was deployed, the long
average starts over from the short one: otherwise a fall back to the old level would pass unnoticed. An alarm ends when
half of the margin is made up for, or after MAX_ALARM more requests, and then the new level is the normal one.

Besides the domains the whole traffic is watched as one: a domain that nobody has seen before has no long average, and
shows only there.

**Domain labels** come from clients and are unbounded; what is kept and exported for each of them must not be.

A tenant takes no more names than it leaves free: 32 of 64, the next one 16 of the other 32. So none can take them all
by being the first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import msgspec

ALL = "all"
"""Not a domain: the whole traffic, where it is watched beside the domains."""
DEFAULT = "default"
"""Traces without a label."""
OTHER = "other"
"""Shared by the labels that found no name free."""
_MAX_LENGTH = 64


class DomainNames:
    """The first labels seen keep their own name; `known` has them with the tenants that brought them, and survives a
    restart.
    """

    def __init__(self, max_domains: int, known: Mapping[str, str] | None = None) -> None:
        self._max_domains = max_domains
        self._tenants = dict(known or {})
        self._num_of = Counter(self._tenants.values())

    @property
    def known(self) -> dict[str, str]:
        return self._tenants

    def name(self, label: str, tenant: str) -> str:
        """The bounded name of a label in a tenant's trace; at most `max_domains` besides DEFAULT and OTHER."""
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
"""Of an answer's tokens: a fall by less is not worth a training run."""
MAX_CORRELATION = 0.8
MAX_ALARM = 1000
MIN_TOKENS = 16
"""Completion tokens that make one sample: shorter answers of a domain are taken together."""


class SeriesState(msgspec.Struct, kw_only=True):
    """One domain's acceptance, and what a restart needs of it."""

    recent: list[float] = msgspec.field(default_factory=list)
    """The last SHORT requests, oldest first."""
    num_passing: int = 0
    """So many of the oldest do not go into the long average when they leave `recent`."""
    num_long: int = 0
    long: float = 0.0
    variance: float = 0.0
    covariance: float = 0.0
    """With the request before."""
    last: float | None = None
    """The request that last went into the long average."""
    num_alarmed: int = 0
    """Answers of all domains since the alarm; 0 without one."""
    num_accepted: int = 0
    num_tokens: int = 0
    """Of answers that were too short to count alone."""


class AcceptanceSeries:
    """Short and long average of one domain, request by request."""

    def __init__(self, state: SeriesState | None = None) -> None:
        self.state = state or SeriesState()

    @property
    def alarm(self) -> bool:
        return self.state.num_alarmed > 0

    @property
    def short(self) -> float:
        return sum(self.state.recent) / max(len(self.state.recent), 1)

    @property
    def long(self) -> float:
        return self.state.long

    @property
    def deviation(self) -> float:
        """Between requests; 0 while it is not known."""
        return math.sqrt(self.state.variance) if self.state.num_long >= MIN_LONG else 0.0

    @property
    def margin(self) -> float:
        """Infinite until both averages rest on enough requests."""
        state = self.state
        if state.num_long < MIN_LONG or len(state.recent) < SHORT:
            return math.inf
        correlation = state.covariance / state.variance if state.variance > 0 else 0.0
        correlation = min(max(correlation, 0.0), MAX_CORRELATION)
        inflation = (1 + correlation) / (1 - correlation)
        return max(Z * math.sqrt(state.variance * inflation * (1 / SHORT + 1 / state.num_long)), MIN_MARGIN)

    def observe(self, num_accepted: int, num_tokens: int) -> bool:
        """Take one answer; True when it raises an alarm."""
        state = self.state
        state.num_accepted += num_accepted
        state.num_tokens += num_tokens
        if state.num_tokens < MIN_TOKENS:
            return False
        acceptance = min(state.num_accepted / state.num_tokens, 1.0)
        state.num_accepted = state.num_tokens = 0
        state.recent.append(acceptance)
        if len(state.recent) > SHORT:
            self._leave(state.recent.pop(0))
        return self._judge()

    def age(self) -> None:
        """One more answer of whatever domain: an alarm also ends when its domain's traffic has gone."""
        if self.alarm:
            self.state.num_alarmed += 1
            if self.state.num_alarmed > MAX_ALARM:
                self._start_over()

    def _judge(self) -> bool:
        state, fall, margin = self.state, self.long - self.short, self.margin
        if self.alarm:
            if fall < margin / 2:
                self._end_alarm()
        elif fall > margin:
            state.num_alarmed = 1
            return True
        elif fall < -margin:
            self._start_over()
        return False

    def _leave(self, acceptance: float) -> None:
        state = self.state
        if self.alarm:
            return
        if state.num_passing:
            state.num_passing -= 1
            return
        state.num_long = min(state.num_long + 1, LONG)
        share = 1 / state.num_long
        distance = acceptance - state.long
        state.long += share * distance
        # Welford's update, with a memory of LONG requests.
        state.variance += share * (distance * (acceptance - state.long) - state.variance)
        if state.last is not None:
            state.covariance += share * (distance * (state.last - state.long) - state.covariance)
        state.last = acceptance

    def _end_alarm(self) -> None:
        self.state.num_alarmed = 0
        # The requests of the alarm are no example of the normal level.
        self.state.num_passing = len(self.state.recent)

    def _start_over(self) -> None:
        """The level of the short average is the normal one from now on."""
        state = self.state
        state.long, state.num_long, state.last = self.short, len(state.recent), None
        self._end_alarm()


class DriftMonitor:
    """One series for each domain name (which must be bounded, see trainer/learning/drift.py), and one for all
    traffic."""

    def __init__(self, states: Mapping[str, SeriesState] | None = None) -> None:
        self.series = {name: AcceptanceSeries(state) for name, state in (states or {}).items()}

    @property
    def states(self) -> dict[str, SeriesState]:
        return {name: series.state for name, series in self.series.items()}

    @property
    def alarm(self) -> bool:
        return any(series.alarm for series in self.series.values())

    def observe(self, domain: str, num_accepted: int, num_tokens: int) -> list[str]:
        """Take one answer of a domain; returns the names of the series on which it raises an alarm."""
        for series in self.series.values():
            series.age()
        names = (domain, ALL)
        return [
            name for name in names if self.series.setdefault(name, AcceptanceSeries()).observe(num_accepted, num_tokens)
        ]

    def level(self, domain: str) -> tuple[float, float]:
        """(mean, deviation between requests) of a domain's acceptance as it was; the deviation is 0 while unknown."""
        series = self.series.get(domain)
        return (series.long, series.deviation) if series else (0.0, 0.0)

"""Current figures out of the registry that /metrics shows, and how they changed over the last minutes.

A figure that no collector has is None, which is not zero: behind SGLang some exist only there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.samples import Sample

from speculator.host import now_ms

ACCEPT_WINDOW_S = 30
"""An acceptance length is that of the verifications in so many seconds."""
RATE_WINDOW_S = 10
POSITIONS_WINDOW_S = 120

By = Mapping[tuple[str, ...], float]


class Collected:
    """All samples of one look at a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._samples: dict[str, list[Sample]] = {}
        self._families: set[str] = set()
        for family in registry.collect():
            self._families.add(family.name)
            for sample in family.samples:
                self._samples.setdefault(sample.name, []).append(sample)

    def total(self, name: str, **labels: str) -> float | None:
        """The sum of the samples that carry `labels`; None where there is none."""
        values = [
            sample.value for sample in self._samples.get(name, ()) if labels.items() <= (sample.labels or {}).items()
        ]
        return sum(values) if values else None

    def counts(self, family: str, *labels: str) -> By | None:
        """A counter's values by those labels, none of which may have been counted yet; None where nobody counts."""
        if family not in self._families:
            return None
        return {
            tuple(sample.labels[label] for label in labels): sample.value
            for sample in self._samples.get(f"{family}_total", ())
        }

    def label(self, name: str, label: str) -> str | None:
        """That label of the first sample."""
        return next((sample.labels.get(label) for sample in self._samples.get(name, ())), None)


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """The measured speedup."""

    ratio: float | None
    lower: float | None
    upper: float | None
    """Ends of the 95% interval."""
    baseline: str | None
    """What it is measured against."""


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Since the engine started."""

    swaps: float | None
    failed_swaps: float | None
    rollbacks: float | None
    captured: float | None
    dropped: float | None
    aborted: float | None


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """Verifications with proposals of one source that were so many proposals deep, 1 is the first."""

    source: str
    position: int
    proposed: int
    accepted: int


class Point(msgspec.Struct, frozen=True, array_like=True):
    """One moment of the history; encoded as an array, in this order."""

    at_ms: int
    ratio: float | None
    lower: float | None
    upper: float | None
    accept_length: float | None
    tokens_per_s: float | None
    draft_version: int


class _Counts(msgspec.Struct, frozen=True, kw_only=True):
    at_s: float
    tokens: float | None
    verifications: float | None
    verified_tokens: float | None
    proposals: By | None
    accepted: By | None


class Figures:
    """The last look at `registry`, and a bounded history of looks; used on the event loop alone."""

    def __init__(self, registry: CollectorRegistry, *, max_points: int) -> None:
        self._registry = registry
        self.points: deque[Point] = deque(maxlen=max_points)
        self._counts: deque[_Counts] = deque()
        self._last: Collected | None = None

    def look(self, draft_version: int) -> None:
        """Read every collector and add a point."""
        self._last = found = Collected(self._registry)
        self._counts.append(_counts(found))
        while self._counts[0].at_s < self._counts[-1].at_s - POSITIONS_WINDOW_S:
            self._counts.popleft()
        speed = self.speed()
        self.points.append(
            Point(
                now_ms(),
                speed.ratio,
                speed.lower,
                speed.upper,
                self._accept_length(),
                self._tokens_per_s(),
                draft_version,
            )
        )

    def clear(self) -> None:
        self.points.clear()
        self._counts.clear()

    def speed(self) -> Speed:
        name = "slipstream_speedup_measured_ratio"
        return Speed(
            ratio=self._found.total(name),
            lower=self._found.total(f"{name}_lower"),
            upper=self._found.total(f"{name}_upper"),
            baseline=self._found.label(name, "baseline"),
        )

    def totals(self) -> Totals:
        total = self._found.total
        return Totals(
            swaps=total("slipstream_swaps_total", outcome="installed"),
            failed_swaps=total("slipstream_swaps_total", outcome="failed"),
            rollbacks=total("slipstream_draft_verdicts_total", outcome="rolled_back"),
            captured=total("slipstream_traces_captured_total"),
            dropped=total("slipstream_traces_dropped_total"),
            aborted=total("slipstream_requests_aborted_total"),
        )

    def positions(self) -> list[Position] | None:
        """The proposals of the last two minutes; None where the engine does not count them by place."""
        first, last = self._counts[0], self._counts[-1]
        if last.proposals is None:
            return None
        accepted = _since(first.accepted, last.accepted or {})
        rows = [
            Position(
                source=source,
                position=int(place),
                proposed=int(count),
                accepted=int(accepted.get((source, place), 0)),
            )
            for (source, place), count in _since(first.proposals, last.proposals).items()
            if count > 0
        ]
        return sorted(rows, key=lambda row: (row.position, row.source))

    @property
    def _found(self) -> Collected:
        assert self._last is not None, "look() first"
        return self._last

    def _accept_length(self) -> float | None:
        first, last = self._window(ACCEPT_WINDOW_S)
        verifications = _difference(first.verifications, last.verifications)
        tokens = _difference(first.verified_tokens, last.verified_tokens)
        return tokens / verifications if tokens and verifications else None

    def _tokens_per_s(self) -> float | None:
        first, last = self._window(RATE_WINDOW_S)
        tokens = _difference(first.tokens, last.tokens)
        seconds = last.at_s - first.at_s
        return tokens / seconds if tokens is not None and seconds > 0 else None

    def _window(self, seconds: float) -> tuple[_Counts, _Counts]:
        last = self._counts[-1]
        return next(each for each in self._counts if each.at_s >= last.at_s - seconds), last


def _counts(found: Collected) -> _Counts:
    tokens = found.counts("slipstream_round_tokens", "mode", "batch")
    return _Counts(
        at_s=time.monotonic(),
        tokens=None if tokens is None else sum(tokens.values()),
        verifications=found.total("slipstream_verifications_total"),
        verified_tokens=found.total("slipstream_verified_tokens_total"),
        proposals=found.counts("slipstream_proposals", "source", "position"),
        accepted=found.counts("slipstream_accepted", "source", "position"),
    )


def _difference(first: float | None, last: float | None) -> float | None:
    """None also where a counter began anew in between."""
    return None if first is None or last is None or last < first else last - first


def _since(first: By | None, last: By) -> By:
    before = first or {}
    return {key: value - before.get(key, 0) for key, value in last.items()}

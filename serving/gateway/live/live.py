"""Figures of the live page at `/`, as JSON, and its routes.

The page polls once a second. Server-sent events would count as running answers, and each open page would delay the
gateway's shutdown for the whole grace period. A polling page also finds a restarted gateway by itself.

The figures come from the registry behind /metrics; the gateway reads it once a second, however many pages poll. In
front of SGLang those of the engines come from a collector of the page's own: of several gateways only one exports them.
A figure that no collector has is None, not zero: SGLang lacks some.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from statistics import fmean
from typing import Any, NamedTuple

import structlog
from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from serving.engine import ServedEngine
from serving.gateway.admin import Drafts
from serving.gateway.errors import reply
from serving.gateway.live.drafts import PublicDrafts
from speculator.host import now_ms

SAMPLE_S = 1.0
RANGES = {"minutes": (1, 300), "hour": (10, 360), "day": (240, 360)}
"""Ranges of the history: (seconds a point, number of points). A point takes 400 bytes, all together 0.5 MB."""
ACCEPT_WINDOW_S = 30
"""The accept length is averaged over the verifications of so many seconds."""
RATE_WINDOW_S = 10
FIRST_TOKEN_WINDOW_S = 60
POSITIONS_WINDOW_S = 120
_TOTALS = {
    "swaps": ("slipstream_swaps_total", {"outcome": "installed"}),
    "failed_swaps": ("slipstream_swaps_total", {"outcome": "failed"}),
    "rollbacks": ("slipstream_draft_verdicts_total", {"outcome": "rolled_back"}),
    "captured": ("slipstream_traces_captured_total", {}),
    "dropped": ("slipstream_traces_dropped_total", {}),
    "aborted": ("slipstream_requests_aborted_total", {}),
}
log = structlog.get_logger(__name__)

By = Mapping[tuple[str, ...], float]
"""A counter's values by labels."""
ReadTrainerStatus = Callable[[], Mapping[str, bool | int | None]]
"""Status of a supervised trainer: `running`, `num_ended`, and of its last end `exit_code`, `ended_ms`, `again_ms`."""


def live_routes(live: Live, drafts: Drafts | None) -> APIRouter:
    router = APIRouter(prefix="/slipstream")
    board = None if drafts is None else PublicDrafts(drafts)

    @router.get("/live")
    async def show_live(request: Request) -> Response:
        """Speedup, acceptance, traffic, and their history after `?since=<ms>`; what the engine lacks is null.

        `history` has arrays: at_ms, measured speedup, the ends of its 95% interval, tokens a verification, tokens a
        second, draft version, speedup end to end, median and 95th percentile of the seconds to a first token. So has
        `newest`. `?range=` is `minutes`, a point a second, or of means, `hour` or `day`. `started_ms` changes when the
        gateway is started again.
        """
        since, spans = request.query_params.get("since", ""), request.query_params.get("range", "")
        since_ms = int(since) if since.isascii() and since.isdigit() and len(since) < 16 else 0
        return reply(live.document(since_ms, spans if spans in RANGES else "minutes"))

    @router.get("/drafts")
    async def show_drafts() -> Response:
        """Draft versions with state and gate figures, newest first, and the last events. /admin changes them.

        `available` is false where this gateway was started without a draft store.
        """
        if board is None:
            return reply({"available": False, "versions": [], "events": []})
        return reply(await board.document())

    return router


class Point(NamedTuple):
    """One moment of the history; encoded as an array, in this order."""

    at_ms: int
    speedup: float | None
    lower: float | None
    upper: float | None
    accept_length: float | None
    tokens_per_s: float | None
    draft_version: int
    end_to_end: float | None
    first_token_median_s: float | None
    first_token_p95_s: float | None


class History:
    """A ring of points, each the mean over `step_s` seconds, with the newest draft version."""

    def __init__(self, step_s: int, num_points: int) -> None:
        self._step_ms = 1000 * step_s
        self.points: deque[Point] = deque(maxlen=num_points)
        self._open: list[Point] = []
        """Points of the current step."""

    def add(self, point: Point) -> None:
        if self._step_ms == 1000 * SAMPLE_S:
            self.points.append(point)
            return
        if self._open and point.at_ms // self._step_ms != self._open[0].at_ms // self._step_ms:
            self.points.append(_mean(self._open))
            self._open.clear()
        self._open.append(point)


def _mean(points: Sequence[Point]) -> Point:
    newest = points[-1]
    found = {name: [value for each in points if (value := getattr(each, name)) is not None] for name in Point._fields}
    means = {name: fmean(values) if values else None for name, values in found.items()}
    return Point(**{**means, "at_ms": newest.at_ms, "draft_version": newest.draft_version})  # type: ignore[arg-type]


class Live:
    """Reads the figures of one gateway once a second while `lifespan` is open. For the event loop."""

    def __init__(
        self,
        host: ServedEngine,
        registry: CollectorRegistry,
        *,
        shows_tokens: bool,
        engine_figures: Collector | None = None,
        trainer_status: ReadTrainerStatus | None = None,
        clock: Callable[[], float] = time.monotonic,
        clock_ms: Callable[[], int] = now_ms,
    ) -> None:
        """`shows_tokens`: answers can say which source proposed each token, and requests may turn drafts off.
        `engine_figures` are read in place of metrics of the same name in `registry`.
        `trainer_status` is None where this process supervises no trainer. `clock_ms` gives the time of the points.
        """
        self._host, self._registry, self._shows_tokens, self._clock = host, registry, shows_tokens, clock
        self._engine_figures = engine_figures
        self._trainer_status, self._clock_ms = trainer_status, clock_ms
        self._begin()

    def _begin(self) -> None:
        self._history = {name: History(*size) for name, size in RANGES.items()}
        self._counts: deque[_Counts] = deque()
        self._figures: dict[str, Any] = {}
        self._newest: Point | None = None
        self._started_ms = self._clock_ms()

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        self._begin()
        reading = asyncio.create_task(self._read_on())
        try:
            yield
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def document(self, since_ms: int = 0, spans: str = "minutes") -> dict[str, Any]:
        """The current figures, and the history after `since_ms`; `spans` is one of RANGES."""
        if self._newest is None:
            self.sample()
        state, info = self._host.health(), self._host.info
        return {
            "started_ms": self._started_ms,
            "now_ms": self._clock_ms(),
            "model": info.model,
            "context_length": info.context_length,
            "shows_tokens": self._shows_tokens,
            "health": {
                "alive": state.alive,
                "ready": state.ready,
                "running": state.num_running,
                "waiting": state.num_waiting,
            },
            "draft_version": self._host.draft_version,
            "trainer": self._trainer_status and self._trainer_status(),
            **self._figures,
            "newest": self._newest,
            "history": [point for point in self._history[spans].points if point.at_ms > since_ms],
        }

    def sample(self) -> None:
        """Read every collector, and add a point to the history."""
        found = _Reading(self._registry, self._engine_figures)
        self._counts.append(_Counts.of(found, self._clock()))
        while self._counts[0].at_s < self._counts[-1].at_s - POSITIONS_WINDOW_S:
            self._counts.popleft()
        measured = found.speedup("slipstream_speedup_measured_ratio")
        end_to_end = found.speedup("slipstream_speedup_end_to_end_ratio")
        self._figures = {
            "speedup": measured,
            "end_to_end": end_to_end,
            "totals": {shown: found.total(name, **labels) for shown, (name, labels) in _TOTALS.items()},
            "positions": self._positions(),
            "sources": self._sources(),
            "head_added": found.speedup("slipstream_speedup_head_ratio"),
        }
        bounds = (measured["ratio"], measured["lower"], measured["upper"])
        rates = (self._accept_length(), self._tokens_per_s(), self._host.draft_version)
        self._newest = Point(self._clock_ms(), *bounds, *rates, end_to_end["ratio"], *self._first_token_s((0.5, 0.95)))
        for history in self._history.values():
            history.add(self._newest)

    async def _read_on(self) -> None:
        while True:
            try:
                self.sample()
            except Exception:
                # The page sees by the points' times that they are old; the next reading may succeed.
                log.exception("live figures not read")
            await asyncio.sleep(SAMPLE_S)

    def _positions(self) -> list[dict[str, Any]] | None:
        """Proposals, and accepted ones, of the last two minutes by source and position (1, 2, …).

        None where the engine does not count them by position.
        """
        first, last = self._window(POSITIONS_WINDOW_S, lambda counts: counts.proposals)
        if last.proposals is None:
            return None
        accepted = _since(first.accepted, last.accepted or {})
        rows = [
            {
                "source": source,
                "position": int(position),
                "proposed": int(count),
                "accepted": int(accepted.get((source, position), 0)),
            }
            for (source, position), count in _since(first.proposals, last.proposals).items()
            if count > 0
        ]
        return sorted(rows, key=lambda row: (row["position"], row["source"]))

    def _sources(self) -> dict[str, int] | None:
        """Accepted proposals of the last two minutes by source: the head, or suffix text by its owner.

        Key `suffix` where the engine does not report the owner; None where it does not count proposals.
        """
        first, last = self._window(POSITIONS_WINDOW_S, lambda counts: counts.accepted)
        if last.accepted is None:
            return None
        found: Counter[str] = Counter()
        for (source, _), count in _since(first.accepted, last.accepted).items():
            found[source] += int(max(count, 0))
        if last.texts:
            del found["suffix"]
            found.update({text: int(count) for (text,), count in _since(first.texts, last.texts).items() if count > 0})
        return dict(found)

    def _accept_length(self) -> float | None:
        first, last = self._window(ACCEPT_WINDOW_S, lambda counts: counts.verifications)
        verifications = _difference(first.verifications, last.verifications)
        tokens = _difference(first.verified_tokens, last.verified_tokens)
        return tokens / verifications if tokens and verifications else None

    def _tokens_per_s(self) -> float | None:
        first, last = self._window(RATE_WINDOW_S, lambda counts: counts.tokens)
        tokens = _difference(first.tokens, last.tokens)
        seconds = last.at_s - first.at_s
        return tokens / seconds if tokens is not None and seconds > 0 else None

    def _first_token_s(self, shares: Sequence[float]) -> list[float | None]:
        """Quantiles of the time to first token in the last minute, interpolated within the histogram's buckets."""
        first, last = self._window(FIRST_TOKEN_WINDOW_S, lambda _: 0.0)
        below = _since(first.first_tokens, last.first_tokens)
        buckets = sorted((float(bound), count) for (bound,), count in below.items())
        return [_quantile(buckets, share) for share in shares]

    def _window(self, seconds: float, count: Callable[[_Counts], object]) -> tuple[_Counts, _Counts]:
        """The first and last counts within the last `seconds` for which `count` is known: an engine may report late."""
        last = self._counts[-1]
        since = [each for each in self._counts if each.at_s >= last.at_s - seconds]
        return next((each for each in since if count(each) is not None), last), last


class _Reading:
    """All samples of a registry at one moment, and those of `first` in place of any of the same name."""

    def __init__(self, registry: CollectorRegistry, first: Collector | None) -> None:
        families = [] if first is None else list(first.collect())
        names = {family.name for family in families}
        families += [family for family in registry.collect() if family.name not in names]
        self._families = {family.name for family in families}
        self._samples: defaultdict[str, list[Sample]] = defaultdict(list)
        for family in families:
            for sample in family.samples:
                self._samples[sample.name].append(sample)

    def total(self, name: str, **labels: str) -> float | None:
        """The sum of the samples that carry `labels`; None where there is none."""
        values = [sample.value for sample in self._samples[name] if labels.items() <= sample.labels.items()]
        return sum(values) if values else None

    def counts(self, family: str, *labels: str) -> By | None:
        """A counter's values by those labels, possibly none yet; None where there is no such counter."""
        if family not in self._families:
            return None
        samples = self._samples[f"{family}_total"]
        return {tuple(sample.labels[label] for label in labels): sample.value for sample in samples}

    def buckets(self, histogram: str) -> By:
        """A histogram's cumulative counts by their bounds, all labels together."""
        below: Counter[tuple[str, ...]] = Counter()
        for sample in self._samples[f"{histogram}_bucket"]:
            below[(sample.labels["le"],)] += int(sample.value)
        return below

    def speedup(self, name: str) -> dict[str, Any]:
        """A speedup with its 95% interval and the name of its baseline."""
        baseline = next((sample.labels.get("baseline") for sample in self._samples[name]), None)
        bounds = {"ratio": self.total(name), **{end: self.total(f"{name}_{end}") for end in ("lower", "upper")}}
        return {**bounds, "baseline": baseline}


class _Counts(NamedTuple):
    """The engine's counters at one moment."""

    at_s: float
    tokens: float | None
    verifications: float | None
    verified_tokens: float | None
    proposals: By | None
    accepted: By | None
    texts: By | None
    first_tokens: By
    """Answers by time to first token: cumulative counts by bound in seconds."""

    @classmethod
    def of(cls, found: _Reading, at_s: float) -> _Counts:
        tokens = found.counts("slipstream_round_tokens", "mode", "batch")
        return cls(
            at_s=at_s,
            tokens=None if tokens is None else sum(tokens.values()),
            verifications=found.total("slipstream_verifications_total"),
            verified_tokens=found.total("slipstream_verified_tokens_total"),
            proposals=found.counts("slipstream_proposals", "source", "position"),
            accepted=found.counts("slipstream_accepted", "source", "position"),
            texts=found.counts("slipstream_accepted_text", "text"),
            first_tokens=found.buckets("slipstream_gateway_time_to_first_token_seconds"),
        )


def _difference(first: float | None, last: float | None) -> float | None:
    """`last` − `first`; None also where the counter was reset in between."""
    return None if first is None or last is None or last < first else last - first


def _since(first: By | None, last: By) -> By:
    before = first or {}
    return {key: value - before.get(key, 0) for key, value in last.items()}


def _quantile(buckets: Sequence[tuple[float, float]], share: float) -> float | None:
    """A quantile of cumulative `buckets` (bound, count); None if they are empty. At most the last finite bound."""
    below_s = below = 0.0
    for bound_s, count in buckets:
        if count and count >= share * buckets[-1][1]:
            inside = (share * buckets[-1][1] - below) / (count - below)
            return below_s if math.isinf(bound_s) else below_s + (bound_s - below_s) * inside
        below_s, below = bound_s, count
    return None

"""The figures, draft versions and events that the page at `/` shows, as JSON.

The page asks once a second. An open stream of events would be an answer in flight, and each open page would hold up
the gateway's shutdown for the whole grace period. A page that asks also finds a restarted gateway by itself.

The figures come out of the registry that /metrics shows; the gateway reads it once a second, however many pages ask. A
figure that no collector has is None, which is not zero: some do not exist behind SGLang.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import structlog
from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client import CollectorRegistry
from prometheus_client.samples import Sample
from starlette.concurrency import run_in_threadpool

from serving.engine import DraftHost
from serving.gateway.admin import Drafts
from serving.gateway.errors import reply, unavailable
from speculator.errors import SlipstreamError
from speculator.host import now_ms

SAMPLE_S = 1.0
HISTORY_POINTS = 300
"""Five minutes."""
log = structlog.get_logger(__name__)


class Live:
    """Reads the figures of one gateway; `lifespan` keeps it reading while the app is served."""

    def __init__(self, host: DraftHost, registry: CollectorRegistry, *, shows_tokens: bool) -> None:
        """`shows_tokens`: answers can say which of their tokens were proposed by whom."""
        self._host, self._shows_tokens = host, shows_tokens
        self._figures = Figures(registry, max_points=HISTORY_POINTS)
        self._started_ms = now_ms()

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        self._figures.clear()
        self._started_ms = now_ms()
        reading = asyncio.create_task(self._read_on())
        try:
            yield
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def document(self, since_ms: int) -> dict[str, Any]:
        """Everything of this moment, and the history after `since_ms`."""
        figures, state, info = self._figures, self._host.health(), self._host.info
        if not figures.points:
            figures.look(self._host.draft_version)
        return {
            "started_ms": self._started_ms,
            "now_ms": now_ms(),
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
            "speedup": figures.speed(),
            "totals": figures.totals(),
            "positions": figures.positions(),
            "history": [point for point in figures.points if point.at_ms > since_ms],
        }

    async def _read_on(self) -> None:
        while True:
            try:
                self._figures.look(self._host.draft_version)
            except Exception:
                # The points' times tell the page that they are old; the next look may succeed.
                log.exception("live_figures_not_read")
            await asyncio.sleep(SAMPLE_S)


def live_routes(live: Live, drafts: Drafts | None) -> APIRouter:
    router = APIRouter(prefix="/slipstream")
    board = None if drafts is None else Board(drafts)

    @router.get("/live")
    async def show_live(request: Request) -> Response:
        """Speedup, acceptance, traffic, and their history after `?since=<ms>`; what the engine lacks is null.

        `history` has arrays: at_ms, measured speedup, the ends of its 95% interval, tokens a verification, tokens a
        second, draft version. `started_ms` changes when the gateway is started again.
        """
        since = request.query_params.get("since", "")
        return reply(live.document(int(since) if since.isascii() and since.isdigit() and len(since) < 16 else 0))

    @router.get("/drafts")
    async def show_drafts() -> Response:
        """Draft versions with state and gate figures, newest first, and the last events; acting on them is /admin's.

        `available` is false where this gateway was started without a draft store.
        """
        if board is None:
            return reply({"available": False, "versions": [], "events": []})
        return reply(await board.document())

    return router


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


FRESH_S = 1.0
"""The store is read at most this often, however many ask."""
NUM_VERSIONS = 50
NUM_EVENTS = 50
_EVENTS_READ = 4 * NUM_EVENTS
_STEPS = {"written", "validated", "scored", "asked"}
"""Of a version on its way to the gate, and of an operator's change: the decision, and the change, are events too."""
_PLACE = re.compile(r"[^\s,;()'\"]*(?:/|:\d)[^\s,;()'\"]*[^\s,;:.()'\"]|[^\s,;()'\"]*:\d+")
"""Whatever has a slash, or a colon and a number: paths, URLs, host and port."""
_CHANGE = ("change", "lower", "upper")
_WATCHED_CHANGE = ("accept_change", "lower", "upper")
"""The breaker gives no bounds."""
_GATE = ("num_traces", "candidate_length", "incumbent_length", *_CHANGE)


class Board:
    def __init__(self, drafts: Drafts, clock: Callable[[], float] = time.monotonic) -> None:
        self._drafts, self._clock = drafts, clock
        self._reading: asyncio.Future[dict[str, Any]] | None = None
        self._read_s = 0.0

    async def document(self) -> dict[str, Any]:
        """At most a second old, or as old as the reading that is under way.

        Raises ApiError (503) where the store cannot be read.
        """
        now_s = self._clock()
        if self._reading is None or (self._reading.done() and now_s - self._read_s >= FRESH_S):
            self._reading, self._read_s = asyncio.ensure_future(run_in_threadpool(self._read)), now_s
        # Whoever asked first may leave: the others still wait for it.
        return await asyncio.shield(self._reading)

    def _read(self) -> dict[str, Any]:
        try:
            overview = msgspec.to_builtins(self._drafts.overview())
            events = msgspec.to_builtins(self._drafts.events(_EVENTS_READ))
        except SlipstreamError:
            raise unavailable("The draft store cannot be read now.", code="drafts_unavailable") from None
        rows = overview["drafts"][-NUM_VERSIONS:]
        told = [event for event in events if event["kind"] not in _STEPS][-NUM_EVENTS:]
        return {
            "available": True,
            "knows_engines": not overview["no_redis"],
            "pinned": overview["pinned"],
            "num_versions": len(overview["drafts"]),
            "versions": [_version(row, overview) for row in reversed(rows)],
            "events": [_event(event) for event in reversed(told)],
        }


def _version(row: Mapping[str, Any], overview: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{name: row[name] for name in ("version", "state", "parent", "created_ms", "is_last_good", "is_pinned")},
        "is_desired": row["version"] == (overview["pinned"] or overview["published"]),
        "is_damaged": bool(row["damage"]),
        "num_engines": len(row["engines"]),
        "has_canary": _has_canary(row["version"], overview["engines"]),
        "gate": _gate(row["gate"]),
    }


def _has_canary(version: int, engines: Sequence[Mapping[str, Any]]) -> bool:
    """Whether one of several engines tries it while the others wait."""
    return len(engines) > 1 and any(row["version"] == version and row["role"] == "canary" for row in engines)


def _gate(gate: object) -> dict[str, Any] | None:
    """What the gate found on held-out traces; None for a version that it never judged."""
    if not isinstance(gate, dict) or not isinstance(gate.get("fresh"), dict):
        return None
    fresh = gate["fresh"]
    return {"outcome": gate.get("outcome"), **{name: _number(fresh.get(name)) for name in _GATE}}


def _event(event: Mapping[str, Any]) -> dict[str, Any]:
    fields: Mapping[str, Any] = event["fields"]
    numbers = {**fields, **(fields.get("numbers") or {})}
    # The engine's watch and the trainer's gate name the same figure each in its way.
    names = _WATCHED_CHANGE if "accept_change" in numbers else _CHANGE
    reason, is_operators = fields.get("reason"), event["actor"].startswith("operator")
    return {
        "at_ms": event["at_ms"],
        "kind": event["kind"],
        "by": event["actor"].partition(":")[0],
        "version": _number(fields.get("version")),
        "outcome": fields.get("outcome") if isinstance(fields.get("outcome"), str) else None,
        "reason": _PLACE.sub("…", reason) if isinstance(reason, str) and not is_operators else "",
        **{shown: _number(numbers.get(name)) for shown, name in zip(_CHANGE, names, strict=True)},
    }


def _number(value: object) -> float | int | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None

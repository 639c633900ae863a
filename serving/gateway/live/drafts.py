"""Draft versions and events of the live page, as every viewer may see them."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool

from serving.gateway.admin import Drafts
from serving.gateway.errors import unavailable
from speculator.errors import SlipstreamError

FRESH_S = 1.0
"""The store is read at most once in so many seconds, however many pages poll."""
NUM_VERSIONS = 50
NUM_EVENTS = 50
_EVENTS_READ = 4 * NUM_EVENTS
_HIDDEN_EVENTS = {"written", "validated", "scored", "asked"}
"""Hidden events: steps before the gate, and requests by operators; their outcomes are events of their own."""
_ADDRESS = re.compile(r"[^\s,;()'\"]*(?:/|:\d)[^\s,;()'\"]*[^\s,;:.()'\"]|[^\s,;()'\"]*:\d+")
"""Whatever has a slash, or a colon and a number: paths, URLs, host and port."""
_CHANGE = ("change", "lower", "upper")
_WATCHED_CHANGE = ("accept_change", "lower", "upper")
"""Names of the figures in events of the engine's breaker, which gives no bounds."""
_GATE = ("num_traces", "candidate_length", "incumbent_length", *_CHANGE)


class PublicDrafts:
    """Draft versions and events for every viewer: numbers, states, and reasons of gate, breaker and trainer.

    Left out: operators' names and typed reasons, names of engines and machines, paths of this server, addresses of
    Redis.
    """

    def __init__(self, drafts: Drafts, clock: Callable[[], float] = time.monotonic) -> None:
        self._drafts, self._clock = drafts, clock
        self._reading: asyncio.Future[dict[str, Any]] | None = None
        self._read_s = 0.0

    async def document(self) -> dict[str, Any]:
        """The versions and events, at most FRESH_S old, or from the reading that is under way.

        Raises ApiError (503) where the store cannot be read.
        """
        now_s = self._clock()
        if self._reading is None or (self._reading.done() and now_s - self._read_s >= FRESH_S):
            self._reading, self._read_s = asyncio.ensure_future(run_in_threadpool(self._read)), now_s
        # Shielded: the request that began the reading may be cancelled while others wait for it.
        return await asyncio.shield(self._reading)

    def _read(self) -> dict[str, Any]:
        try:
            overview = msgspec.to_builtins(self._drafts.overview())
            events = msgspec.to_builtins(self._drafts.events(_EVENTS_READ))
        except SlipstreamError:
            raise unavailable("The draft store cannot be read now.", code="drafts_unavailable") from None
        rows = overview["drafts"][-NUM_VERSIONS:]
        told = [event for event in events if event["kind"] not in _HIDDEN_EVENTS][-NUM_EVENTS:]
        return {
            "available": True,
            "knows_engines": not overview["no_redis"],
            "pinned": overview["pinned"],
            "trainer_rests": overview["trainer_rests"],
            "num_versions": len(overview["drafts"]),
            "versions": [_version(row, overview) for row in reversed(rows)],
            "events": [_event(event) for event in reversed(told)],
        }


def _version(row: Mapping[str, Any], overview: Mapping[str, Any]) -> dict[str, Any]:
    engines = [(engine["version"], engine["role"]) for engine in overview["engines"]]
    return {
        **{name: row[name] for name in ("version", "state", "parent", "created_ms", "is_last_good", "is_pinned")},
        "is_desired": row["version"] == (overview["pinned"] or overview["published"]),
        "is_damaged": bool(row["damage"]),
        "num_engines": len(row["engines"]),
        # One of several engines tries the version while the others wait.
        "has_canary": len(engines) > 1 and (row["version"], "canary") in engines,
        "gate": _gate(row["gate"]),
    }


def _gate(gate: object) -> dict[str, Any] | None:
    """The gate's figures on held-out traces; None for a version that it never judged."""
    if not isinstance(gate, dict) or not isinstance(gate.get("fresh"), dict):
        return None
    fresh = gate["fresh"]
    return {"outcome": gate.get("outcome"), **{name: _number(fresh.get(name)) for name in _GATE}}


def _event(event: Mapping[str, Any]) -> dict[str, Any]:
    fields: Mapping[str, Any] = event["fields"]
    numbers = {**fields, **(fields.get("numbers") or {})}
    # The engine's breaker and the trainer's gate have different names for the same figure.
    names = _WATCHED_CHANGE if "accept_change" in numbers else _CHANGE
    reason, is_operators = fields.get("reason"), event["actor"].startswith("operator")
    return {
        "at_ms": event["at_ms"],
        "kind": event["kind"],
        "by": event["actor"].partition(":")[0],
        "version": _number(fields.get("version")),
        "outcome": fields.get("outcome") if isinstance(fields.get("outcome"), str) else None,
        "reason": _ADDRESS.sub("…", reason) if isinstance(reason, str) and not is_operators else "",
        **{shown: _number(numbers.get(name)) for shown, name in zip(_CHANGE, names, strict=True)},
    }


def _number(value: object) -> float | int | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None

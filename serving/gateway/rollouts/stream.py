"""The samples of a rollout as a stream: lines of JSON, or server-sent events for a client that asks for those.

The first object says what the rollout is, each further one is a sample that has ended, and the last one says how it
stands and from which number a further stream would go on: the number of samples, where all have come. A stream without
a last object has broken off, and one that ends with an error may go on later: where no engine runs, for instance.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import msgspec
from starlette.requests import Request

from serving.gateway.errors import unavailable
from serving.gateway.openai.sse import DONE, EVENTS, LINES, Emit, EventStream
from serving.gateway.rollouts.book import RolloutBook
from serving.gateway.rollouts.rollout import Rollout
from serving.gateway.telemetry import exchange_of

_BLOCK = 64
"""Samples sent at once."""
SILENCE_S = 10.0
"""Without a sample, an empty line or event shows both sides whether the other one is still there."""


def streamed(request: Request, book: RolloutBook, rollout: Rollout, *, after: int, limit_s: float) -> EventStream:
    """The samples from number `after` on, those to come included, for `limit_s` at most."""
    wants_events = EVENTS.media_type in request.headers.get("accept", "")
    framing = EVENTS if wants_events else LINES

    async def produce(emit: Emit) -> bytes:
        number = after
        with book.reading(rollout), suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await emit(framing.frame(described(book, rollout)))
                while number < len(rollout.lines) or rollout.ended_s is None:
                    if number == len(rollout.lines):
                        if book.has_no_engine:
                            raise unavailable("No engine runs: ask for the other samples later.")
                        with suppress(TimeoutError):
                            await asyncio.wait_for(rollout.changed.wait(), SILENCE_S)
                    lines = rollout.lines[number : number + _BLOCK]
                    await emit(b"".join(framing.frame(msgspec.Raw(line)) for line in lines) or framing.silence)
                    number += len(lines)
        return framing.frame({**described(book, rollout), "object": "rollout.end", "next": number}) + (
            DONE if wants_events else b""
        )

    return EventStream(exchange_of(request), produce, framing)


def described(book: RolloutBook, rollout: Rollout) -> dict[str, Any]:
    """How it stands."""
    return {
        "object": "rollout",
        "id": rollout.rollout_id,
        "state": rollout.state,
        "created": rollout.created_s,
        "num_groups": len(rollout.groups),
        "num_samples": rollout.num_samples,
        "num_ended": len(rollout.lines),
        "samples": book.counts_of(rollout),
    }

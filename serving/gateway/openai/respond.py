"""From a planned generation to its HTTP response: whole, or as a stream of events.

`Answer` makes the objects of a response; each endpoint says in its own dialect what is in them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from serving.engine import Chunk, Piece
from serving.gateway.errors import reply
from serving.gateway.openai.disconnect import until_disconnect
from serving.gateway.openai.generation import Generation, Sample
from serving.gateway.openai.schema import GenerationBody
from serving.gateway.openai.sse import DONE, Emit, EventStream, event
from serving.gateway.telemetry import Exchange, exchange_of


class Dialect(Protocol):
    """Where the chat endpoint and the completions endpoint differ."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def whole(self, index: int, sample: Sample) -> dict[str, Any]:
        """The finished choice."""

    def pieces(self, index: int, chunk: Chunk, *, is_first: bool, extension: dict[str, Any]) -> list[dict[str, Any]]:
        """The choices of the events that one chunk becomes; none where there is nothing to show.

        `extension` is added to the choice that has the chunk's text.
        """


@dataclass
class Answer:
    """Wraps choices into the objects of one response, which share an id and a time."""

    generation: Generation
    dialect: Dialect
    exchange: Exchange
    model: str
    include_usage: bool
    counts_usage_on: bool
    """Each event has the usage so far."""
    show_tokens: bool
    """Each choice with text says by pieces where that text comes from; together they are the text."""
    created_s: int = field(default_factory=lambda: int(time.time()))
    _opened: set[int] = field(default_factory=set)

    def whole(self) -> dict[str, Any]:
        choices = [self.dialect.whole(index, sample) for index, sample in enumerate(self.generation.samples)]
        return {**self._head(self.dialect.whole_object), "choices": choices, "usage": self.generation.usage()}

    def events(self, index: int, chunk: Chunk) -> list[dict[str, Any]]:
        is_first = index not in self._opened
        self._opened.add(index)
        extension = (
            {"slipstream": {"pieces": chunk.pieces or (Piece(chunk.text, "target"),)}} if self.show_tokens else {}
        )
        pieces = self.dialect.pieces(index, chunk, is_first=is_first, extension=extension)
        # With usage asked for, every event but the last says so with a null, as OpenAI's do.
        usage = {"usage": self.generation.usage() if self.counts_usage_on else None} if self.include_usage else {}
        return [{**self._head(self.dialect.chunk_object), "choices": [piece], **usage} for piece in pieces]

    def closing_events(self) -> list[dict[str, Any]]:
        if not self.include_usage:
            return []
        return [{**self._head(self.dialect.chunk_object), "choices": [], "usage": self.generation.usage()}]

    def _head(self, kind: str) -> dict[str, Any]:
        identity = f"{self.dialect.id_prefix}-{self.exchange.request_id}"
        return {"id": identity, "object": kind, "created": self.created_s, "model": self.model}


async def respond(request: Request, body: GenerationBody, generation: Generation, dialect: Dialect) -> Response:
    """Run the generation and return its response; for a stream, return the response that will run it."""
    answer = Answer(
        generation,
        dialect,
        exchange_of(request),
        body.model,
        include_usage=body.stream_options.include_usage,
        counts_usage_on=body.counts_usage_on,
        show_tokens=body.slipstream.tokens,
    )
    if body.stream:
        return _streamed(answer)
    await until_disconnect(request.receive, generation.run())
    return reply(answer.whole())


def _streamed(answer: Answer) -> EventStream:
    async def produce(emit: Emit) -> bytes:
        async def send(index: int, chunk: Chunk) -> None:
            await emit(b"".join(map(event, answer.events(index, chunk))))

        await answer.generation.run(send)
        return b"".join(map(event, answer.closing_events())) + DONE

    return EventStream(answer.exchange, produce)

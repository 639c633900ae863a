"""From a planned generation to its HTTP response: whole, or as a stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from serving.engine import Chunk
from serving.gateway.answer import Answer, Dialect
from serving.gateway.cadence import merged, paced
from serving.gateway.disconnect import until_disconnect
from serving.gateway.generation import Generation
from serving.gateway.reply import reply
from serving.gateway.schema import GenerationBody
from serving.gateway.sse import DONE, Emit, EventStream, event
from serving.gateway.telemetry import exchange_of


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
        async def send(chunks: Sequence[tuple[int, Chunk]]) -> None:
            await emit(_block(data for index, chunk in merged(chunks) for data in answer.events(index, chunk)))

        async with paced(answer.generation.settings, send) as cadence:
            await answer.generation.run(lambda index, chunk: cadence.put((index, chunk)))
        return _block(answer.closing_events()) + DONE

    return EventStream(answer.exchange, produce)


def _block(events: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(event(data) for data in events)

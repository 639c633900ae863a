"""From a planned generation to its HTTP response: whole, or as a stream."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from serving.engine import Chunk
from serving.gateway.answer import Answer, Dialect
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
        async def send(index: int, chunk: Chunk) -> None:
            await emit(b"".join(map(event, answer.events(index, chunk))))

        await answer.generation.run(send)
        return b"".join(map(event, answer.closing_events())) + DONE

    return EventStream(answer.exchange, produce)

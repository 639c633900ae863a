"""From a planned generation to its HTTP response: whole, or as a stream."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from serving.gateway.answer import Answer, Dialect
from serving.gateway.disconnect import until_disconnect
from serving.gateway.generation import Generation
from serving.gateway.schema import GenerationBody
from serving.gateway.sse import EventStream
from serving.gateway.telemetry import exchange_of


async def respond(request: Request, body: GenerationBody, generation: Generation, dialect: Dialect) -> Response:
    """Run the generation and return its response; for a stream, return the response that will run it."""
    answer = Answer(generation, dialect, exchange_of(request), body.model, body.include_usage)
    if body.stream:
        return EventStream(answer)
    await until_disconnect(request.receive, generation.run())
    return Response(msgspec.json.encode(answer.whole()), media_type="application/json")

"""A generation as server-sent events.

Nothing is sent before the engine's first chunk, so a failure up to there is an ordinary error response. A failure
after it becomes a last event `{"error": ...}` without `[DONE]`: OpenAI's client raises for that, and for nothing else
that a broken stream can look like.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serving.engine import Chunk
from serving.gateway.answer import Answer
from serving.gateway.disconnect import until_disconnect
from serving.gateway.errors import unavailable

DONE = b"data: [DONE]\n\n"


def event(data: object) -> bytes:
    """One event; JSON never holds a raw line break, so one `data:` line is enough."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


class EventStream(Response):
    """Runs the answer's generation while it is being sent; stops it when the client leaves."""

    def __init__(self, answer: Answer) -> None:
        # Proxies that buffer would turn the stream into one late block.
        super().__init__(
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"}, media_type="text/event-stream"
        )
        del self.headers["content-length"]
        self._answer = answer
        self._started = False
        self._sending = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._run(send))
        except asyncio.CancelledError:
            # The server's grace period is over. A stream that just stops would pass for a complete answer.
            if self._started:
                await self._end_failed(send, unavailable("The server is shutting down.", code="shutting_down"))
            raise

    async def _run(self, send: Send) -> None:
        async def on_chunk(index: int, chunk: Chunk) -> None:
            await self._send(send, self._answer.events(index, chunk))

        try:
            await self._answer.generation.run(on_chunk)
        except Exception as failure:
            if not self._started:
                raise
            await self._end_failed(send, failure)
            return
        closing = b"".join(event(data) for data in self._answer.closing_events())
        await self._end(send, closing + DONE)

    async def _send(self, send: Send, events: Iterable[dict[str, Any]]) -> None:
        block = b"".join(event(data) for data in events)
        if not block:
            return
        # Samples send concurrently, and the start must be through before anyone's first event.
        async with self._sending:
            if not self._started:
                self._started = True
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": block, "more_body": True})

    async def _end(self, send: Send, block: bytes) -> None:
        await send({"type": "http.response.body", "body": block, "more_body": False})

    async def _end_failed(self, send: Send, failure: Exception) -> None:
        await self._end(send, event(self._answer.exchange.fail(failure).envelope()))

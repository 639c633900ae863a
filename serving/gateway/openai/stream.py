"""Stream an answer as server-sent events or as lines of JSON, and stop when the client leaves.

Nothing is sent before the engine's first event, so an earlier failure is an ordinary error response. A later failure
becomes a last event `{"error": ...}` without `[DONE]`: the only sign of a broken stream for which OpenAI's client
raises.

Proxies close a connection that is silent for about a minute. After each silence of `Exchange.comment_s` a stream sends
a comment, even as its first event; clients skip comments.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serving.gateway.errors import shutting_down, too_late
from serving.gateway.telemetry import Exchange
from speculator.host import json_line

_LAST_EVENT_S = 5.0
T = TypeVar("T")
log = structlog.get_logger(__name__)
DONE = b"data: [DONE]\n\n"
Emit = Callable[[bytes], Awaitable[None]]
"""Sends a block of whole events; waits for a slow client."""
Produce = Callable[[Emit], Awaitable[bytes]]
"""Emits a stream's events and returns its last ones; at least one event must be emitted."""


def event(data: object) -> bytes:
    """One event; JSON never holds a raw line break, so one `data:` line is enough."""
    return b"data: " + json_line(data) + b"\n\n"


@dataclass(frozen=True)
class Framing:
    """How objects are framed in a stream: as server-sent events, or as lines of JSON."""

    media_type: str
    frame: Callable[[object], bytes]
    silence: bytes
    """A keep-alive that clients skip."""


EVENTS = Framing("text/event-stream", event, b": keep-alive\n\n")
LINES = Framing("application/x-ndjson", lambda data: json_line(data) + b"\n", b"\n")


class EventStream(Response):
    """Sends what `produce` emits while it runs; stops it when the client leaves."""

    def __init__(self, exchange: Exchange, produce: Produce, framing: Framing = EVENTS) -> None:
        # Disables buffering in proxies, which would deliver the stream as one late block.
        super().__init__(headers={"x-accel-buffering": "no"}, media_type=framing.media_type)
        del self.headers["content-length"]
        self._exchange, self._produce, self._framing = exchange, produce, framing
        self._started = self._ended = False
        self._sent_s = asyncio.get_running_loop().time()
        self._sending = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":
            await super().__call__(scope, receive, send)
            return
        try:
            await until_disconnect(receive, self._run(send))
        except asyncio.CancelledError:
            # Without an error event, a stream that stops looks like a complete answer.
            if self._started:
                limit = self._exchange.limit
                is_late = limit is not None and limit.expired()
                late = too_late(round(self._exchange.elapsed_s))
                await self._end_failed(send, late if is_late else shutting_down())
            raise

    async def _run(self, send: Send) -> None:
        async def emit(block: bytes) -> None:
            await self._send(send, block)

        commenting = asyncio.create_task(self._comment(send))
        try:
            closing = await self._produce(emit)
        except Exception as failure:
            if not self._started:
                raise
            await self._end_failed(send, failure)
            return
        finally:
            commenting.cancel()
        await self._send(send, closing, is_last=True)

    async def _comment(self, send: Send) -> None:
        """Until cancelled, send a keep-alive after each silence of `comment_s`."""
        while True:
            left_s = self._sent_s + self._exchange.comment_s - asyncio.get_running_loop().time()
            if left_s > 0:
                await asyncio.sleep(left_s)
            else:
                await self._send(send, self._framing.silence)

    async def _send(self, send: Send, block: bytes, *, is_last: bool = False) -> None:
        if not (block or is_last):
            return
        # Samples send concurrently; the response's start must be sent before any event.
        async with self._sending:
            if self._ended:
                return
            self._ended = is_last
            if not self._started:
                self._started = True
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": block, "more_body": not is_last})
            self._sent_s = asyncio.get_running_loop().time()

    async def _end_failed(self, send: Send, failure: Exception) -> None:
        error = self._exchange.fail(failure)
        # Do not wait for a client that does not read.
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_EVENT_S):
                await self._send(send, self._framing.frame(self._exchange.envelope(error)), is_last=True)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; cancels it, waits for its cleanup and raises ClientDisconnect when the client leaves first.

    The request's body must have been read: what `receive` still brings is dropped.
    """

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.create_task(work), asyncio.create_task(disconnected())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))
            if not working.cancelled() and (failure := working.exception()) is not None:
                log.warning("request of a client that left not aborted", error=type(failure).__name__)
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)

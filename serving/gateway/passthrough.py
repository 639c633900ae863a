"""The generating endpoints in front of a server that speaks the OpenAI protocol itself: what it answers passes through.

A whole answer goes to the client byte for byte. So does a stream, event by event; only a stream that SGLang could not
begin becomes an error response, and one that breaks off gets the last event that says so.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
from fastapi import APIRouter, Request, Response

from serving.engine import DraftHost
from serving.gateway import chat, completions
from serving.gateway.body import parse, read_json
from serving.gateway.cadence import Cadence
from serving.gateway.config import GatewaySettings
from serving.gateway.deadline import deadline
from serving.gateway.disconnect import until_disconnect
from serving.gateway.forwarded import ForwardedBody, rewrite
from serving.gateway.limits import check_completion_tokens, check_limits
from serving.gateway.metrics import GatewayMetrics
from serving.gateway.schema import request_body
from serving.gateway.sse import DONE, Emit, EventStream
from serving.gateway.telemetry import Exchange, exchange_of
from serving.gateway.upstream import Upstream
from serving.gateway.upstream_errors import ERROR_EVENT, refusal_in
from speculator.errors import EngineError


@dataclass(frozen=True, kw_only=True)
class Passage:
    """What both endpoints share."""

    host: DraftHost
    upstream: Upstream
    settings: GatewaySettings
    metrics: GatewayMetrics


def passthrough_routes(passage: Passage) -> APIRouter:
    router = APIRouter()
    openapi = request_body(ForwardedBody)

    async def pass_on(request: Request, route: str) -> Response:
        raw = await read_json(request, max_bytes=passage.settings.max_body_bytes)
        body = parse(ForwardedBody, raw)
        settings, exchange = passage.settings, exchange_of(request)
        check_limits(passage.host.info, settings, model=body.model, num_samples=body.num_samples)
        check_completion_tokens(settings, body.completion_tokens or 0)
        policy = body.slipstream.policy(tenant=exchange.tenant, may_capture=exchange.may_capture)
        max_tokens = settings.max_completion_tokens
        content = rewrite(raw, body, request_id=exchange.request_id, policy=policy, max_tokens=max_tokens)
        asked = _Asked(passage, exchange, route, content)
        if body.stream:
            return EventStream(exchange, asked.stream)
        return await until_disconnect(request.receive, asked.whole())

    @router.post(chat.ROUTE, openapi_extra=openapi)
    async def create_chat_completion(request: Request) -> Response:
        return await pass_on(request, chat.ROUTE)

    @router.post(completions.ROUTE, openapi_extra=openapi)
    async def create_completion(request: Request) -> Response:
        return await pass_on(request, completions.ROUTE)

    return router


@dataclass
class _Asked:
    """One request on its way to the upstream server."""

    passage: Passage
    exchange: Exchange
    route: str
    body: bytes

    async def whole(self) -> Response:
        with self.passage.metrics.in_flight.track_inprogress():
            async with self._answer() as response:
                content = await response.aread()
        return Response(content, media_type=response.headers.get("content-type", "application/json"))

    async def stream(self, emit: Emit) -> bytes:
        """Emit the answer's events as they come; raises ApiError or EngineError where it cannot begin or breaks off."""
        is_done = has_begun = False
        interval_s = self.passage.settings.stream_interval_ms / 1000
        with self.passage.metrics.in_flight.track_inprogress():
            async with (
                # Outermost: what came before the deadline is sent before the error.
                Cadence[bytes](interval_s, lambda parts: emit(b"".join(parts))) as paced,
                self._answer() as response,
            ):
                async for block in whole_events(response):
                    if not has_begun:
                        if refused := refusal_in(block):
                            raise refused
                        self._note_first_event()
                        has_begun = True
                    self._note_failure(block)
                    is_done = block.endswith(DONE)
                    await paced.put(block)
        if not is_done:
            raise EngineError("the stream ended before it was done")
        return b""

    @asynccontextmanager
    async def _answer(self) -> AsyncIterator[httpx.Response]:
        limit_s, upstream = self.passage.settings.max_request_s, self.passage.upstream
        async with deadline(limit_s), upstream.answer(self.route, self.body) as response:
            yield response

    def _note_first_event(self) -> None:
        waited_s = time.perf_counter() - self.exchange.started_s
        self.passage.metrics.first_token_s.labels(self.route).observe(waited_s)

    def _note_failure(self, block: bytes) -> None:
        """For log and metrics: the client reads the error where SGLang put it."""
        at = block.find(ERROR_EVENT)
        if at >= 0 and (failure := refusal_in(block[at:])):
            self.exchange.fail(failure)


async def whole_events(response: httpx.Response) -> AsyncIterator[bytes]:
    """The body of an event stream in blocks that end where an event ends; raises EngineError for a last part of one.

    What has been sent of a stream that breaks off can then be followed by an event that says so.
    """
    rest = b""
    async for part in response.aiter_raw():
        rest += part
        end = rest.rfind(b"\n\n") + 2
        if end >= 2:
            yield rest[:end]
            rest = rest[end:]
    if rest:
        raise EngineError("the stream ended inside an event")

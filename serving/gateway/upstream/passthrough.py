"""The generating endpoints in front of a server that speaks the OpenAI protocol itself: what it answers passes through.

A whole answer goes to the client byte for byte. So does a stream, event by event; only a stream that SGLang could not
begin becomes an error response, and one that breaks off gets the last event that says so.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

import httpx
from fastapi import APIRouter, Request, Response

from serving.engine import DraftHost, EngineInfo
from serving.gateway.config import GatewaySettings
from serving.gateway.errors import ApiError
from serving.gateway.metrics import GatewayMetrics
from serving.gateway.openai.body import parse, read_json
from serving.gateway.openai.chat import CHAT
from serving.gateway.openai.completions import COMPLETIONS
from serving.gateway.openai.disconnect import until_disconnect
from serving.gateway.openai.limits import check_completion_tokens, check_limits, deadline
from serving.gateway.openai.schema import request_body
from serving.gateway.openai.sse import DONE, Emit, EventStream
from serving.gateway.telemetry import Exchange, exchange_of
from serving.gateway.upstream.client import Upstream
from serving.gateway.upstream.errors import ERROR_EVENT, refusal_in, room_in
from serving.gateway.upstream.forwarded import ForwardedBody, marks_of, rewrite
from speculator.errors import EngineError

_DEFAULT_OF_COMPLETIONS = 16
"""Tokens that SGLang makes of a text, as OpenAI did; a chat goes on until its context is full."""


WARNING = "x-slipstream-warning"
"""A header of answers, since their bodies pass as they are: a field of the request had no effect."""


@dataclass(frozen=True, kw_only=True)
class Passage:
    """What both endpoints share."""

    host: DraftHost
    upstream: Upstream
    settings: GatewaySettings
    metrics: GatewayMetrics
    target: str
    """Fingerprint of the target that every engine here must serve; empty where that is not known."""


def passthrough_routes(passage: Passage) -> APIRouter:
    router = APIRouter()
    openapi = request_body(ForwardedBody, served=passage.host.info.model)

    async def pass_on(request: Request, route: str) -> Response:
        raw = await read_json(request, max_bytes=passage.settings.max_body_bytes)
        body = parse(ForwardedBody, raw)
        settings, exchange = passage.settings, exchange_of(request)
        check_limits(passage.host.info, settings, model=body.model, num_samples=body.num_samples)
        check_completion_tokens(settings, body.completion_tokens or 0)
        policy = body.slipstream.policy(tenant=exchange.tenant, may_capture=exchange.may_capture)
        marks = marks_of(body, request_id=exchange.request_id, policy=policy, target=passage.target)
        rewritten = partial(rewrite, raw, body, marks)
        limit = limit_to_add(body, settings.max_completion_tokens, route, passage.host.info)
        shorter = None if limit is None else lambda room: rewritten(max_tokens=room)
        asked = _Asked(passage, exchange, route, marks.to_header(), rewritten(max_tokens=limit), shorter)
        response: Response
        if body.stream:
            response = EventStream(exchange, asked.stream)
        else:
            response = await until_disconnect(request.receive, asked.whole())
        if body.needs_seed and (warning := _about_seed(body, heeds_seed=passage.host.info.heeds_seed)):
            response.headers[WARNING] = warning
        return response

    @router.post(CHAT, openapi_extra=openapi)
    async def create_chat_completion(request: Request) -> Response:
        return await pass_on(request, CHAT)

    @router.post(COMPLETIONS, openapi_extra=openapi)
    async def create_completion(request: Request) -> Response:
        return await pass_on(request, COMPLETIONS)

    return router


def _about_seed(body: ForwardedBody, *, heeds_seed: bool) -> str | None:
    """What a client of SGLang must know that asks for the text of a seed."""
    if not heeds_seed:
        return "seed has no effect: SGLang heeds it only where it was started with --enable-deterministic-inference"
    if body.n > 1:
        return "n has no effect beside seed: SGLang gives all samples of a seed the same text; send a seed for each"
    return None


@dataclass
class _Asked:
    """One request on its way to the upstream server."""

    passage: Passage
    exchange: Exchange
    route: str
    headers: Mapping[str, str]
    body: bytes
    shorter: Callable[[int], bytes] | None
    """The body that asks for so many tokens; None where the client has said how many it wants."""

    async def whole(self) -> Response:
        with self.passage.metrics.in_flight.track_inprogress():
            async with self._answer() as response:
                content = await response.aread()
        return Response(content, media_type=response.headers.get("content-type", "application/json"))

    async def stream(self, emit: Emit) -> bytes:
        """Emit the answer's events as they come; raises ApiError or EngineError where it cannot begin or breaks off."""
        is_done = has_begun = False
        with self.passage.metrics.in_flight.track_inprogress():
            async with self._answer() as response:
                async for block in whole_events(response):
                    if not has_begun:
                        if refused := refusal_in(block):
                            raise refused
                        self._note_first_event()
                        has_begun = True
                    self._note_failure(block)
                    is_done = block.endswith(DONE)
                    await emit(block)
        if not is_done:
            raise EngineError("the stream ended before it was done")
        return b""

    @asynccontextmanager
    async def _answer(self) -> AsyncIterator[httpx.Response]:
        """Where the limit that the gateway put in is more than fits, SGLang is asked again, for what does."""
        async with deadline(self.passage.settings.max_request_s), AsyncExitStack() as opened:
            try:
                response = await self._ask(opened, self.body)
            except ApiError as refused:
                room = room_in(refused)
                if self.shorter is None or room is None:
                    raise
                response = await self._ask(opened, self.shorter(room))
            yield response

    async def _ask(self, opened: AsyncExitStack, body: bytes) -> httpx.Response:
        return await opened.enter_async_context(self.passage.upstream.answer(self.route, body, self.headers))

    def _note_first_event(self) -> None:
        waited_s = time.perf_counter() - self.exchange.started_s
        self.passage.metrics.first_token_s.labels(self.route).observe(waited_s)

    def _note_failure(self, block: bytes) -> None:
        """For log and metrics: the client reads the error where SGLang put it."""
        at = block.find(ERROR_EVENT)
        if at >= 0 and (failure := refusal_in(block[at:])):
            self.exchange.fail(failure)


def limit_to_add(body: ForwardedBody, limit: int | None, route: str, info: EngineInfo) -> int | None:
    """The operator's limit on completion tokens, where the request names none and SGLang's own may be above it."""
    if route == CHAT:
        is_named, default = body.completion_tokens is not None, info.context_length
    else:
        # SGLang knows no other name for it there.
        is_named, default = body.max_tokens is not None, _DEFAULT_OF_COMPLETIONS
    return limit if limit is not None and limit < default and not is_named else None


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

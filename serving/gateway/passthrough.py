"""The endpoints in front of SGLang: check requests, forward them, pass the answers through.

A whole answer passes unchanged, and a stream event by event. A stream that SGLang cannot begin becomes an error
response; one that breaks off gets a last event that says so. To the usage of chats and completions the gateway adds
acceptance (serving/gateway/acceptance.py). It counts tokens by the usage: it asks SGLang for the usage of every
stream, and drops that event if the client did not ask for it.

serving/gateway/forwarded.py has the fields of the forwarded bodies. Endpoints differ in these, and in how streams end
and fail.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import httpx
from fastapi import APIRouter, Request, Response

from serving.engine import ServedEngine
from serving.gateway.acceptance import AcceptanceRewriter
from serving.gateway.body import parse, read_json, request_body
from serving.gateway.config import GatewaySettings
from serving.gateway.errors import ApiError, deadline
from serving.gateway.forwarded import (
    ForwardedBody,
    MessagesBody,
    ResponsesBody,
    SampledBody,
    TextBody,
    metadata_of,
    rewrite,
)
from serving.gateway.metrics import GatewayMetrics
from serving.gateway.openai.generation import check_completion_tokens, check_limits
from serving.gateway.openai.routes import CHAT, COMPLETIONS
from serving.gateway.openai.stream import DONE, EVENTS, Emit, EventStream, Framing, event, until_disconnect
from serving.gateway.telemetry import MESSAGES, Exchange, exchange_of
from serving.gateway.upstream import Upstream, completion_room, failure_in, has_begun, refusal_in
from serving.request_metadata import TARGET_KEY, TARGET_VERSION_KEY
from speculator.errors import EngineError

WARNING = "x-slipstream-warning"
"""Answer header with a warning that a field of the request had no effect; bodies are SGLang's own."""
T = TypeVar("T")


def _responses_error(envelope: Any) -> bytes:
    """The error event of /v1/responses, in the form for which OpenAI's client raises."""
    error = envelope["error"]
    return b"event: error\n" + event({**error, **envelope, "type": "error"})


def _messages_error(envelope: Any) -> bytes:
    return b"event: error\n" + event(envelope)


@dataclass(frozen=True)
class Endpoint:
    body: type[ForwardedBody]
    generates: bool = True
    """Whether answers have generated text, and can be streams; others are whole even if a stream is asked for."""
    ends: tuple[bytes, ...] = (DONE,)
    """Beginning of a stream's last event. No answer's text can contain it: JSON escapes its line breaks."""
    framing: Framing = EVENTS


_TEXT = Endpoint(TextBody, generates=False)
ENDPOINTS = {
    CHAT: Endpoint(SampledBody),
    COMPLETIONS: Endpoint(SampledBody),
    "/v1/responses": Endpoint(
        ResponsesBody,
        ends=tuple(b"event: response.%s\n" % how for how in (b"completed", b"incomplete", b"failed")),
        framing=replace(EVENTS, frame=_responses_error),
    ),
    # Anthropic's own keep-alive: Claude Code gives up where it sees comments alone.
    MESSAGES: Endpoint(
        MessagesBody,
        ends=(b"event: message_stop\n",),
        framing=replace(EVENTS, frame=_messages_error, silence=b"event: ping\n" + event({"type": "ping"})),
    ),
    f"{MESSAGES}/count_tokens": Endpoint(ForwardedBody, generates=False),
    "/v1/embeddings": Endpoint(ForwardedBody, generates=False),
    **dict.fromkeys(("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"), _TEXT),
}


def passthrough_routes(
    host: ServedEngine,
    upstream: Upstream,
    settings: GatewaySettings,
    metrics: GatewayMetrics,
    target: str,
    least_version: Callable[[], int],
) -> APIRouter:
    """`target` is the fingerprint of the target that every engine must serve, `least_version` its oldest version; empty
    and 0 where unknown.
    """
    router = APIRouter()

    async def pass_on(request: Request) -> Response:
        raw, exchange = await read_json(request, max_bytes=settings.max_body_bytes), exchange_of(request)
        endpoint = ENDPOINTS[exchange.route]
        body = parse(endpoint.body, raw)
        check_limits(host.info, settings, model=body.model or host.info.model, num_samples=body.num_samples)
        check_completion_tokens(settings, body.completion_tokens or 0)
        policy = body.slipstream.policy(exchange, body.slipstream.group_id)
        meant = {key: value for key, value in ((TARGET_KEY, target), (TARGET_VERSION_KEY, least_version())) if value}
        marks = metadata_of(body, request_id=exchange.request_id, policy=policy, meant=meant)
        limit = settings.max_completion_tokens
        call = _UpstreamCall(
            upstream=upstream,
            metrics=metrics,
            exchange=exchange,
            endpoint=endpoint,
            limit_s=settings.max_request_s,
            headers=marks.to_header(),
            body=partial(rewrite, raw, body, marks),
            notes=AcceptanceRewriter(keep=body.keeps_details, hide_usage=not body.has_usage),
            num_samples=body.num_samples,
            max_tokens=None if limit is None else body.limit_to_add(limit, exchange.route, host.info),
        )
        response: Response
        if body.stream and endpoint.generates:
            response = EventStream(exchange, call.stream, endpoint.framing)
        else:
            response = await until_disconnect(request.receive, call.whole())
        if warning := body.warning(heeds_seed=host.info.heeds_seed):
            response.headers[WARNING] = warning
        return response

    for path, endpoint in ENDPOINTS.items():
        openapi = request_body(endpoint.body, served=host.info.model)
        name = "create_" + path.removeprefix("/v1").strip("/").removesuffix("s").replace("/", "_")
        router.add_api_route(path, pass_on, methods=["POST"], name=name, openapi_extra=openapi)
    return router


@dataclass(frozen=True, kw_only=True)
class _UpstreamCall:
    """One request to SGLang, and the relay of its answer."""

    upstream: Upstream
    metrics: GatewayMetrics
    exchange: Exchange
    endpoint: Endpoint
    limit_s: float
    headers: Mapping[str, str]
    body: Callable[..., bytes]
    """Makes the body to send, with `max_tokens` if that is a number."""
    max_tokens: int | None
    """The limit that the gateway adds; None where the request has one."""
    notes: AcceptanceRewriter
    num_samples: int

    async def whole(self) -> Response:
        return await self._asked(self._whole)

    async def stream(self, emit: Emit) -> bytes:
        """Emit the answer's events as they come; raises ApiError or EngineError where it cannot begin or breaks off."""
        await self._asked(partial(self._stream, emit))
        return b""

    async def _asked(self, ask: Callable[[int | None], Awaitable[T]]) -> T:
        """Send the request; if the gateway's limit exceeds the context, send it again with what fits."""
        with self.metrics.in_flight.track_inprogress():
            async with deadline(self.limit_s):
                try:
                    return await ask(self.max_tokens)
                except ApiError as refused:
                    room = completion_room(refused)
                    if self.max_tokens is None or room is None:
                        raise
                    return await ask(room)

    async def _whole(self, max_tokens: int | None) -> Response:
        body = self.body(max_tokens=max_tokens)
        async with self.upstream.answer(self.exchange.route, body, self.headers) as response:
            content = await response.aread()
            content = self.notes.whole(whole_characters(content) if self.endpoint.generates else content)
        self._count(0.0)
        return Response(content, media_type=response.headers.get("content-type", "application/json"))

    async def _stream(self, emit: Emit, max_tokens: int | None) -> None:
        body, held, is_done, first_s, last_s = self.body(max_tokens=max_tokens), b"", False, 0.0, 0.0
        async with self.upstream.answer(self.exchange.route, body, self.headers) as response:
            async for block in whole_events(response):
                before_s, last_s = last_s, time.perf_counter()
                if first_s:
                    self.metrics.observe_between_chunks(last_s - before_s)
                else:
                    block, held = held + block, b""
                    if refused := refusal_in(block):
                        raise refused
                    if not has_begun(block):
                        held = block
                        continue
                    self.exchange.note_first_token(self.metrics)
                    first_s = last_s
                # For log and metrics; the client gets SGLang's own error event.
                if failure := failure_in(block):
                    self.exchange.fail(failure)
                is_done = is_done or any(end in block for end in self.endpoint.ends)
                await emit(self.notes.events(whole_characters(block)))
        self._count(last_s - first_s)
        if not is_done:
            raise EngineError("the stream ended before it was done")

    def _count(self, streamed_s: float) -> None:
        """`streamed_s` is the time from a stream's first block, which has a token of every sample, to its last."""
        if (used := self.notes.usage) is None:
            return
        self.metrics.count_tokens(self.exchange.tenant, prompt=used.prompt_tokens, generated=used.completion_tokens)
        num_after_first = used.completion_tokens / self.num_samples - 1
        self.metrics.observe_pace(self.exchange.route, streamed_s, num_after_first)


async def whole_events(response: httpx.Response) -> AsyncIterator[bytes]:
    """The body of an event stream in blocks of whole events; raises EngineError if it ends inside an event.

    So an error event can be sent after a stream that breaks off.
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


_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_CUT = f'{_UNFINISHED}"'.encode()
_TEXTS = re.compile(rb'("(?:content|reasoning_content|text|thinking|delta)": ?")([^"\\]*(?:\\.[^"\\]*)*)"')


def whole_characters(block: bytes) -> bytes:
    """An answer's JSON without an incomplete character at the end of its texts.

    If a limit cuts an answer inside a character, SGLang ends the text with U+FFFD.
    """
    return _TEXTS.sub(_without_half, block) if _CUT in block else block


def _without_half(found: re.Match[bytes]) -> bytes:
    text = found[2].decode(errors="surrogateescape").rstrip(_UNFINISHED)
    return found[1] + text.encode(errors="surrogateescape") + b'"'

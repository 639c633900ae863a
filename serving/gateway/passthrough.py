"""The generating endpoints in front of SGLang: requests are checked, and its answers pass through.

A whole answer goes to the client as it comes. So does a stream, event by event; only a stream that SGLang could not
begin becomes an error response, and one that breaks off gets a last event that says so. To the usage the gateway adds
what became of the proposals (serving/gateway/acceptance.py). It counts tokens by the usage: it asks SGLang for that of
every stream, and takes the event out where the client did not ask.

What the gateway adds to a request (serving/request_metadata.py) travels in fields that SGLang hands to its scheduler:
`rid`, `cache_salt`, and in `custom_params["slipstream"]`, where the plugin reads it, the capture policy.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import httpx
import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import ConfigDict, Field, PlainValidator

from serving.engine import CapturePolicy, DraftHost, EngineInfo
from serving.gateway.acceptance import ASK, AcceptanceNotes
from serving.gateway.body import Strict, invalid, parse, read_json, request_body
from serving.gateway.config import GatewaySettings
from serving.gateway.errors import ApiError, deadline
from serving.gateway.metrics import GatewayMetrics
from serving.gateway.openai.generation import check_completion_tokens, check_limits
from serving.gateway.openai.routes import CHAT, COMPLETIONS
from serving.gateway.openai.schema import Count, GroupCapture, Stop
from serving.gateway.openai.stream import DONE, Emit, EventStream, until_disconnect
from serving.gateway.telemetry import Exchange, exchange_of
from serving.gateway.upstream import ERROR_EVENT, Upstream, refusal_in, room_in
from serving.request_metadata import POLICY_KEY, TARGET_KEY, TARGET_VERSION_KEY, Marks
from speculator.errors import EngineError, RequestError
from speculator.tracing import outgoing_headers

_DEFAULT_OF_COMPLETIONS = 16
"""Tokens that SGLang makes of a text, as OpenAI did; a chat goes on until its context is full."""
WARNING = "x-slipstream-warning"
"""A header of answers, since their bodies are not ours: a field of the request had no effect."""


def passthrough_routes(
    host: DraftHost,
    upstream: Upstream,
    settings: GatewaySettings,
    metrics: GatewayMetrics,
    target: str,
    least_version: Callable[[], int],
) -> APIRouter:
    """`target` is the fingerprint of what every engine must serve, in this version or a later one; empty and 0 where
    that is not known.
    """
    router = APIRouter()
    openapi = request_body(ForwardedBody, served=host.info.model)

    @router.post(CHAT, name="create_chat_completion", openapi_extra=openapi)
    @router.post(COMPLETIONS, name="create_completion", openapi_extra=openapi)
    async def pass_on(request: Request) -> Response:
        raw, exchange = await read_json(request, max_bytes=settings.max_body_bytes), exchange_of(request)
        body = parse(ForwardedBody, raw)
        check_limits(host.info, settings, model=body.model, num_samples=body.num_samples)
        check_completion_tokens(settings, body.completion_tokens or 0)
        policy = body.slipstream.policy(exchange, body.slipstream.group_id)
        meant = {key: value for key, value in ((TARGET_KEY, target), (TARGET_VERSION_KEY, least_version())) if value}
        marks = marks_of(body, request_id=exchange.request_id, policy=policy, meant=meant)
        call = _UpstreamCall(
            upstream=upstream,
            metrics=metrics,
            exchange=exchange,
            limit_s=settings.max_request_s,
            headers=marks.to_header(),
            body=partial(rewrite, raw, body, marks),
            notes=AcceptanceNotes(keep=body.return_spec_tokens_details is True, hide_usage=not body.has_usage),
            num_samples=body.num_samples,
            max_tokens=limit_to_add(body, settings.max_completion_tokens, exchange.route, host.info),
        )
        response: Response
        if body.stream:
            response = EventStream(exchange, call.stream)
        else:
            response = await until_disconnect(request.receive, call.whole())
        if warning := _about_seed(body, heeds_seed=host.info.heeds_seed):
            response.headers[WARNING] = warning
        return response

    return router


def _about_seed(body: ForwardedBody, *, heeds_seed: bool) -> str | None:
    """What a client of SGLang must know that asks for the text of a seed; at temperature 0 nothing is drawn."""
    if body.seed is None or body.temperature == 0:
        return None
    if not heeds_seed:
        return "seed has no effect: SGLang heeds it only where it was started with --enable-deterministic-inference"
    if body.n > 1:
        return "n has no effect beside seed: SGLang gives all samples of a seed the same text; send a seed for each"
    return None


@dataclass(frozen=True, kw_only=True)
class _UpstreamCall:
    """One request on its way to SGLang."""

    upstream: Upstream
    metrics: GatewayMetrics
    exchange: Exchange
    limit_s: float
    headers: Mapping[str, str]
    body: Callable[..., bytes]
    """The body to send, with `max_tokens` where it is a number."""
    max_tokens: int | None
    """The limit that the gateway puts in; None where the client has said how many tokens it wants."""
    notes: AcceptanceNotes
    num_samples: int

    async def whole(self) -> Response:
        async with self._answer() as response:
            content = self.notes.whole(await response.aread())
        self._count(0.0)
        return Response(content, media_type=response.headers.get("content-type", "application/json"))

    async def stream(self, emit: Emit) -> bytes:
        """Emit the answer's events as they come; raises ApiError or EngineError where it cannot begin or breaks off."""
        is_done, first_s, last_s = False, 0.0, 0.0
        async with self._answer() as response:
            async for block in whole_events(response):
                last_s = time.perf_counter()
                if not first_s:
                    if refused := refusal_in(block):
                        raise refused
                    self.exchange.note_first_token(self.metrics)
                    first_s = last_s
                # For log and metrics: the client reads the error where SGLang put it.
                at = block.find(ERROR_EVENT)
                if at >= 0 and (failure := refusal_in(block[at:])):
                    self.exchange.fail(failure)
                is_done = block.endswith(DONE)
                await emit(self.notes.events(block))
        self._count(last_s - first_s)
        if not is_done:
            raise EngineError("the stream ended before it was done")
        return b""

    def _count(self, streamed_s: float) -> None:
        """`streamed_s` is from the first piece of a stream, which has a token of every sample, to the last."""
        if (used := self.notes.usage) is None:
            return
        self.metrics.count_tokens(self.exchange.tenant, prompt=used.prompt_tokens, generated=used.completion_tokens)
        num_after_first = used.completion_tokens / self.num_samples - 1
        self.metrics.observe_pace(self.exchange.route, streamed_s, num_after_first)

    @asynccontextmanager
    async def _answer(self) -> AsyncIterator[httpx.Response]:
        """Where the limit that the gateway put in is more than fits, SGLang is asked again, for what does."""

        async def ask(max_tokens: int | None) -> httpx.Response:
            body = self.body(max_tokens=max_tokens)
            return await opened.enter_async_context(self.upstream.answer(self.exchange.route, body, self.headers))

        with self.metrics.in_flight.track_inprogress():
            async with deadline(self.limit_s), AsyncExitStack() as opened:
                try:
                    response = await ask(self.max_tokens)
                except ApiError as refused:
                    room = room_in(refused)
                    if self.max_tokens is None or room is None:
                        raise
                    response = await ask(room)
                yield response


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


_NOT_FOR_CLIENTS = frozenset(
    ("custom_logit_processor", "stop_regex", "bootstrap_host", "bootstrap_port", "bootstrap_room", "extra_key")
)
"""Code to run, a pattern that can keep SGLang's process busy for ever, a machine to connect to, and what SGLang makes
the names of its adapters' caches of."""
_MAX_SALT_CHARS = 256
_NULL = msgspec.Raw(b"null")
_SCALARS = (type(None), bool, int, float, str)


def _custom_params(value: object) -> dict[str, Any]:
    """SGLang's scheduler decodes these by type, and a value that is nested deeper ends its process, not the request."""
    if not isinstance(value, dict):
        raise invalid("custom_params_type", "must be an object")
    if POLICY_KEY in value:
        raise invalid("unknown_parameter", "this key is the server's own; use the field 'slipstream'", POLICY_KEY)
    for name, each in value.items():
        values = each.values() if isinstance(each, dict) else each if isinstance(each, list) else [each]
        if not all(type(value) in _SCALARS for value in values):
            raise invalid("custom_params_value", "must be a scalar, or a list or object of scalars", name)
    return value


CustomParams = Annotated[dict[str, Any], PlainValidator(_custom_params, json_schema_input_type=dict[str, Any])]


class ForwardedBody(Strict):
    """What the gateway looks at; fields that are not here are SGLang's to accept or refuse."""

    model_config = ConfigDict(extra="ignore")

    model: str
    n: Count = 1
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: Stop = ()
    stream: bool = False
    prompt: Any = None
    seed: Any = None
    temperature: Any = None
    cache_salt: Annotated[str, Field(max_length=_MAX_SALT_CHARS)] | None = None
    """Parts the prefix cache within the tenant."""
    stream_options: Any = None
    return_spec_tokens_details: Any = None
    custom_params: CustomParams = Field(default_factory=dict)
    slipstream: GroupCapture = GroupCapture()

    @property
    def num_samples(self) -> int:
        """Token ids are one prompt; whatever else is in a list is a prompt each. Judging them is SGLang's."""
        is_list = isinstance(self.prompt, list) and self.prompt and type(self.prompt[0]) is not int
        return (len(self.prompt) if is_list else 1) * self.n

    @property
    def has_usage(self) -> bool:
        """Whether its answer says at its end what was used, and can say there what became of the proposals."""
        options = self.stream_options
        return not self.stream or (isinstance(options, dict) and options.get("include_usage") is True)

    @property
    def completion_tokens(self) -> int | None:
        """The most that the request may be asking for, whichever field SGLang goes by; None where it names no limit."""
        return max(self.max_tokens or 0, self.max_completion_tokens or 0) or None


def marks_of(body: ForwardedBody, *, request_id: str, policy: CapturePolicy, meant: Mapping[str, str | int]) -> Marks:
    """`meant` says which target must answer."""
    # No tenant's name has a slash: whatever a client writes behind it stays within the tenant.
    salt = f"{policy.tenant}/{body.cache_salt}" if body.cache_salt else policy.tenant
    return Marks(rid=request_id, cache_salt=salt, policy={**asdict(policy), **meant, **outgoing_headers()})


def rewrite(raw: bytes, body: ForwardedBody, marks: Marks, *, max_tokens: int | None) -> bytes:
    """The body to send on, with `max_tokens` where there is one; values that are not the gateway's keep their bytes.

    Raises RequestError for invalid JSON and for a field that no client may use.
    """
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError as error:
        # The two parsers differ only on what is not JSON: NaN, for one.
        raise RequestError(f"Invalid JSON: {error}", code="invalid_json") from None
    # A null asks for nothing, and SGLang refuses some of them.
    fields = {name: value for name, value in fields.items() if value != _NULL}
    if refused := sorted(_NOT_FOR_CLIENTS & fields.keys()):
        message = f"{refused[0]}: no client may use this here; leave it out"
        raise RequestError(message, param=refused[0], code="unsupported_parameter")
    fields.pop("slipstream", None)
    params = {**body.custom_params, POLICY_KEY: marks.policy}
    added: dict[str, Any] = {"custom_params": params, "rid": marks.rid, "cache_salt": marks.cache_salt}
    if max_tokens is not None:
        added["max_tokens"] = max_tokens
    if body.has_usage:
        added[ASK] = True
    elif isinstance(body.stream_options, dict | None):
        added["stream_options"] = {**(body.stream_options or {}), "include_usage": True}
    return msgspec.json.encode({**fields, **added})

"""HTTP client of SGLang's server: sends requests, and translates SGLang's errors into OpenAI's.

Only connecting and sending have a deadline; an answer may take any time. Leaving `answer` early closes the connection,
at which SGLang aborts the request.

SGLang's error is a flat object: `{"object": "error", "message": …, "type": …, "param": …, "code": <status>}`. Inside
a stream, and at /v1/responses and /v1/messages, it is nested under "error", and in a stream of /v1/responses also
under "response". For a body that does not validate, the message is the text of FastAPI's exception.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from typing import TypeVar

import httpx
import msgspec

from serving.gateway.errors import TOO_MANY, UNAVAILABLE_RETRY_AFTER_S, ApiError, describe
from speculator.connections import SeparateConnections
from speculator.errors import EngineBusyError, EngineDeadError
from speculator.tracing import outgoing_headers

T = TypeVar("T")

_CONNECT_S = 5.0
_SEND_S = 30.0


class Upstream:
    """SGLang's HTTP address, or routers in front of the same engines; at most `max_connections` requests at once.

    A request goes to the first address that can be reached. An unreachable address moves to the end of the list.
    """

    def __init__(self, *urls: str, max_connections: int = 400) -> None:
        self.urls = [url.rstrip("/") for url in urls]
        self._max_connections = max_connections
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=_CONNECT_S, write=_SEND_S, pool=_CONNECT_S),
            # The server may close an idle connection just as a request is sent on it, and a generation is not sent
            # twice. A new connection takes 0.1 ms on the same machine.
            transport=SeparateConnections(max_connections=max_connections),
            headers={"accept-encoding": "identity", "content-type": "application/json"},
            trust_env=False,
        )

    @asynccontextmanager
    async def answer(self, path: str, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[httpx.Response]:
        """POST a request; yields the response of status 200 with its body unread.

        Raises ApiError for another status, EngineBusyError or EngineDeadError where no answer comes or it breaks off.
        """
        headers = {**headers, **outgoing_headers()}
        try:
            async with aclosing(await self._send(path, body, headers)) as response:
                if response.status_code != 200:
                    content = await response.aread()
                    raise refusal(response.status_code, content, retry_after=response.headers.get("retry-after"))
                yield response
        except httpx.PoolTimeout:
            raise EngineBusyError(f"{self._max_connections} requests are under way") from None
        except httpx.TransportError as failure:
            raise EngineDeadError(f"SGLang does not answer: {type(failure).__name__}") from failure

    async def _send(self, path: str, body: bytes, headers: Mapping[str, str]) -> httpx.Response:
        """Send once: the next address is tried only if no connection to the one before could be made."""
        failure: httpx.TransportError | None = None
        for url in tuple(self.urls):
            request = self._client.build_request("POST", url + path, content=body, headers=headers)
            try:
                return await self._client.send(request, stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout) as unreachable:
                failure = unreachable
                # Several requests may find an address unreachable at once, each with its own copy of the list.
                self.urls.remove(url)
                self.urls.append(url)
        raise EngineDeadError(f"SGLang cannot be reached: {type(failure).__name__}") from failure

    async def close(self) -> None:
        await self._client.aclose()


_FAILED = re.compile(rb'^(?:data: \{"error"|event: error\n|event: response\.failed\n)', re.MULTILINE)
"""Beginning of an error inside a stream. No answer's text can contain it: JSON escapes quotes and line breaks."""
_OPENINGS = tuple(
    b"event: %s\n" % name
    for name in (b"response.created", b"response.in_progress", b"response.queued", b"message_start")
)
"""Events that SGLang sends before it knows whether the request will succeed."""
_STATUS_OF_TYPE = {
    "invalid_request_error": 400,
    "not_found_error": 404,
    "rate_limit_error": 429,
    "overloaded_error": 503,
}
"""HTTP status by error type, for an error in a stream without one."""
_MAX_MESSAGE_CHARS = 1000
_MAX_SEARCHED_CHARS = 4000
"""Where to look for what does not validate: the rest of the message is the client's own text, as long as its body."""
_QUEUE_IS_FULL = ("The request queue is full.", "The request is aborted by a higher priority request.")
_VALIDATION = re.compile(r"""'type': '(\w+)', 'loc': \('body', '(\w+)'.*?\), 'msg': ('[^']*'|"[^"]*")""")
_TOO_LONG = "context length"
_GATEWAY_STATUSES = {401, 403, 405}
"""Statuses that concern the gateway's own access to SGLang, not the client's request."""


class _ErrorFields(msgspec.Struct):
    message: str = ""
    param: str | None = None
    code: int | str | None = None
    type: str | None = None


class _Nested(msgspec.Struct):
    error: _ErrorFields | None = None
    response: _Nested | None = None


def _error_in(content: bytes) -> _ErrorFields:
    nested = _decoded(content, _Nested)
    if nested is not None and nested.response is not None:
        nested = nested.response
    return (nested and nested.error) or _decoded(content, _ErrorFields) or _ErrorFields()


def refusal(status: int, content: bytes, *, retry_after: str | None = None) -> ApiError:
    """The client's error for SGLang's answer with `status` and `content`."""
    return _translate(status, _error_in(content), retry_after)


def has_begun(block: bytes) -> bool:
    """Whether `block` has an event other than the opening ones."""
    return any(not event.startswith(_OPENINGS) for event in block.split(b"\n\n")[:-1])


def refusal_in(block: bytes) -> ApiError | None:
    """The error in the first event of `block` after the opening ones; None if that is no error."""
    events = [event for event in block.split(b"\n\n")[:-1] if not event.startswith(_OPENINGS)]
    return failure_in(events[0]) if events and _FAILED.match(events[0]) else None


def failure_in(block: bytes) -> ApiError | None:
    """The first error among the events of `block`; None where there is none."""
    if (found := _FAILED.search(block)) is None:
        return None
    said = _error_in(block[found.start() :].partition(b"\n\n")[0].partition(b"data: ")[2])
    if isinstance(said.code, int):
        status = said.code
    elif _TOO_LONG in said.message:
        status = 400
    else:
        status = _STATUS_OF_TYPE.get(said.type or "", 500)
    return _translate(status, said, None)


def _decoded(content: bytes, kind: type[T]) -> T | None:
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(content, type=kind)
    return None


def completion_room(refused: ApiError) -> int | None:
    """How many completion tokens fit, if SGLang refused a request because it wants more; else None."""
    if not (found := TOO_MANY.search(refused.message)):
        return None
    context_length, num_prompt_tokens, _ = map(int, found.groups())
    return max(context_length - num_prompt_tokens, 0) or None


def _translate(status: int, said: _ErrorFields, retry_after: str | None) -> ApiError:
    wait_s = int(retry_after) if retry_after and retry_after.isdigit() else None
    if status == 429 or (status == 503 and said.message in _QUEUE_IS_FULL):
        return describe(EngineBusyError(said.message, retry_after_s=wait_s or 1))
    message = said.message[:_MAX_MESSAGE_CHARS]
    if status == 503:
        # An abort's message is a fixed text of SGLang, safe to pass on.
        message = message or "The engine cannot serve this request now: retry later."
        return ApiError(503, message, code="engine_unavailable", retry_after_s=wait_s or UNAVAILABLE_RETRY_AFTER_S)
    if not 400 <= status < 500 or status in _GATEWAY_STATUSES:
        # Not SGLang's message: it may be the text of any exception, which may quote a prompt.
        status = status if status > 500 else 500
        return ApiError(status, "The engine failed to handle the request.", code="engine_error")
    # All other errors are the client's fault.
    if found := _VALIDATION.search(said.message[:_MAX_SEARCHED_CHARS]):
        kind, param, reason = found.groups()
        code = "missing_required_parameter" if kind == "missing" else "invalid_value"
        return ApiError(status, f"{param}: {reason[1:-1]}", code=code, param=param)
    if _TOO_LONG in message:
        return ApiError(status, message, code="context_length_exceeded", param=said.param)
    code = {404: "not_found", 413: "body_too_large"}.get(status, "invalid_value")
    return ApiError(status, message or "The engine refuses the request.", code=code, param=said.param)

"""Reads a request's body: bounded, JSON only, strictly typed."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request
from starlette.types import Receive

from serving.gateway.errors import ApiError
from serving.gateway.openai.schema import UNKNOWN
from speculator.errors import RequestError

T = TypeVar("T", bound=BaseModel)

_DISCARD_FACTOR = 4
"""A body up to this many times too large is read and dropped: closing early can reset the connection, and the client
then never sees the 413."""

_DISCARD_S = 1.0
_DISCARD_BYTES = 4 * 1024 * 1024
_BODY_S = 60

_CODES = {
    "json_invalid": "invalid_json",
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "unsupported_parameter": "unsupported_parameter",
}

_MAX_PARAM_CHARS = 100
"""A client's own field name is quoted back, but not all of a long one."""


async def read_body(request: Request, model: type[T], *, max_bytes: int) -> T:
    """The body as a `model`; raises ApiError (408, 413, 415) or RequestError (400) naming the field at fault."""
    return parse(model, await read_json(request, max_bytes=max_bytes))


async def read_json(request: Request, *, max_bytes: int) -> bytes:
    """The body as it came, which claims to be JSON; raises ApiError (408, 413, 415)."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        # Also what keeps a web page from posting to a loopback server without the browser asking it first.
        message = "The body must be JSON: send the header 'content-type: application/json'."
        raise ApiError(415, message, code="unsupported_media_type")
    try:
        async with asyncio.timeout(_BODY_S):
            return await _read_bounded(request, max_bytes)
    except TimeoutError:
        # It may hold one of its key's places, and may not hold it for as long as it likes.
        raise ApiError(408, f"The body took longer than {_BODY_S} s to arrive.", code="body_too_slow") from None


async def _read_bounded(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    num_bytes = 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes <= max_bytes:
            body += part
        elif num_bytes > _DISCARD_FACTOR * max_bytes:
            break
    if num_bytes > max_bytes:
        message = f"The body is larger than {max_bytes} bytes: shorten the prompt or send fewer prompts at once."
        raise ApiError(413, message, code="body_too_large")
    return bytes(body)


async def discard_body(receive: Receive) -> None:
    """Read and drop what a client is sending that is refused, for a moment: it then sees why."""
    num_bytes = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_S):
            while num_bytes < _DISCARD_BYTES:
                message = await receive()
                if not message.get("more_body"):
                    return
                num_bytes += len(message["body"])


def parse(model: type[T], raw: bytes) -> T:
    """`raw` as a `model`; raises RequestError for the first thing that is wrong with it."""
    try:
        return model.model_validate_json(raw)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False, include_input=False)[0]
        raise _request_error(first) from None


def _request_error(details: ErrorDetails) -> RequestError:
    param = _param(details)[:_MAX_PARAM_CHARS]
    kind = details["type"]
    code = _CODES.get(kind, "invalid_type" if kind.endswith("_type") else "invalid_value")
    message = UNKNOWN if kind == "extra_forbidden" else details["msg"]
    return RequestError(f"{param}: {message}" if param else message, param=param or None, code=code)


def _param(details: ErrorDetails) -> str:
    """`("messages", 0, "content")` as `messages[0].content`."""
    path = ""
    for part in (*details["loc"], *details.get("ctx", {}).get("within", ())):
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path

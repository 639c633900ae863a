"""Errors as clients get them: OpenAI's envelope `{"error": {message, type, param, code}}`.

Anthropic's endpoint answers with Anthropic's envelope.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from speculator.errors import EngineBusyError, EngineError, RequestError

UNAVAILABLE_RETRY_AFTER_S = 5
"""Retry-after for an engine that stopped: the time of a restart with the model in the page cache."""

_TYPES = {429: "rate_limit_error"}
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
TOO_MANY = re.compile(r"maximum context length of (\d+) tokens\..*: (\d+) tokens from the input messages and (\d+) ")
"""In SGLang's error for a request whose limit does not fit: tokens of the context, of the prompt, and the limit."""


class ApiError(Exception):
    """An HTTP status and the fields of the error envelope."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        retry_after_s: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["retry-after"] = str(retry_after_s)

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def envelope(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def anthropic_envelope(self) -> dict[str, Any]:
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        message = self.message
        # Anthropic's words: Claude Code looks for them, and then asks for fewer tokens or shortens the conversation.
        if found := TOO_MANY.search(message):
            context, prompt, limit = found.groups()
            message = f"input length and `max_tokens` exceed context limit: {prompt} + {limit} > {context}"
        elif self.code == "context_length_exceeded":
            message = f"prompt is too long: {message}"
        return {"type": "error", "error": {"type": kind, "message": message}}


def unavailable(message: str, *, code: str = "engine_unavailable") -> ApiError:
    return ApiError(503, message, code=code, retry_after_s=UNAVAILABLE_RETRY_AFTER_S)


def shutting_down() -> ApiError:
    return unavailable("The server is shutting down.", code="shutting_down")


def engine_busy(retry_after_s: int = 1) -> ApiError:
    message = "The engine's queue is full: retry later, or send fewer requests at once."
    return ApiError(429, message, code="engine_busy", retry_after_s=retry_after_s)


@asynccontextmanager
async def deadline(limit_s: float) -> AsyncIterator[asyncio.Timeout]:
    """Cancel the block after `limit_s` and raise `too_late`."""
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            yield limit
    except TimeoutError:
        if not limit.expired():
            raise
        raise too_late(limit_s) from None


def too_late(limit_s: float) -> ApiError:
    """An error (504) with a header that tells clients not to retry."""
    message = f"The answer took longer than {limit_s:g} s: ask for fewer tokens."
    return ApiError(504, message, code="deadline_exceeded", headers={"x-should-retry": "false"})


def describe(failure: Exception) -> ApiError:
    """The error that a client gets for `failure`. Only messages written for clients are passed on."""
    match failure:
        case ApiError():
            return failure
        case RequestError():
            return ApiError(400, str(failure), code=failure.code, param=failure.param)
        case EngineBusyError():
            return engine_busy(failure.retry_after_s)
        case EngineError():
            return unavailable("The engine stopped generating: retry later.")
        case HTTPException():
            code = _HTTP_CODES.get(failure.status_code, "http_error")
            return ApiError(failure.status_code, str(failure.detail), code=code, headers=dict(failure.headers or {}))
        case _:
            return ApiError(500, "The server failed to handle the request.", code="internal_error")


def error_response(error: ApiError, envelope: object) -> Response:
    return Response(
        msgspec.json.encode(envelope),
        status_code=error.status,
        headers=error.headers,
        media_type="application/json",
    )


def reply(document: object) -> Response:
    return Response(msgspec.json.encode(document), media_type="application/json")

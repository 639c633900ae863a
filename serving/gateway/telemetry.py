"""The outermost middleware of every request: id, metrics, log line, security headers, and uncaught exceptions.

A plain ASGI middleware: it adds no task and does not buffer a stream.
"""

from __future__ import annotations

import asyncio
import re
import time
import traceback
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import structlog
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, StatusCode
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.gateway.errors import ApiError, describe, error_response, shutting_down
from serving.gateway.metrics import GatewayMetrics
from speculator.tracing import parent_of, prefixed, span

CLIENT_LEFT = 499
"""The status in logs and metrics where the client left before a status was sent."""
PROBES = frozenset({"/health", "/ready", "/metrics", "/slipstream/live", "/slipstream/drafts"})
"""Polled routes: no log lines and spans, which would hide the others."""
SAFE_HEADERS = {
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    # Answers are private, and figures change.
    "cache-control": "no-store",
}
"""Headers of every answer whose route sets none of its own: no other site's page may load or frame it."""
MESSAGES = "/v1/messages"
"""Anthropic's endpoint, and the prefix of its subroutes, whose clients expect Anthropic's error envelope."""
REQUEST_ID = "x-request-id"
_USABLE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
log = structlog.get_logger(__name__)


@dataclass(kw_only=True)
class Exchange:
    """One request and its outcome, for log and metrics; handlers get it with `exchange_of`."""

    route: str = "unmatched"
    """Template of the route, never the client's path; access control sets it."""
    request_id: str = field(default_factory=lambda: uuid4().hex)
    """Unique id that the gateway makes; the engine's request ids begin with it."""
    client_id: str | None = None
    """The client's own id for the request; need not be unique."""
    started_s: float = field(default_factory=time.perf_counter)
    status: int = 0
    error_code: str | None = None
    response_started: bool = False
    span: Span = INVALID_SPAN
    tenant: str = "default"
    """Tenant of the request; access control sets it from the key."""
    may_capture: bool = True
    """Whether the key allows capture; a request may still opt out."""
    limit: asyncio.Timeout | None = None
    """Ends the request when it takes too long; access control sets it."""
    comment_s: float = 15.0
    """A stream sends a comment after so long without an event; access control sets it."""

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started_s

    @property
    def shown_id(self) -> str:
        """The id in the answer and in log lines: the client's if it gave one."""
        return self.client_id or self.request_id

    def envelope(self, error: ApiError) -> dict[str, Any]:
        """`error` in the envelope of this route's protocol."""
        if self.route.startswith(MESSAGES):
            return {**error.anthropic_envelope(), "request_id": self.shown_id}
        return error.envelope()

    def refuse(self, failure: Exception) -> Response:
        """The error response for `failure`."""
        error = self.fail(failure)
        return error_response(error, self.envelope(error))

    def note_first_token(self, metrics: GatewayMetrics) -> None:
        metrics.observe_first_token(self.route, self.elapsed_s)

    def fail(self, failure: Exception) -> ApiError:
        """Note the failure, log it if it is unexpected, and return the error for the client."""
        error = describe(failure)
        self.status, self.error_code = error.status, error.code
        if error is not failure and error.status >= 500:
            log.error(
                "request failed, unexpected error",
                request_id=self.shown_id,
                error=type(failure).__name__,
                at=_frames(failure),
            )
        return error


def exchange_of(request: Request) -> Exchange:
    exchange = request.scope["state"]["exchange"]
    assert isinstance(exchange, Exchange)
    return exchange


def _usable_id(given: str) -> str | None:
    return given if _USABLE_ID.fullmatch(given) else None


def _frames(failure: BaseException) -> list[str]:
    """The stack frames of an exception, without its message, which may quote a prompt."""
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(failure.__traceback__)]


class Telemetry:
    """ASGI middleware; turns every exception of `app` into an error envelope."""

    def __init__(self, app: ASGIApp, *, metrics: GatewayMetrics, root_path: str = "") -> None:
        """`root_path`: a prefix of the paths that a proxy in front may have left in."""
        self.app = app
        self._metrics, self._root_path = metrics, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        client_id = _usable_id(Headers(scope=scope).get(REQUEST_ID, ""))
        if {scope["path"], scope["path"].removeprefix(self._root_path)} & PROBES:
            await self._answer(scope, receive, send, Exchange(client_id=client_id))
            return
        with span("request", parent_of(scope["headers"]), SpanKind.SERVER) as recorded:
            await self._answer(scope, receive, send, Exchange(client_id=client_id, span=recorded))

    async def _answer(self, scope: Scope, receive: Receive, send: Send, exchange: Exchange) -> None:
        scope.setdefault("state", {})["exchange"] = exchange

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status, exchange.response_started = message["status"], True
                headers = MutableHeaders(scope=message)
                for name, value in {**SAFE_HEADERS, REQUEST_ID: exchange.shown_id}.items():
                    headers.setdefault(name, value)
            await send(message)

        # For all log lines of the request: its tasks inherit the context.
        outer = structlog.contextvars.bind_contextvars(request_id=exchange.shown_id)
        try:
            await self.app(scope, receive, send_with_id)
        except ClientDisconnect:
            exchange.status = CLIENT_LEFT
        except asyncio.CancelledError:
            # The server's grace period is over: answer with an error rather than drop the connection.
            if not exchange.response_started:
                await exchange.refuse(shutting_down())(scope, receive, send_with_id)
            raise
        except Exception as failure:
            response = exchange.refuse(failure)
            if not exchange.response_started:
                await response(scope, receive, send_with_id)
        finally:
            self._record(scope["method"], exchange)
            structlog.contextvars.reset_contextvars(**outer)

    def _record(self, method: str, exchange: Exchange) -> None:
        route, status, elapsed_s = exchange.route, exchange.status, exchange.elapsed_s
        self._metrics.count_request(route, status, elapsed_s)
        exchange.span.set_attributes(
            {
                "http.request.method": method,
                "http.route": route,
                "http.response.status_code": status,
                **prefixed(request_id=exchange.shown_id),
            }
        )
        if status >= 500:
            exchange.span.set_status(StatusCode.ERROR, exchange.error_code or "error")
        write = log.debug if route in PROBES else log.info
        write(
            "request",
            request_id=exchange.shown_id,
            # The id that the engine and its traces use.
            **({"engine_request_id": exchange.request_id} if exchange.client_id else {}),
            route=route,
            status=status,
            error_code=exchange.error_code,
            duration_ms=round(1000 * elapsed_s, 1),
        )

"""The outermost layer around every request: its id, its metrics, its log line, safe headers, and uncaught failures.

A plain ASGI middleware: it adds no task and does not buffer a stream.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from uuid import uuid4

import structlog
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, StatusCode
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.gateway.errors import ApiError, describe, error_response, unavailable
from serving.gateway.metrics import GatewayMetrics
from speculator.tracing import prefixed, received, span

CLIENT_LEFT = 499
"""The status that logs and metrics show where no status could be sent."""
PROBES = frozenset({"/health", "/ready", "/metrics", "/slipstream/live", "/slipstream/drafts"})
"""Routes that something polls: their log lines and spans would bury the others."""
log = structlog.get_logger(__name__)


@dataclass(kw_only=True)
class Exchange:
    """One request and what became of it; handlers reach it with `exchange_of`."""

    request_id: str = field(default_factory=lambda: uuid4().hex)
    started_s: float = field(default_factory=time.perf_counter)
    status: int = 0
    error_code: str | None = None
    response_started: bool = False
    span: Span = INVALID_SPAN
    tenant: str = "default"
    """Whose request it is; the gate knows it by the key."""
    may_capture: bool = True
    """Whether that key's requests may be recorded where they themselves do not object."""
    limit: asyncio.Timeout | None = None
    """What ends the request when it takes too long; the gate sets it."""

    def fail(self, failure: Exception) -> ApiError:
        """Note the failure, log it where nobody expected it, and return what the client is told."""
        error = describe(failure)
        self.status, self.error_code = error.status, error.code
        if error is not failure and error.status >= 500:
            log.error("request_failed", request_id=self.request_id, error=type(failure).__name__, at=_frames(failure))
        return error


def exchange_of(request: Request) -> Exchange:
    exchange = request.scope["state"]["exchange"]
    assert isinstance(exchange, Exchange)
    return exchange


def _frames(failure: BaseException) -> list[str]:
    """Where it happened. The message is left out: exceptions quote the values they choke on, and those are prompts."""
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(failure.__traceback__)]


class Telemetry:
    """ASGI middleware; everything that `app` raises ends here as an error envelope."""

    def __init__(self, app: ASGIApp, *, metrics: GatewayMetrics) -> None:
        self.app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["path"] in PROBES:
            await self._answer(scope, receive, send, Exchange())
            return
        with span("request", received(scope["headers"]), SpanKind.SERVER) as recorded:
            await self._answer(scope, receive, send, Exchange(span=recorded))

    async def _answer(self, scope: Scope, receive: Receive, send: Send, exchange: Exchange) -> None:
        scope.setdefault("state", {})["exchange"] = exchange

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status, exchange.response_started = message["status"], True
                identity = (b"x-request-id", exchange.request_id.encode())
                message["headers"] = [*with_safe_headers(message["headers"]), identity]
            await send(message)

        # For whatever logs on the request's way: its tasks inherit it.
        outer = structlog.contextvars.bind_contextvars(request_id=exchange.request_id)
        try:
            await self.app(scope, receive, send_with_id)
        except ClientDisconnect:
            exchange.status = CLIENT_LEFT
        except asyncio.CancelledError:
            # The server's grace period is over: say so rather than drop the connection.
            if not exchange.response_started:
                error = exchange.fail(unavailable("The server is shutting down.", code="shutting_down"))
                await error_response(error)(scope, receive, send_with_id)
            raise
        except Exception as failure:
            error = exchange.fail(failure)
            if not exchange.response_started:
                await error_response(error)(scope, receive, send_with_id)
        finally:
            self._record(scope, exchange)
            structlog.contextvars.reset_contextvars(**outer)

    def _record(self, scope: Scope, exchange: Exchange) -> None:
        route = getattr(scope.get("route"), "path", "unmatched")
        duration_s = time.perf_counter() - exchange.started_s
        self._metrics.requests.labels(route, str(exchange.status)).inc()
        self._metrics.duration_s.labels(route).observe(duration_s)
        self._complete_span(scope, route, exchange)
        write = log.debug if route in PROBES else log.info
        write(
            "request",
            request_id=exchange.request_id,
            route=route,
            status=exchange.status,
            error_code=exchange.error_code,
            duration_ms=round(1000 * duration_s, 1),
        )

    def _complete_span(self, scope: Scope, route: str, exchange: Exchange) -> None:
        standard = {
            "http.request.method": scope["method"],
            "http.route": route,
            "http.response.status_code": exchange.status,
        }
        exchange.span.set_attributes({**standard, **prefixed(request_id=exchange.request_id)})
        if exchange.status >= 500:
            exchange.span.set_status(StatusCode.ERROR, exchange.error_code or "error")


RawHeaders = Iterable[tuple[bytes, bytes]]
_SAFE = {
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'",
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-resource-policy": b"same-origin",
    # Answers are what people asked for, and figures are of their moment.
    b"cache-control": b"no-store",
}


def with_safe_headers(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    """`headers`, and those of ours that are not among them: the page has a policy of its own."""
    given = list(headers)
    names = {name.lower() for name, _ in given}
    return [*given, *((name, value) for name, value in _SAFE.items() if name not in names)]

"""The half of speculator/spans.py that needs OpenTelemetry; imported only where spans are on.

The tracer and the notion of a current span are ours: the global ones stay as they are, so that no library adds spans of
its own, whose attributes nobody here has chosen, and none comes between ours.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Self

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from speculator.errors import ConfigError
from speculator.spans import Span, Value

CLOSE_S = 2.0
"""How long the last spans may take: a collector that is away must not hold up a stop."""

_W3C = TraceContextTextMapPropagator()
_current: ContextVar[Context] = ContextVar("slipstream-span", default=Context())  # noqa: B039 - immutable


class Tracing:
    """Makes spans and gives them to `processor` when they end. OTEL_* variables stand before `service`."""

    def __init__(self, processor: SpanProcessor, *, service: str) -> None:
        resource = Resource.create({"service.name": service}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("slipstream")

    def span(self, name: str, attributes: Mapping[str, Value]) -> Span:
        return _Recorded(self._tracer.start_span(name, _current.get(), attributes=_named(attributes)))

    def request_span(self, name: str, headers: Iterable[tuple[bytes, bytes]]) -> Span:
        carrier = {key.decode("latin-1"): value.decode("latin-1") for key, value in headers}
        return _Recorded(self._tracer.start_span(name, _W3C.extract(carrier, Context()), trace.SpanKind.SERVER))

    def current(self) -> Context | None:
        return _sampled(_current.get())

    def joined(self, headers: Mapping[str, str]) -> Context | None:
        return _sampled(_W3C.extract(headers, Context()))

    def record(self, parent: Context, name: str, seconds: float, attributes: Mapping[str, Value]) -> None:
        now_ns = time.time_ns()
        started_ns = now_ns - int(1e9 * seconds)
        self._tracer.start_span(name, parent, attributes=_named(attributes), start_time=started_ns).end(now_ns)

    def outgoing_headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        _W3C.inject(headers, _current.get())
        return headers

    def close(self) -> None:
        # The provider's own shutdown may take half a minute.
        closing = threading.Thread(target=self._provider.shutdown, name="spans-closing", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


def exporting(service: str) -> Tracing:
    """Spans that are sent over OTLP, as OTEL_* variables say. Raises ConfigError where one of those is not usable."""
    try:
        return Tracing(BatchSpanProcessor(OTLPSpanExporter()), service=service)
    except ValueError as invalid:
        raise ConfigError(f"an OTEL_* variable is not usable: {invalid}") from None


class _Recorded(Span):
    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def __enter__(self) -> Self:
        self._outer = _current.set(trace.set_span_in_context(self._span, Context()))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _current.reset(self._outer)
        if kind is not None:
            self.fail(kind.__name__)
        self._span.end()

    def set(self, **attributes: Value) -> None:
        self._span.set_attributes(_named(attributes))

    def fail(self, reason: str) -> None:
        self._span.set_status(trace.StatusCode.ERROR, reason)


def _sampled(context: Context) -> Context | None:
    return context if trace.get_current_span(context).get_span_context().trace_flags.sampled else None


def _named(attributes: Mapping[str, Value]) -> dict[str, Value]:
    return {name if "." in name else f"slipstream.{name}": value for name, value in attributes.items()}

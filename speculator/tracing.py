"""Optional OpenTelemetry spans of requests, verifications, swaps and training steps.

By default spans are off: the tracer records nothing. With `SLIPSTREAM_OTEL=1` ended spans go into a bounded queue,
which drops the oldest when full, and a thread sends them: no caller waits. Attributes are ids, counts and times, never
text or tenants.

The tracer is not OpenTelemetry's global one, which libraries use for spans with attributes that we do not control.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from opentelemetry import trace
from opentelemetry.context import Context, get_current
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from speculator.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

VARIABLE = "SLIPSTREAM_OTEL"
CLOSE_S = 2.0
"""How long to wait at exit for the last spans: an unreachable collector must not delay a stop."""

Value: TypeAlias = str | bool | int | float
Parent: TypeAlias = Context
"""A parent span for spans that other threads record."""

_W3C = TraceContextTextMapPropagator()
_provider: TracerProvider | None = None
_tracer: trace.Tracer = trace.NoOpTracer()


def prefixed(**attributes: Value) -> dict[str, Value]:
    """Attributes with the prefix `slipstream.`."""
    return {f"slipstream.{name}": value for name, value in attributes.items()}


@contextmanager
def span(
    name: str, /, parent: Parent | None = None, kind: trace.SpanKind = trace.SpanKind.INTERNAL, **attributes: Value
) -> Iterator[trace.Span]:
    """Record a `with` block as a span, under `parent` or the span of the enclosing block.

    An exception in the block is recorded by type alone: its message may quote a prompt.
    """
    with _tracer.start_as_current_span(
        name, parent, kind, prefixed(**attributes), record_exception=False, set_status_on_exception=False
    ) as recorded:
        try:
            yield recorded
        except BaseException as failure:
            recorded.set_status(trace.StatusCode.ERROR, type(failure).__name__)
            raise


def parent_of(headers: Iterable[tuple[bytes, bytes]]) -> Parent:
    """The parent span in a received request's W3C `traceparent` header; an empty context without one."""
    carrier = {key.decode("latin-1"): value.decode("latin-1") for key, value in headers}
    return _W3C.extract(carrier, Context())


def current() -> Parent | None:
    """The span of the enclosing block; None where there is none, or it is not sampled."""
    return _sampled(get_current())


def remote_parent(headers: Mapping[str, str]) -> Parent | None:
    """The span of another process, from its `outgoing_headers`; None where they have none, or it is not sampled."""
    return _sampled(_W3C.extract(headers, Context()))


def record(parent: Parent | None, name: str, seconds: float, /, **attributes: Value) -> None:
    """Record a span that ends now and took `seconds`, under `parent`; does nothing without a parent."""
    if parent is not None:
        now_ns = time.time_ns()
        started_ns = now_ns - int(1e9 * seconds)
        _tracer.start_span(name, parent, attributes=prefixed(**attributes), start_time=started_ns).end(now_ns)


def outgoing_headers() -> dict[str, str]:
    """Headers for a request to another server, so that its spans join ours."""
    headers: dict[str, str] = {}
    _W3C.inject(headers)
    return headers


def is_enabled() -> bool:
    """Whether the environment turns spans on. Raises ConfigError for a value but 1 and 0, or without the extra."""
    match os.environ.get(VARIABLE, "0"):
        case "" | "0":
            return False
        case "1":
            try:
                import opentelemetry.exporter.otlp.proto.http.trace_exporter
                import opentelemetry.sdk.trace.export  # noqa: F401
            except ModuleNotFoundError as missing:
                fix = f"pip install 'slipstream-spec[otel]', or unset {VARIABLE}"
                raise ConfigError(f"{VARIABLE}=1 needs {missing.name}, which is not installed: {fix}") from None
            return True
        case other:
            raise ConfigError(f"{VARIABLE} is {other!r}: set it to 1 or 0")


def configure_spans(service: str) -> None:
    """Send spans over OTLP, configured by OTEL_* variables, if the environment turns them on. Raises ConfigError."""
    if is_enabled():
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        try:
            start_spans(BatchSpanProcessor(OTLPSpanExporter()), service=service)
        except ValueError as invalid:
            raise ConfigError(f"an OTEL_* variable is not usable: {invalid}") from None


def start_spans(processor: SpanProcessor, *, service: str) -> None:
    """Turn spans on; `processor` gets the ended ones. OTEL_* variables take precedence over `service`."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider

    global _provider, _tracer
    resource = Resource.create({"service.name": service}).merge(OTELResourceDetector().detect())
    _provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    _provider.add_span_processor(processor)
    _tracer = _provider.get_tracer("slipstream")


def close_spans() -> None:
    """Send queued spans for at most CLOSE_S, and turn spans off."""
    global _provider, _tracer
    provider, _provider, _tracer = _provider, None, trace.NoOpTracer()
    if provider is not None:
        # The provider's own shutdown may take half a minute.
        closing = threading.Thread(target=provider.shutdown, name="spans-closing", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


def _sampled(context: Context) -> Parent | None:
    return context if trace.get_current_span(context).get_span_context().trace_flags.sampled else None

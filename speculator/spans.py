"""Optional OpenTelemetry spans: how long a request, a verification, a swap or a training step took, and under what.

Off, which is the default, nothing of OpenTelemetry is imported here and every call returns at once. With
`SLIPSTREAM_OTEL=1` spans that have ended go into a bounded queue, which drops the oldest where it is full, and a thread
of its own sends them: no caller waits. Attributes are ids, counts and times, never text and no tenant.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Self, TypeAlias

from speculator.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from speculator.otel import Tracing

VARIABLE = "SLIPSTREAM_OTEL"

Value: TypeAlias = str | bool | int | float
Parent: TypeAlias = "Context"
"""A span that others are put under from another thread."""


class Span:
    """One that nobody records. A failure inside its block is told by its type alone: messages may quote a prompt."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        pass

    def set(self, **attributes: Value) -> None:
        """Add attributes; names without a dot are ours and get the prefix `slipstream.`."""

    def fail(self, reason: str) -> None:
        """Say that what the span stands for went wrong."""


NOTHING = Span()
_tracing: Tracing | None = None


def is_on() -> bool:
    return _tracing is not None


def span(name: str, /, **attributes: Value) -> Span:
    """A span from the start to the end of a `with` block, under the one of the block around it."""
    return NOTHING if _tracing is None else _tracing.span(name, attributes)


def request_span(name: str, headers: Iterable[tuple[bytes, bytes]], /) -> Span:
    """The same for a request that was received: it joins the trace that a W3C `traceparent` header names."""
    return NOTHING if _tracing is None else _tracing.request_span(name, headers)


def current() -> Parent | None:
    """The span of the block around the caller; None where there is none, or where it was not sampled."""
    return None if _tracing is None else _tracing.current()


def joined(headers: Mapping[str, str]) -> Parent | None:
    """The span of another process by its `outgoing_headers`; None where they name none, or one not sampled."""
    return None if _tracing is None else _tracing.joined(headers)


def record(parent: Parent | None, name: str, seconds: float, /, **attributes: Value) -> None:
    """A span that ends now and took `seconds`, under `parent`; nothing where that is None."""
    if _tracing is not None and parent is not None:
        _tracing.record(parent, name, seconds, attributes)


def outgoing_headers() -> dict[str, str]:
    """What a request to another server carries so that its spans join ours."""
    return {} if _tracing is None else _tracing.outgoing_headers()


def is_wanted() -> bool:
    """Whether the environment asks for spans. Raises ConfigError for neither 1 nor 0, or where the extra is missing."""
    match os.environ.get(VARIABLE, "0"):
        case "" | "0":
            return False
        case "1":
            try:
                import speculator.otel  # noqa: F401
            except ModuleNotFoundError as missing:
                fix = f"pip install 'slipstream-spec[otel]', or unset {VARIABLE}"
                raise ConfigError(f"{VARIABLE}=1 needs {missing.name}, which is not installed: {fix}") from None
            return True
        case other:
            raise ConfigError(f"{VARIABLE} is {other!r}: set it to 1 or 0")


def configure_spans(service: str) -> None:
    """Turn spans on where the environment asks for them. Raises ConfigError."""
    global _tracing
    if is_wanted():
        from speculator.otel import exporting

        _tracing = exporting(service)


def close_spans() -> None:
    """Send what is queued, for at most a moment, and turn spans off."""
    global _tracing
    tracing, _tracing = _tracing, None
    if tracing is not None:
        tracing.close()

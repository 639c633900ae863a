"""Configure logs for every command: standard error, one line an event, readable on a terminal, else JSON.

Of libraries only warnings and errors are logged, whatever the level: HTTP clients log bodies at debug level.
Lines have the request id where there is one. No line has a prompt or an answer. An exception whose message may quote
such a value is logged by its type and its place alone.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal, TextIO, cast

import structlog
from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict
from structlog.typing import EventDict, Processor

from speculator.errors import SlipstreamError
from speculator.host import invalid_setting

ENV_PREFIX = "SLIPSTREAM_LOG_"

HANDLER = "slipstream"
"""Name of the logging handler that this module installs."""

_MESSAGE_IS_SAFE = (SlipstreamError, OSError, MemoryError, RuntimeError)
"""Their messages are about the machine or written by us. ValueError, KeyError and others may quote a prompt."""


class LogSettings(BaseSettings):
    """How services log."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid", use_attribute_docstrings=True)

    format: Literal["auto", "json", "console"] = "auto"
    """`auto` is readable on a terminal and JSON elsewhere."""
    level: Literal["debug", "info", "warning", "error"] = Field(default="info")
    """Lowest level that is logged; `debug` adds health probes."""


def load_settings() -> LogSettings:
    """The settings of this process's environment; raises ConfigError naming the variable at fault."""
    try:
        return LogSettings()
    except ValidationError as invalid:
        raise invalid_setting(ENV_PREFIX, invalid) from None


def configure_logs() -> None:
    """Send the logs of this process, our own and libraries', to standard error. Raises ConfigError for bad settings."""
    settings = load_settings()
    as_json = settings.format == "json" or (settings.format == "auto" and not sys.stderr.isatty())
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    renderer: Processor = structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer()
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _exceptions_without_values,
    ]
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        # One write a line, newline included: several ranks share a standard error that torchrun does not buffer.
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, _StandardError())),
    )
    _configure_libraries([*shared, _first_line], renderer)
    _log_uncaught_exceptions()
    # Transformers reads this at import. It would log advice on loading quantised weights, which we convert instead.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if as_json:
        # tqdm reads its variable at import, too; the hub's bars have one of their own.
        for name in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(name, "1")


class _StandardError:
    """Standard error at each call: a progress bar replaces it, and prints lines above itself.

    A line that cannot be written is lost. On a full disk, or behind a pipe that nobody reads, an exception would fail
    the request or the thread that logs.
    """

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.flush()


class _Handler(logging.StreamHandler[TextIO]):
    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _configure_libraries(shared: list[Processor], renderer: Processor) -> None:
    handler = _Handler()
    handler.set_name(HANDLER)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [*(other for other in root.handlers if other.get_name() != HANDLER), handler]
    root.setLevel(logging.WARNING)
    logging.captureWarnings(True)


def _log_uncaught_exceptions() -> None:
    """Log uncaught exceptions like other events: Python's own hook would print their messages."""
    sys.excepthook = _log_uncaught
    # Keep a hook that another set: a test runner collects exceptions of threads.
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _log_uncaught_in_thread


def _log_uncaught(kind: type[BaseException], failure: BaseException, frames: TracebackType | None) -> None:
    if isinstance(failure, KeyboardInterrupt):
        sys.__excepthook__(kind, failure, frames)
    else:
        structlog.get_logger().critical("uncaught exception", exc_info=failure)


def _log_uncaught_in_thread(failed: threading.ExceptHookArgs) -> None:
    # A panic in Rust is no Exception. SystemExit ends a thread in order.
    if not isinstance(failed.exc_value, SystemExit):
        name = None if failed.thread is None else failed.thread.name
        structlog.get_logger().critical("uncaught exception", thread=name, exc_info=failed.exc_value)


def _exceptions_without_values(_: Any, __: str, event: EventDict) -> EventDict:
    """Replace an event's exception by its chain of types and frames, with only the messages that are safe."""
    info = event.pop("exc_info", None)
    if info is True:
        info = sys.exc_info()
    failure = info[1] if isinstance(info, tuple) else info
    if isinstance(failure, BaseException):
        event["exception"] = "".join(_told(failure))
    return event


def _told(failure: BaseException) -> Iterator[str]:
    cause = failure.__cause__ or (None if failure.__suppress_context__ else failure.__context__)
    if cause is not None:
        yield from _told(cause)
        yield "\nwhich led to:\n"
    yield from traceback.format_tb(failure.__traceback__)
    yield type(failure).__name__ + (f": {failure}" if isinstance(failure, _MESSAGE_IS_SAFE) else "")


def _first_line(_: Any, __: str, event: EventDict) -> EventDict:
    """Keep the first line of an event: asyncio appends reprs, exceptions among them, on further lines."""
    event["event"] = str(event["event"]).split("\n", 1)[0]
    return event

"""Where logs are configured, for every command: standard error, one line an event, readable on a terminal, else JSON.

Libraries are heard from warnings on only, whatever the level: clients of HTTP log bodies at debug level.
Lines carry the request id where there is one. No line carries a prompt or an answer: our events name what happened, and
an exception whose message may quote the value that it choked on is told by its type and its place alone.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Literal, TextIO

import structlog
from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict
from structlog.typing import EventDict, Processor

from speculator.errors import SlipstreamError
from speculator.host import unusable

ENV_PREFIX = "SLIPSTREAM_LOG_"

HANDLER = "slipstream"
"""Name of the one handler that is ours."""

_MESSAGE_IS_SAFE = (SlipstreamError, OSError, MemoryError, RuntimeError)
"""About the machine or written by us. ValueError, KeyError and their like quote values, and those may be prompts."""


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
        raise unusable(ENV_PREFIX, invalid) from None


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
        # One write a line, its end included: several ranks share a standard error that torchrun does not buffer.
        # To what stands there now: a progress bar puts itself there, and keeps lines above it.
        logger_factory=lambda *_: structlog.WriteLogger(sys.stderr),
    )
    _configure_libraries([*shared, _first_line], renderer)
    _tell_what_nobody_catches()
    # Read when it is imported. It advises how to load quantised weights, which are converted here.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if as_json:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


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


def _tell_what_nobody_catches() -> None:
    """As a line like the others: Python's own way to tell an exception has the message in it."""
    sys.excepthook = _tell_uncaught
    # A hook that somebody else has set is theirs: a test runner collects what threads leave behind.
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _tell_uncaught_in_thread


def _tell_uncaught(kind: type[BaseException], failure: BaseException, frames: TracebackType | None) -> None:
    if isinstance(failure, Exception):
        structlog.get_logger().critical("uncaught exception", exc_info=failure)
    else:
        sys.__excepthook__(kind, failure, frames)


def _tell_uncaught_in_thread(failed: threading.ExceptHookArgs) -> None:
    if isinstance(failed.exc_value, Exception):
        name = None if failed.thread is None else failed.thread.name
        structlog.get_logger().critical("uncaught exception", thread=name, exc_info=failed.exc_value)


def _exceptions_without_values(_: Any, __: str, event: EventDict) -> EventDict:
    """Tell an exception by its chain of types and frames, with the messages that are safe to tell."""
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
    """asyncio appends the reprs of what it complains about, exceptions among them, on further lines."""
    event["event"] = str(event["event"]).split("\n", 1)[0]
    return event

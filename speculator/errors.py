"""The exception tree.

SlipstreamError
├── ConfigError            a setting is wrong: the command line prints one line and exits with code 2
├── TraceError             a trace cannot be decoded or does not fit: it goes to the dead-letter stream
│   └── UnknownSchemaError   written with a schema version that this code does not read
├── GroupTextError         bytes are not the text of a prompt group: that text is not used
├── DraftError             a draft version is unusable; the version in service stays
│   ├── DraftFileError       truncated, altered, not finite, wrong names, shapes or types
│   └── DraftMismatchError   made for another target or another draft vocabulary
├── TargetError            new weights for the target are unusable; those in service stay
├── StoreError             the draft store cannot be read or written
│   ├── UnknownDraftError    it holds no such version
│   └── VersionTakenError    it has a version of that number, or had one
├── LifecycleError         a draft version's state does not allow the transition
├── StreamError            Redis refuses or cannot be reached
├── PeerLostError          another training rank is gone: all ranks restart from the checkpoint
└── EngineError            the engine cannot serve
    ├── RequestError         this request can never be served (400)
    ├── EngineBusyError      the queue is full; try again (429)
    └── EngineDeadError      the engine stopped (503)
"""

from __future__ import annotations

import traceback


class SlipstreamError(Exception):
    """Base of every error that Slipstream raises on purpose."""


class ConfigError(SlipstreamError, ValueError):
    """A setting is wrong; the message names the setting and the fix."""


class TraceError(SlipstreamError, ValueError):
    """Bytes are not a valid trace."""


class UnknownSchemaError(TraceError):
    """The trace was written with a schema version that this code does not read."""


class GroupTextError(SlipstreamError, ValueError):
    """Bytes are not the text of a prompt group."""


class DraftError(SlipstreamError):
    """A draft version cannot be used."""


class DraftFileError(DraftError):
    """The file of a draft is damaged or has the wrong names, shapes, types or values."""


class DraftMismatchError(DraftError):
    """The draft belongs to another target or to another draft vocabulary."""


class TargetError(SlipstreamError):
    """The announced target weights are unusable."""


class StoreError(SlipstreamError):
    """The draft store cannot be read or written."""


class UnknownDraftError(StoreError):
    """There is no such version in the draft store."""


class VersionTakenError(StoreError):
    """The draft store has a version of the number that was asked for, or had one."""


class LifecycleError(SlipstreamError):
    """A draft version's state does not allow the requested transition."""


class StreamError(SlipstreamError):
    """Redis cannot be reached or refuses the command."""


class PeerLostError(SlipstreamError):
    """Another rank of the trainer is gone, or does not answer."""


class EngineError(SlipstreamError):
    """The engine cannot serve."""


class RequestError(EngineError, ValueError):
    """The request itself can never be served; `param` names the field at fault."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class EngineBusyError(EngineError):
    """The queue is full; the client may try again after `retry_after_s`."""

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDeadError(EngineError):
    """The engine stopped and cannot generate."""


def type_and_place(error: BaseException) -> str:
    """Type and code locations of an exception, for logs; without its message, which may quote a user's text."""
    place = traceback.extract_tb(error.__traceback__)[-1:]
    return type(error).__name__ + "".join(f" at {frame.filename}:{frame.lineno}" for frame in place)

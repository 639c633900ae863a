"""One thing that `slipstream doctor` found out."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """Works, but costs something that an operator should know of."""
    FAILED = "failed"
    """Something that is needed does not work."""
    SKIPPED = "skipped"
    """Not looked at, for want of an option."""


@dataclass(frozen=True)
class Finding:
    """`detail` says what is so and, unless all is well, how to mend it."""

    name: str
    level: Level
    detail: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def ok(name: str, detail: str) -> Finding:
    return Finding(name, Level.OK, detail)


def warning(name: str, detail: str) -> Finding:
    return Finding(name, Level.WARNING, detail)


def failed(name: str, detail: str) -> Finding:
    return Finding(name, Level.FAILED, detail)


def skipped(name: str, detail: str) -> Finding:
    return Finding(name, Level.SKIPPED, detail)

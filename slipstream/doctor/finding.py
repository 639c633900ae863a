"""Findings of `slipstream doctor`, and how it runs a check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from speculator.errors import SlipstreamError


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """Works, but with a drawback that an operator should know."""
    FAILED = "failed"
    """Something that is needed does not work."""
    SKIPPED = "skipped"
    """Not checked, because an option or a right is missing."""


@dataclass(frozen=True)
class Finding:
    """The result of a check; `detail` says what was found and, unless it is ok, how to fix it."""

    level: Level
    name: str
    detail: str


ok = partial(Finding, Level.OK)
warning = partial(Finding, Level.WARNING)
failed = partial(Finding, Level.FAILED)
skipped = partial(Finding, Level.SKIPPED)

Check = Callable[[], Iterator[Finding]]


def run_check(name: str, check: Check) -> Iterator[Finding]:
    """Run a check and yield its findings; an exception becomes a failed finding."""
    try:
        yield from check()
    except SlipstreamError as error:
        yield failed(name, str(error))
    except Exception as error:  # an unforeseen failure of one check must not end the others
        yield failed(name, f"the check itself failed unexpectedly ({type(error).__name__}: {error})")

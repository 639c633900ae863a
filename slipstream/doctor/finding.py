"""What `slipstream doctor` finds out, and how a check is run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from speculator.errors import SlipstreamError


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

    level: Level
    name: str
    detail: str


ok = partial(Finding, Level.OK)
warning = partial(Finding, Level.WARNING)
failed = partial(Finding, Level.FAILED)
skipped = partial(Finding, Level.SKIPPED)

Check = Callable[[], Iterator[Finding]]


def run_check(name: str, check: Check) -> Iterator[Finding]:
    """What a check finds; what it raises is a finding, too."""
    try:
        yield from check()
    except SlipstreamError as error:
        yield failed(name, str(error))
    except Exception as error:  # a sick machine fails in ways that nobody has thought of: say so, and look at the rest
        yield failed(
            name, f"this check itself failed ({type(error).__name__}: {error}): what it looks at is not as usual"
        )

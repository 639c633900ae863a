"""Guard the calls into the plugin's parts: an error in one turns that part off and leaves SGLang's step alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import structlog

from speculator.errors import type_and_place

log = structlog.get_logger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


class PartGuard:
    """Guards the calls into one part of the plugin: its first error turns the part off.

    For the scheduler's thread. SGLang's own functions are never called inside.
    """

    def __init__(self, part: str, *, off: Callable[[], object] = lambda: None, holds: bool = True) -> None:
        """`off` is called once, after the first failure: it frees what the part holds.

        `holds` is False where ranks must agree on the part: a failure then ends the server, since ranks that disagree
        wait for each other for ever.
        """
        self.part, self._off, self._holds = part, off, holds
        self.reason = ""
        """The type of the error that turned the part off; empty while it is on."""

    @property
    def is_off(self) -> bool:
        return bool(self.reason)

    def __call__(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """The result of `work`; None where the part is off, or is turned off now."""
        if self.is_off:
            return None
        try:
            return work(*args, **kwargs)
        except Exception as error:
            self.reason = type(error).__name__
            if not self._holds:
                log.critical(
                    "slipstream: a part failed on one rank, the server ends",
                    part=self.part,
                    error=type_and_place(error),
                )
                raise
            log.error(
                "slipstream: a part is off from now on, serving goes on", part=self.part, error=type_and_place(error)
            )
        # Outside the handler, so that the tensors of the failed call are free.
        try:
            self._off()
        except Exception as error:
            log.error("slipstream: a part could not free what it held", part=self.part, error=type_and_place(error))
        return None


def failed_parts(guards: tuple[PartGuard, ...]) -> dict[str, str]:
    """The field of the engine's report: parts that are off, by the error that turned them off."""
    return {"failures": ",".join(f"{guard.part}:{guard.reason}=1" for guard in guards if guard.is_off)}

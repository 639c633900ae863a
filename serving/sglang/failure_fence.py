"""What fails in a part of the plugin turns that part off; it never ends a step of SGLang."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from speculator.errors import type_and_place

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)


class Fence:
    """Around the calls of one part, on the scheduler's thread. SGLang's own functions are called outside of it."""

    def __init__(self, part: str, *, off: Callable[[], object] = lambda: None, holds: bool = True) -> None:
        """`off` is called once, after the first failure: it frees what the part holds.

        `holds` is False where other ranks would go on without this one: a failure then ends the server, since ranks
        that part wait for each other for ever.
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
                log.critical("slipstream: %s failed, and other ranks go on: %s", self.part, type_and_place(error))
                raise
            log.error("slipstream: %s is off from now on, serving goes on: %s", self.part, type_and_place(error))
        # Behind the handler: by now the tensors of the failed call are free.
        try:
            self._off()
        except Exception as error:
            log.error("slipstream: %s did not end in order: %s", self.part, type_and_place(error))
        return None


def of_fences(fences: tuple[Fence, ...]) -> dict[str, str]:
    """The field of the engine's report: parts that are off, by the error that turned them off."""
    return {"failures": ",".join(f"{fence.part}:{fence.reason}=1" for fence in fences if fence.is_off)}

"""Where a group's samples may run.

Anywhere is queue scheduling with prompt replication as in ROLL Flash (arXiv 2510.11345): the samples of a prompt are
work items of their own, and whichever engine has a free slot takes the next one; there is no batch whose end anything
waits for. The baseline keeps a group together: on the engine that asks first, or dealt to engines in turn before
anything runs, as a synchronous rollout splits its batch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Placement:
    keeps_groups: bool = False
    dealt_to: tuple[str, ...] = ()
    """Engines that get whole groups in turn; none: the first that asks gets the group."""

    def engine_of(self, group_number: int, lost: Collection[str] = ()) -> str | None:
        """The engine of a group when it is submitted, none of the `lost`; None where it is open."""
        engines = [engine for engine in self.dealt_to if engine not in lost]
        return engines[group_number % len(engines)] if engines else None


ANYWHERE = Placement()
TOGETHER = Placement(keeps_groups=True)


def dealt(engines: tuple[str, ...]) -> Placement:
    return Placement(keeps_groups=True, dealt_to=engines)

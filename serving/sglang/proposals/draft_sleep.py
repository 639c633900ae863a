"""When the draft is not even kept up to date: nothing is gained from it, and reading along costs a pass a step.

At depth 0 SGLang's draft still reads every committed token, so that it could propose again at once. A draft that has
learnt nothing, or that has lately cost more time than it has saved, its reading included, sleeps instead. What a
request commits meanwhile the draft never reads, so requests that ran while it slept are cold: alone they are decoded
plainly, beside others they are drafted for with little hope, and they say nothing about how good the draft is. A new
version wakes it, and so does time, to have a look at requests that are fresh.

One that has learnt nothing reads no prompts, either: keys and values of random weights are of no use to the version
that comes after. One that has learnt goes on reading them, since time may wake it at any step.

SGLang caches the prefixes of both. What a request left there before any version had learnt has no keys and values of
the draft, so requests that come later have a prefix cache of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SLEEP_AFTER_STEPS = 100
"""At the earliest: as many does a draft get to show what it is worth."""
_MEMORY = 0.99
"""What a step's saving still weighs after another: half after 69."""
LOOK_EVERY_STEPS = 4000
_COLD = "_slipstream_cold"


class Dormancy:
    """Counts decode steps; used by the scheduler's thread. Ranks that run in step sleep and wake together."""

    def __init__(self, *, is_fresh: bool) -> None:
        """`is_fresh` says that the draft has learnt nothing: it sleeps until there is another version."""
        self._began_fresh = self._is_fresh = self.is_asleep = is_fresh
        self._steps = 0
        """Since it fell asleep or awoke."""
        self._saved = 0.0
        """Plain steps, fading."""

    @property
    def reads_prompts(self) -> bool:
        return not self._is_fresh

    @property
    def prefix_namespace(self) -> str:
        """Keeps prefixes apart that the draft has not read; empty where there are none."""
        return "read-by-draft" if self._began_fresh and not self._is_fresh else ""

    def slept(self) -> bool:
        """A decode step while it is asleep; returns whether it woke the draft."""
        self._steps += 1
        if not self._is_fresh and self._steps >= LOOK_EVERY_STEPS:
            self.wake()
            return True
        return False

    def saved(self, share: float) -> None:
        """What a step while it is awake has saved, in plain steps; below zero it has cost as much.

        Steps in which all requests are cold are not told: nobody sees there how good the draft is.
        """
        self._steps += 1
        self._saved = _MEMORY * self._saved + share
        if self._steps >= SLEEP_AFTER_STEPS and self._saved < 0:
            self.is_asleep, self._steps = True, 0

    def wake(self) -> None:
        self._is_fresh = self.is_asleep = False
        self._steps, self._saved = 0, 0.0

    def mark(self, requests: list[Any]) -> None:
        """Requests whose tokens the draft does not read now: they go cold."""
        for request in requests:
            setattr(request, _COLD, True)

    @staticmethod
    def is_cold(request: Any) -> bool:
        return getattr(request, _COLD, False)

    def are_cold(self, requests: Sequence[Any]) -> bool:
        """All of them, if there are any."""
        return bool(requests) and all(self.is_cold(request) for request in requests)

"""Let the draft sleep, which saves a pass a step, while nothing is gained from it.

At depth 0 SGLang's draft still reads every committed token, so that it can propose again at once. A draft that has
learnt nothing, or that has lately cost more time than it has saved, its reading included, sleeps instead. A sleeping
draft never reads what a request commits meanwhile, so its KV cache for this request has a gap: the request is cold.
Cold requests alone are decoded plainly, and beside others they are drafted for with little hope. They do not count in
how good the draft is. A new version wakes the draft. So does time, to try it on fresh requests.

A draft that has learnt nothing reads no prompts, either: keys and values of random weights are of no use to the next
version. One that has learnt goes on reading prompts, since time may wake it at any step.

SGLang caches prefixes whether the draft has read them or not. Those from before the first version that has learnt lack
the draft's keys and values, so later requests have a prefix cache of their own. Answers that were decoded while a
draft that has learnt slept stay in the cache, and later turns on them judge versions: to leave out all requests with a
cached prefix would often leave none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SLEEP_AFTER_STEPS = 100
"""Steps in which a draft may show what it is worth before it may sleep."""
_MEMORY = 0.99
"""Weight of a step's saving after each later step: half after 69."""
PROBE_EVERY_STEPS = 4000
_COLD = "_slipstream_cold"


class DraftSleep:
    """Decides when the draft sleeps; used by the scheduler's thread. It counts steps, so all ranks sleep and wake
    together.
    """

    def __init__(self, *, is_fresh: bool) -> None:
        """`is_fresh` says that the draft has learnt nothing: it sleeps until there is another version."""
        self._began_fresh = self._is_fresh = self.is_asleep = is_fresh
        self._steps = 0
        """Since it fell asleep or awoke."""
        self._saved = 0.0
        """Time saved lately, in plain steps; older savings fade."""

    @property
    def reads_prompts(self) -> bool:
        return not self._is_fresh

    @property
    def prefix_namespace(self) -> str:
        """Separates prefixes that the draft has read from older ones in SGLang's cache; empty where no such are."""
        return "read-by-draft" if self._began_fresh and not self._is_fresh else ""

    def count_step(self) -> bool:
        """Count a decode step while it is asleep; returns whether it woke the draft."""
        self._steps += 1
        if not self._is_fresh and self._steps >= PROBE_EVERY_STEPS:
            self.wake()
            return True
        return False

    def add_saving(self, share: float) -> None:
        """Count what a step while it is awake has saved, in plain steps; negative where it has cost time.

        Leave out steps in which all requests are cold: they do not show how good the draft is.
        """
        self._steps += 1
        self._saved = _MEMORY * self._saved + share
        if self._steps >= SLEEP_AFTER_STEPS and self._saved < 0:
            self.is_asleep, self._steps = True, 0

    def wake(self) -> None:
        self._is_fresh = self.is_asleep = False
        self._steps, self._saved = 0, 0.0

    def mark(self, requests: list[Any]) -> None:
        """Make these requests cold: the draft does not read their tokens."""
        for request in requests:
            setattr(request, _COLD, True)

    def released(self, request: Any) -> None:
        """Note that a request gives up its KV cache. If it goes on, the draft reads it again, and it is no longer cold.

        But not where SGLang may have cached its prompt before a draft could read it.
        """
        if not request.finished() and not self._is_fresh and self.prefix_namespace in (request.extra_key or ""):
            setattr(request, _COLD, False)

    @staticmethod
    def is_cold(request: Any) -> bool:
        return getattr(request, _COLD, False)

    def are_cold(self, requests: Sequence[Any]) -> bool:
        """Whether there are any, and all are cold."""
        return bool(requests) and all(self.is_cold(request) for request in requests)

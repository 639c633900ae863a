"""How many bytes of traces a second may be captured."""

from __future__ import annotations

import time
from collections.abc import Callable

_BURST_S = 2.0


class ByteBudget:
    """A token bucket of encoded bytes: requests are admitted while it is not overdrawn."""

    def __init__(self, bytes_per_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = bytes_per_s, clock
        self._balance, self._at_s = bytes_per_s * _BURST_S, clock()

    def admits(self) -> bool:
        if self._rate == 0:
            return True
        now_s = self._clock()
        self._balance = min(self._balance + (now_s - self._at_s) * self._rate, self._rate * _BURST_S)
        self._at_s = now_s
        return self._balance > 0

    def spend(self, num_bytes: int) -> None:
        self._balance -= num_bytes

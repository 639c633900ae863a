"""How much a key may ask for at once and in a minute, and how much all of them together: beyond it, 429.

Kept in this process: two gateways with one key file count each for itself. Everything happens on the event loop.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable

from serving.gateway.auth.keys import ApiKey
from serving.gateway.errors import ApiError

_WINDOW_S = 60.0
_SLOT_RETRY_S = 1
"""How long to wait for somebody's answer to end: nobody knows, and a client that asks each second does no harm."""


class Quota:
    def __init__(
        self, max_in_flight: int, clock: Callable[[], float] = time.monotonic, *, max_of_key: int | None = None
    ) -> None:
        """`max_of_key` is for keys that have no limit of their own; by default they may have all."""
        self._max_in_flight, self._clock = max_in_flight, clock
        self._max_of_key = max_of_key or max_in_flight
        self._num_in_flight = 0
        # By digest: a key that is revoked and made anew under the same name begins anew.
        self._num_of: defaultdict[str, int] = defaultdict(int)
        self._begun_s: dict[str, deque[float]] = {}

    def take(self, key: ApiKey | None) -> Callable[[], None]:
        """Count a request in, and return what counts it out; raises ApiError (429) where there is no room for it."""
        if self._num_in_flight >= self._max_in_flight:
            message = f"{self._max_in_flight} requests are under way here, as many as may be: retry later."
            raise ApiError(429, message, code="gateway_busy", retry_after_s=_SLOT_RETRY_S)
        if key is not None:
            self._check_concurrency(key)
            self._check_rate(key)
        owner = "" if key is None else key.sha256
        self._num_in_flight += 1
        self._num_of[owner] += 1

        def release() -> None:
            self._num_in_flight -= 1
            self._num_of[owner] -= 1
            if not self._num_of[owner]:
                del self._num_of[owner]

        return release

    def _check_concurrency(self, key: ApiKey) -> None:
        limit = key.max_concurrent or self._max_of_key
        if self._num_of.get(key.sha256, 0) >= limit:
            message = f"This key may have {limit} requests under way at once, and has: retry later."
            raise ApiError(429, message, code="concurrency_limit_exceeded", retry_after_s=_SLOT_RETRY_S)

    def _check_rate(self, key: ApiKey) -> None:
        """Last, since it counts the request."""
        limit = key.requests_per_minute
        if limit is None:
            return
        now_s = self._clock()
        if key.sha256 not in self._begun_s:
            self._forget(now_s)
        begun_s = self._begun_s.setdefault(key.sha256, deque())
        while begun_s and begun_s[0] <= now_s - _WINDOW_S:
            begun_s.popleft()
        if len(begun_s) >= limit:
            # When so many have left the window that there is room; the limit may have been lowered meanwhile.
            wait_s = max(1, math.ceil(begun_s[-limit] + _WINDOW_S - now_s))
            message = f"This key may begin {limit} requests a minute: retry in {wait_s} s."
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after_s=wait_s)
        begun_s.append(now_s)

    def _forget(self, now_s: float) -> None:
        """Drop the keys that have begun nothing in the last minute: those that are revoked never come again."""
        idle = [sha256 for sha256, begun_s in self._begun_s.items() if begun_s[-1] <= now_s - _WINDOW_S]
        for sha256 in idle:
            del self._begun_s[sha256]

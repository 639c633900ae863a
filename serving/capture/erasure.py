"""What an engine process keeps of its traffic, and lets go of: on an order to erase a tenant, and by age."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from speculator.errors import StreamError

Forget = Callable[[Collection[str]], None]
"""Drops everything that is kept of these tenants; returns when it is done."""

log = logging.getLogger(__name__)


class ErasureWatch:
    """Carries out orders (speculator/redis/trace_deletion.py). `look` is called with every report of the engine, on
    its thread.

    By when a trace was made is not asked: whatever is here when the order arrives goes.
    """

    def __init__(
        self,
        orders: Callable[[], Mapping[str, int]],
        forget: Sequence[Forget],
        *,
        expire: Callable[[], None] = lambda: None,
    ) -> None:
        """`expire` drops what is too old."""
        self._orders, self._forget, self._expire = orders, forget, expire
        self._done: Mapping[str, int] = {}

    def look(self) -> dict[str, str | int | float]:
        """The time of the newest order that is carried out, for the engine's report; Redis may be away."""
        self._expire()
        try:
            orders = self._orders()
        except StreamError as error:
            log.warning("orders to forget not known for now: %s", error)
        else:
            if tenants := {tenant for tenant, at_ms in orders.items() if self._done.get(tenant) != at_ms}:
                for forget in self._forget:
                    forget(tenants)
            self._done = orders
        return {"erased_ms": max(self._done.values(), default=0)}

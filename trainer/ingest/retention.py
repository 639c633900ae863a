"""Which traces are to be forgotten: those of an erased tenant up to its order, and those that are too old.

The trainer looks every LOOK_S. Between two looks it answers by the orders it knows.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable

import structlog

from speculator.errors import StreamError
from speculator.host import now_ms
from speculator.redis.trace_deletion import Erasures, Remover, TrainerReport, covers
from trainer.metrics import TrainerMetrics
from trainer.replay.provenance import Provenance, Stored

LOOK_S = 1.0
REASONS = ("erased", "expired")

log = structlog.get_logger()


class Forgetting:
    """`name` is the process's in Redis; `ttl_s` 0 sets no limit of age; `clock` gives seconds since the epoch."""

    def __init__(
        self,
        erasures: Erasures,
        remover: Remover,
        *,
        name: str,
        ttl_s: float,
        metrics: TrainerMetrics,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._erasures, self._remover, self._name, self._ttl_s = erasures, remover, name, ttl_s
        self._metrics, self._clock = metrics, clock
        self._orders: dict[str, int] = {}
        self._are_known = False
        self._removed: Counter[str] = Counter()
        self._looked_s: float | None = None

    def reason(self, provenance: Provenance) -> str | None:
        """Of REASONS, why a trace is to be forgotten; None where it may be kept."""
        if covers(self._orders, provenance.tenant, provenance.created_ms):
            return "erased"
        too_old = self._ttl_s and self._clock() - provenance.created_ms / 1000 > self._ttl_s
        return "expired" if too_old else None

    def reason_in_recording(self, provenance: Provenance) -> str | None:
        """The same for an operator's recording: whoever chose it chose its age, too."""
        return "erased" if self.reason(provenance) == "erased" else None

    @property
    def may_have_orders(self) -> bool:
        """Some tenant is to be forgotten, or Redis has not said yet that none is."""
        return bool(self._orders) or not self._are_known

    def look(self) -> bool:
        """True where it was time to look: remove what has a reason, then `report`. Redis being away is no error."""
        now_s = time.monotonic()
        if self._looked_s is not None and now_s - self._looked_s < LOOK_S:
            return False
        self._looked_s = now_s
        try:
            self._orders, self._are_known = self._erasures.orders(), True
        except StreamError as error:
            self._failed(error)
        return True

    def sweep(self) -> bool:
        """Take what the orders cover out of the stream: an engine that was cut off may send it afterwards.

        False where it is to be done again.
        """
        orders = dict(self._orders)
        if not orders:
            return self._are_known
        try:
            self._remover.remove(lambda header: covers(orders, header.tenant, header.created_ms), unreadable=False)
        except StreamError as error:
            self._failed(error)
            return False
        return True

    def removed(self, traces: Iterable[Stored]) -> None:
        """Count what was removed from memory and disk."""
        for stored in traces:
            reason = self.reason(stored.provenance) or "expired"
            self._metrics.forgotten.labels(reason).inc()
            if reason == "erased":
                self._removed[stored.provenance.tenant] += 1

    def report(self) -> None:
        """Say that everything that the orders cover is gone from here."""
        report = TrainerReport(
            at_ms=now_ms(),
            erased_ms=max(self._orders.values(), default=0),
            removed={tenant: self._removed[tenant] for tenant in self._orders},
        )
        try:
            self._erasures.report(self._name, report)
        except StreamError as error:
            self._failed(error)

    def close(self) -> None:
        try:
            self._erasures.leave(self._name)
        except StreamError as error:
            self._failed(error)

    def _failed(self, error: StreamError) -> None:
        self._metrics.stream_errors.labels("erasures").inc()
        log.warning("orders to forget not known for now", error=str(error))

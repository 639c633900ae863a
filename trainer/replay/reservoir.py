"""The traces that were learnt from and are kept for more, within a number of bytes.

    keep ──▶ recent ──(too many)──▶ its domain's reservoir ──(no room)──▶ given up

`recent` is the traffic of now. The reservoirs keep an even sample of every domain's past, so that traffic that moves
away and comes back finds a draft that has not forgotten it. The domain that holds most gives way first, and before it a
tenant that holds more than its share.

**Reservoir sampling** keeps an even sample of all traces of a domain that ever came. It goes by random keys: every
trace has a number drawn from its text, and the traces with the smallest are kept (bottom-k sampling). Each subset of
the domain's history is as likely as with Vitter's algorithm R, and it does not matter in which order traces came or
come back: after a restart the same history gives the same sample, without a count of what was seen.
"""

from __future__ import annotations

import bisect
import hashlib
from collections import Counter, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from trainer.replay.provenance import Stored


@dataclass(kw_only=True, eq=False)
class Slot:
    """One place in the replay's memory. `stored` is replaced when the same text comes again."""

    stored: Stored
    domain: str
    tenant: str
    priority: float
    key: float
    """In [0, 1), even over texts."""
    learnt: bool = False
    """A step has seen it, or it was passed over; it waits otherwise."""

    @property
    def num_bytes(self) -> int:
        return self.stored.num_bytes

    @property
    def num_tokens(self) -> int:
        return self.stored.num_bases


def sampling_key(text_hash: bytes, seed: int) -> float:
    """The seed keeps a client from choosing texts that are never replaced."""
    digest = hashlib.blake2b(text_hash, digest_size=7, key=str(seed).encode()).digest()
    return int.from_bytes(digest) / 2.0**56


class Reservoir:
    """One domain's sample, apart by tenant so that a tenant above its share gives way first."""

    def __init__(self) -> None:
        self._by_tenant: dict[str, list[Slot]] = {}  # by key, ascending

    def __iter__(self) -> Iterator[Slot]:
        for slots in self._by_tenant.values():
            yield from slots

    def add(self, slot: Slot) -> None:
        bisect.insort(self._by_tenant.setdefault(slot.tenant, []), slot, key=_key)

    def remove(self, slot: Slot) -> None:
        """Raises ValueError where it is not here."""
        slots = self._by_tenant.get(slot.tenant, [])
        slots.remove(slot)
        if not slots:
            del self._by_tenant[slot.tenant]

    def num_bytes(self, tenants: Collection[str]) -> int:
        return sum(slot.num_bytes for tenant in tenants for slot in self._by_tenant.get(tenant, []))

    def last(self, tenants: Collection[str]) -> Slot | None:
        """The trace to give up next among those of `tenants`: the one with the largest key."""
        last = [slots[-1] for tenant in tenants if (slots := self._by_tenant.get(tenant))]
        return max(last, key=_key, default=None)


def _key(slot: Slot) -> float:
    return slot.key


class Memory:
    """Learnt traces by age, domain and tenant; iteration starts with the reservoirs and ends with the newest trace."""

    def __init__(self, *, max_bytes: int, recent_share: float, max_tenant_share: float) -> None:
        self._max_bytes = max_bytes
        self._max_recent_bytes = recent_share * max_bytes
        self._max_tenant_bytes = max_tenant_share * max_bytes
        self._recent: deque[Slot] = deque()
        self._recent_bytes = 0
        self._reservoirs: dict[str, Reservoir] = {}
        self.num_bytes_by_tenant: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Slot]:
        for reservoir in self._reservoirs.values():
            yield from reservoir
        yield from self._recent

    @property
    def num_bytes(self) -> int:
        return self.num_bytes_by_tenant.total()

    def keep(self, slot: Slot) -> None:
        """Take a trace as the newest; call `make_room` afterwards."""
        slot.learnt = True
        self._recent.append(slot)
        self._recent_bytes += slot.num_bytes
        self.num_bytes_by_tenant[slot.tenant] += slot.num_bytes

    def renew(self, slot: Slot, stored: Stored) -> None:
        """Replace what a place holds by another trace of the same text, which takes no more room."""
        difference = stored.num_bytes - slot.num_bytes
        assert difference <= 0
        self.num_bytes_by_tenant[slot.tenant] += difference
        if slot in self._recent:
            self._recent_bytes += difference
        slot.stored = stored

    def remove(self, slot: Slot) -> None:
        if slot in self._recent:
            self._recent.remove(slot)
            self._recent_bytes -= slot.num_bytes
        else:
            self._reservoirs[slot.domain].remove(slot)
        self.num_bytes_by_tenant[slot.tenant] -= slot.num_bytes
        if not self.num_bytes_by_tenant[slot.tenant]:
            del self.num_bytes_by_tenant[slot.tenant]

    def make_room(self, waiting_bytes: int) -> list[Slot]:
        """Give up what does not fit beside the waiting traces; returns it."""
        while self._recent_bytes > self._max_recent_bytes:
            slot = self._recent.popleft()
            self._recent_bytes -= slot.num_bytes
            self._reservoirs.setdefault(slot.domain, Reservoir()).add(slot)
        given_up = []
        while self.num_bytes_by_tenant and self.num_bytes + waiting_bytes > self._max_bytes:
            given_up.append(self._last())
            self.remove(given_up[-1])
        return given_up

    def _last(self) -> Slot:
        """The trace to give up next."""
        tenants = list(self.num_bytes_by_tenant)
        if len(tenants) > 1:
            above = [name for name in tenants if self.num_bytes_by_tenant[name] > self._max_tenant_bytes]
            tenants = above or tenants
        largest = max(self._reservoirs.values(), key=lambda one: one.num_bytes(tenants), default=None)
        if largest is not None and (slot := largest.last(tenants)) is not None:
            return slot
        return next(slot for slot in self._recent if slot.tenant in tenants)

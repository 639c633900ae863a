"""What is kept of one domain's older traces: an even sample of all that ever came, within a number of bytes.

Reservoir sampling by random keys: every trace has a number drawn from its text, and the traces with the smallest are
kept (bottom-k sampling). Each subset of the domain's history is as likely as with Vitter's algorithm R, and it does not
matter in which order traces came or come back: after a restart the same history gives the same sample, without a
count of what was seen.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from trainer.provenance import Stored


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

"""Fresh traces that wait before they are learnt from, so that the gate has some that no draft has seen.

    arriving ──(a fixed share of all texts)──▶ held out ──(newer ones came)──▶ the replay, as a new trace

Which texts are held out depends on the text alone: a text that comes again goes the same way, and one that was learnt
from does not come back as a fresh one while the replay remembers it. Nothing is lost: a trace leaves as soon as the
pool is full, the oldest first, and before it one of a tenant that has more than its share. The pool is part of the
trainer's checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from trainer.provenance import Stored
from trainer.reservoir import sampling_key


class HeldOut:
    """At most `max_traces` and `max_bytes`, `max_tenant_share` of them one tenant's where there are others.

    Iteration goes from the oldest to the newest.
    """

    def __init__(self, *, share: float, max_traces: int, max_bytes: float, max_tenant_share: float, seed: int) -> None:
        self._share, self._max_traces, self._max_bytes = share, max_traces, max_bytes
        self._max_of_tenant = max_tenant_share * max_traces
        # Not the replay's: its reservoirs would keep just those texts longest.
        self._seed = seed + 1
        self._by_text: dict[bytes, Stored] = {}
        self.is_young = True
        """Nothing has left it yet, since the start of the process."""

    def __len__(self) -> int:
        return len(self._by_text)

    def __iter__(self) -> Iterator[Stored]:
        return iter(self._by_text.values())

    def __contains__(self, text_hash: bytes) -> bool:
        return text_hash in self._by_text

    @property
    def trace_ids(self) -> list[str]:
        return [stored.trace_id for stored in self]

    def chooses(self, stored: Stored) -> bool:
        return sampling_key(stored.provenance.text_hash, self._seed) < self._share

    def keep(self, stored: Stored) -> None:
        """Take a trace as the newest; call `release` afterwards."""
        self._by_text[stored.provenance.text_hash] = stored

    def release(self) -> Iterator[Stored]:
        """Give up what is too much."""
        while len(self) > self._max_traces or sum(stored.num_bytes for stored in self) > self._max_bytes:
            self.is_young = False
            yield self._by_text.pop(self._next())

    def _next(self) -> bytes:
        tenants = Counter(stored.provenance.tenant for stored in self)
        above = {name for name, count in tenants.items() if len(tenants) > 1 and count > self._max_of_tenant}
        return next(text for text, stored in self._by_text.items() if not above or stored.provenance.tenant in above)

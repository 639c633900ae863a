"""Fresh traces that wait before they are learnt from, so that the gate has some that no draft has seen.

    arriving ──(a fixed share of all texts)──▶ held out ──(newer ones came)──▶ the replay, as a new trace

Which texts are held out depends on the text alone: a text that comes again goes the same way, and one that was learnt
from does not come back as a fresh one while the replay remembers it. Nothing is lost: a trace leaves as soon as the
pool is full. First leaves one of a tenant that has more than its share, then one that has siblings here, since answers
to one prompt judge as one, then the oldest. The pool is part of the trainer's checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from trainer.kept import KeptTraces
from trainer.provenance import Stored
from trainer.reservoir import sampling_key


class HeldOut(KeptTraces):
    """At most `max_traces` and `max_bytes`, `max_tenant_share` of them one tenant's where there are others; after each
    `keep` call `release`.
    """

    def __init__(self, *, share: float, max_traces: int, max_bytes: float, max_tenant_share: float, seed: int) -> None:
        super().__init__()
        self._share, self._max_traces, self._max_bytes = share, max_traces, max_bytes
        self._max_of_tenant = max_tenant_share * max_traces
        # Not the replay's: its reservoirs would keep just those texts longest.
        self._seed = seed + 1
        self.is_young = True
        """Nothing has left it yet, since the start of the process."""

    def chooses(self, stored: Stored) -> bool:
        return sampling_key(stored.provenance.text_hash, self._seed) < self._share

    def release(self) -> Iterator[Stored]:
        """Give up what is too much."""
        while len(self) > self._max_traces or self.num_bytes > self._max_bytes:
            self.is_young = False
            yield self._by_text.pop(self._next())

    def _next(self) -> bytes:
        tenants = Counter(stored.provenance.tenant for stored in self)
        above = {name for name, count in tenants.items() if len(tenants) > 1 and count > self._max_of_tenant}
        may_leave = [stored.provenance for stored in self if not above or stored.provenance.tenant in above]
        answers = Counter(provenance.prompt_hash for provenance in may_leave)
        # Of equals the first, so the oldest.
        return max(may_leave, key=lambda provenance: answers[provenance.prompt_hash]).text_hash

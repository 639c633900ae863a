"""Where an example comes from: what the replay's policies and the drift monitor need to know besides its tensors.

Acceptance here is the share of an answer's tokens that the draft proposed, in [0, 1). Rounds that proposed nothing, for
want of confidence, are not in the trace and still count against it, because the tokens they committed are: with a draft
that learns when to keep silent, accepted tokens a *recorded* round would stay high on text that it does not know.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from dataclasses import dataclass

import numpy as np

from speculator.trace import NO_DRAFT, Trace
from trainer.batch import Example

_HASH_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """`text_hash` is the same for the same token ids, whoever sent them; no text can be read from it."""

    tenant: str
    request_id: str
    domain: str
    created_ms: int
    text_hash: bytes
    num_completion_tokens: int
    num_accepted: int
    """Completion tokens that were proposals of the draft."""
    num_proposed_by_version: tuple[tuple[int, int], ...]
    """(draft version, proposals), by version; empty where nothing was proposed."""
    target_version: int = 0

    @property
    def acceptance(self) -> float | None:
        """None where the draft proposed nothing, as in an answer that was served without speculation."""
        if not self.num_proposed_by_version or self.num_completion_tokens <= 0:
            return None
        return min(self.num_accepted / self.num_completion_tokens, 1.0)


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One trace as the replay keeps it."""

    example: Example
    provenance: Provenance

    @property
    def trace_id(self) -> str:
        return self.example.trace_id

    @functools.cached_property
    def num_bases(self) -> int:
        return self.example.num_bases

    @functools.cached_property
    def num_bytes(self) -> int:
        return self.example.num_bytes


def provenance_of(trace: Trace) -> Provenance:
    rounds, header = trace.rounds, trace.header
    proposed: Counter[int] = Counter()
    for version, count in zip(rounds.draft_version.tolist(), (rounds.draft_tokens >= 0).sum(1).tolist(), strict=True):
        proposed[version] += count
    token_ids = np.ascontiguousarray(trace.token_ids, dtype="<i4")
    return Provenance(
        tenant=header.tenant,
        request_id=header.request_id,
        domain=header.domain,
        created_ms=header.created_ms,
        text_hash=hashlib.blake2b(token_ids.tobytes(), digest_size=_HASH_BYTES).digest(),
        num_completion_tokens=trace.num_completion_tokens,
        num_accepted=int(rounds.num_accepted.sum()),
        target_version=header.target_version,
        num_proposed_by_version=tuple(
            (version, count) for version, count in sorted(proposed.items()) if count and version != NO_DRAFT
        ),
    )

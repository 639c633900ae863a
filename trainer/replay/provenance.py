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

from speculator.trace import NO_DRAFT, Trace, TraceHeader
from trainer.learning.batch import Example

_HASH_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """`text_hash` is the same for the same token ids, whoever sent them, and `prompt_hash` for answers to one prompt,
    which resemble each other: one more says less than one to another prompt. No text can be read from either.
    """

    tenant: str
    request_id: str
    domain: str
    created_ms: int
    text_hash: bytes
    prompt_hash: bytes
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
        text_hash=_hash(token_ids.tobytes()),
        prompt_hash=_prompt_hash(header, token_ids),
        num_completion_tokens=trace.num_completion_tokens,
        num_accepted=int(rounds.num_accepted.sum()),
        target_version=header.target_version,
        num_proposed_by_version=tuple(
            (version, count) for version, count in sorted(proposed.items()) if count and version != NO_DRAFT
        ),
    )


def _prompt_hash(header: TraceHeader, token_ids: np.ndarray) -> bytes:
    """Of the group where the client named one: a sample that goes on elsewhere has another prompt than its siblings.
    An answer whose span keeps nothing of its prompt is taken to be the only one.
    """
    if header.group_id:
        return _hash(f"{len(header.tenant)} {header.tenant} {header.group_id}".encode())
    prompt = token_ids[: max(header.num_prompt_tokens - header.first_position, 0)]
    # The span keeps the tail of a long prompt, and of one that was in the prefix cache. Others may have the same tail;
    # fewer have the same length, too.
    return _hash(b"%d " % header.num_prompt_tokens + (prompt if len(prompt) else token_ids).tobytes())


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_HASH_BYTES).digest()

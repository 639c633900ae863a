"""The traces in memory: what is known of each, which are kept within a number of bytes, how often each is drawn.

    keep ──▶ recent ──(too many)──▶ its domain's reservoir ──(no room)──▶ given up

`recent` is the traffic of now. The reservoirs keep an even sample of every domain's past, so that traffic that moves
away and comes back finds a draft that has not forgotten it. The domain that holds most gives way first, and before it a
tenant that holds more than its share.

**Reservoir sampling** goes by random keys: every trace has a number drawn from its text, and the traces with the
smallest are kept (bottom-k sampling). Each subset of the domain's history is as likely as with Vitter's algorithm R. It
does not matter in which order traces came or come back: after a restart the same history gives the same sample, without
a count of what was seen.

**How often a trace is drawn** is bounded, so that nothing starves and nothing takes over:

* priority: badly accepted traces are drawn more often, between 1/B and B times the usual (`priority`);
* tenant share: where one tenant would fill the mix, the others are drawn more often instead, up to MAX_REPEAT times as
  often as they would be (`capped_shares`).

**Staleness** is how far old proposals still count. Committed text has the target's distribution whoever drafted, so
distillation uses it as long as it is kept. Terms about proposals are off-policy, and their importance weights grow with
the distance between then and now: a proposal at most α versions old counts fully, and fades to nothing at 2α. (ROLL
Flash, arXiv 2510.11345, drops whole samples older than α; here only the proposals go.) The age is measured where the
sample is used, against the version published then. Where the target itself moved, the whole trace ages, with an α of
its own: it is drawn less often, by the same weight, and forgotten where that is 0.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

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
    num_proposed_by_version: tuple[tuple[int, int], ...]
    """(draft version, proposals), by version; empty where nothing was proposed."""
    target_version: int = 0


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


class Memory:
    """Learnt traces by age, domain and tenant; iteration starts with the reservoirs and ends with the newest trace."""

    def __init__(self, *, max_bytes: int, recent_share: float, max_tenant_share: float) -> None:
        self._max_bytes = max_bytes
        self._max_recent_bytes = recent_share * max_bytes
        self._max_tenant_bytes = max_tenant_share * max_bytes
        self._recent: deque[Slot] = deque()
        self._reservoirs: list[Slot] = []

    def __iter__(self) -> Iterator[Slot]:
        yield from self._reservoirs
        yield from self._recent

    @property
    def num_bytes(self) -> int:
        return _num_bytes(self)

    def keep(self, slot: Slot) -> None:
        """Take a trace as the newest; call `make_room` afterwards."""
        slot.learnt = True
        self._recent.append(slot)

    def remove(self, slot: Slot) -> None:
        """Raises ValueError where it is not here."""
        (self._recent if slot in self._recent else self._reservoirs).remove(slot)

    def make_room(self, waiting_bytes: int) -> list[Slot]:
        """Give up what does not fit beside the waiting traces; returns it."""
        while _num_bytes(self._recent) > self._max_recent_bytes:
            self._reservoirs.append(self._recent.popleft())
        given_up = []
        excess = self.num_bytes + waiting_bytes - self._max_bytes
        while excess > 0 and (slot := self._next()) is not None:
            self.remove(slot)
            given_up.append(slot)
            excess -= slot.num_bytes
        return given_up

    def _next(self) -> Slot | None:
        """The trace to give up next; None where there is none."""
        tenants = _bytes_by(self, lambda slot: slot.tenant)
        above = {name for name, size in tenants.items() if len(tenants) > 1 and size > self._max_tenant_bytes}
        sampled = [slot for slot in self._reservoirs if not above or slot.tenant in above]
        if not sampled:
            return next((slot for slot in self._recent if not above or slot.tenant in above), None)
        domains = _bytes_by(sampled, lambda slot: slot.domain)
        largest = max(domains, key=domains.__getitem__)
        return max((slot for slot in sampled if slot.domain == largest), key=lambda slot: slot.key)


def _num_bytes(slots: Iterable[Slot]) -> int:
    return sum(slot.num_bytes for slot in slots)


def _bytes_by(slots: Iterable[Slot], name_of: Callable[[Slot], str]) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for slot in slots:
        sizes[name_of(slot)] += slot.num_bytes
    return sizes


MAX_REPEAT = 16.0
"""Few traces are not repeated beyond this to dilute another tenant's, or the draft would learn them by heart."""
HALF_LIFE_TOKENS = 20_000
_FORGOTTEN_TOKENS = 1.0


def priority(acceptance: float, mean: float, deviation: float, *, bound: float) -> float:
    """In [1/bound, bound]: bound^z, with z how many standard deviations below the mean it was accepted, cut to ±1.

    The mean is that of its own domain and time: a hard domain is not a badly drafted one, and a young draft accepts
    little of everything. 1 where nothing is known yet.
    """
    if deviation <= 0:
        return 1.0
    deviations_below = (mean - acceptance) / deviation
    return float(bound ** max(-1.0, min(1.0, deviations_below)))


def capped_shares(masses: Mapping[str, float], cap: float) -> dict[str, float]:
    """Each tenant's share of the mix: its natural share (of the masses), except that none is above `cap`.

    What the capped ones give up goes to the others in proportion, which are then drawn up to MAX_REPEAT times as often;
    what would go beyond that stays with the capped ones, so a tenant that is alone has everything. Where there are
    fewer than 1/cap tenants the cap is an equal share.
    """
    total = sum(masses.values())
    if total <= 0:
        return dict.fromkeys(masses, 0.0)
    natural = {tenant: mass / total for tenant, mass in masses.items()}
    cap = max(cap, 1.0 / sum(share > 0 for share in natural.values()))
    free, scale = dict(natural), 1.0
    while above := [tenant for tenant, share in free.items() if share * scale > cap]:
        for tenant in above:
            del free[tenant]
        left = 1.0 - cap * (len(natural) - len(free))
        scale = min(left / max(sum(free.values()), 1e-12), MAX_REPEAT)
    shares = {tenant: share * scale for tenant, share in free.items()}
    capped = natural.keys() - free.keys()
    excess = 1.0 - sum(shares.values()) - cap * len(capped)
    capped_mass = sum(natural[tenant] for tenant in capped)
    return shares | {tenant: cap + excess * natural[tenant] / capped_mass for tenant in capped}


class TenantMix:
    """What the last steps were made of: tokens by tenant, each halved after HALF_LIFE_TOKENS more."""

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}

    def add(self, tenant: str, num_tokens: int) -> None:
        decay = 0.5 ** (num_tokens / HALF_LIFE_TOKENS)
        kept = ((name, tokens * decay) for name, tokens in self._tokens.items())
        self._tokens = {name: tokens for name, tokens in kept if tokens >= _FORGOTTEN_TOKENS}
        self._tokens[tenant] = self._tokens.get(tenant, 0.0) + num_tokens

    def share_with(self, tenant: str, num_tokens: int) -> float:
        """The tenant's share after `num_tokens` more of its own."""
        total = sum(self._tokens.values()) + num_tokens
        return (self._tokens.get(tenant, 0.0) + num_tokens) / total if total else 0.0


def version_weight(lag: int, *, max_lag: int) -> float:
    """In [0, 1]: 1 up to `max_lag` (α) versions behind, 0 from 2α on, linear in between; for α = 0 only lag 0 counts.

    A negative lag is a version newer than the published one, after the pointer was set back: it counts fully.
    """
    if lag <= max_lag:
        return 1.0
    return max(0.0, 2.0 - lag / max_lag) if max_lag else 0.0


def proposal_weight(num_proposed_by_version: Sequence[tuple[int, int]], *, published: int, max_lag: int) -> float:
    """In [0, 1]: the mean over a trace's proposals of their versions' weights; 0 without any proposal."""
    num_proposed = sum(count for _, count in num_proposed_by_version)
    if not num_proposed:
        return 0.0
    counted = sum(
        count * version_weight(published - version, max_lag=max_lag) for version, count in num_proposed_by_version
    )
    return min(counted / num_proposed, 1.0)


def without_stale(example: Example, *, published: int, max_lag: int, rng: random.Random) -> Example:
    """The example with each verdict kept with its version's weight as the probability: right in expectation, and what
    is left out costs no work in the step.
    """
    versions = example.verdicts.versions.tolist()
    kept = [rng.random() < version_weight(published - version, max_lag=max_lag) for version in versions]
    if all(kept):
        return example
    return dataclasses.replace(example, verdicts=example.verdicts[torch.tensor(kept)])

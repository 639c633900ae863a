"""The replay's memory: metadata of each trace, which traces are kept within a byte limit, how often each is drawn.

    keep ──▶ recent ──(too many)──▶ its domain's reservoir ──(no room)──▶ given up

`recent` holds the newest traffic. The reservoirs keep an even sample of every domain's past, so that the draft does not
forget traffic that goes away and comes back. Where room is needed, a tenant above its share loses traces first, then
the domain with the most bytes.

**Reservoir sampling** goes by random keys: every trace has a key drawn from its text, and the traces with the smallest
keys are kept (bottom-k sampling). Each subset of the domain's history is as likely as with Vitter's algorithm R. The
order of arrival does not matter: after a restart the same history gives the same sample, without a count of all traces.

**How often a trace is drawn** is bounded, so that every trace is drawn at times and none dominates:

* priority: badly accepted traces are drawn more often, between 1/B and B times the usual (`priority`);
* tenant share: where one tenant would fill the mix, the others are drawn more often instead, up to MAX_REPEAT times as
  often as they would be (`capped_shares`).

**Staleness** is how much old proposals still count. Committed text has the target's distribution whichever draft
proposed, so distillation uses it as long as it is kept. Loss terms about proposals are off-policy, with importance
weights that grow with age. A proposal at most α versions old counts fully; beyond that its weight falls to 0 at 2α.
(ROLL Flash, arXiv 2510.11345, drops whole samples older than α; here only the proposals are dropped.) The age is
measured when the sample is used, against the version published then. Where the target itself moved, the whole trace
ages, with an α of its own: by the same weight it is drawn less often, and it is forgotten at weight 0.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from speculator.trace import Trace, TraceHeader
from trainer.learning.batch import Example

_HASH_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Metadata of a trace. `text_hash` is equal for equal token ids, whoever sent them. `prompt_hash` is equal for
    answers to one prompt, which resemble each other and so count as one in comparisons. Neither reveals the text.
    """

    tenant: str
    request_id: str
    domain: str
    created_ms: int
    text_hash: bytes
    prompt_hash: bytes
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
    header = trace.header
    token_ids = np.ascontiguousarray(trace.token_ids, dtype="<i4")
    return Provenance(
        tenant=header.tenant,
        request_id=header.request_id,
        domain=header.domain,
        created_ms=header.created_ms,
        text_hash=_hash(token_ids.tobytes()),
        prompt_hash=_prompt_hash(header, token_ids),
        target_version=header.target_version,
    )


def _prompt_hash(header: TraceHeader, token_ids: np.ndarray) -> bytes:
    """Hash of the client's prompt group where it named one: a sample that another engine continued has a longer prompt
    than its siblings. An answer whose span keeps nothing of its prompt counts as the only one.
    """
    if header.group_id:
        return _hash(f"{len(header.tenant)} {header.tenant} {header.group_id}".encode())
    prompt = token_ids[: max(header.num_prompt_tokens - header.first_position, 0)]
    # Of a long or cached prompt the span keeps only the tail. Other prompts may share it; few also share the length.
    return _hash(b"%d " % header.num_prompt_tokens + (prompt if len(prompt) else token_ids).tobytes())


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_HASH_BYTES).digest()


@dataclass(kw_only=True, eq=False)
class Slot:
    """A trace in the replay with its sampling state. `stored` is replaced when the same text comes again."""

    stored: Stored
    domain: str
    tenant: str
    priority: float
    key: float
    """In [0, 1), uniform over texts (`sampling_key`)."""
    learnt: bool = False
    """It was in a step, or was passed over; False while it waits."""

    @property
    def num_bytes(self) -> int:
        return self.stored.num_bytes

    @property
    def num_tokens(self) -> int:
        return self.stored.num_bases


def sampling_key(text_hash: bytes, seed: int) -> float:
    """A pseudo-random number in [0, 1) from the text. The seed keeps clients from choosing texts with small keys."""
    digest = hashlib.blake2b(text_hash, digest_size=7, key=str(seed).encode()).digest()
    return int.from_bytes(digest) / 2.0**56


class Reservoirs:
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
        """Raises ValueError for a trace that is not in the memory."""
        (self._recent if slot in self._recent else self._reservoirs).remove(slot)

    def make_room(self, waiting_bytes: int) -> list[Slot]:
        """Remove and return the traces that do not fit beside the waiting ones."""
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
"""How much more often the cap on one tenant may let other traces be drawn; beyond, the draft would overfit to them."""
HALF_LIFE_TOKENS = 20_000
_FORGOTTEN_TOKENS = 1.0


def priority(acceptance: float, mean: float, deviation: float, *, bound: float) -> float:
    """How often to draw a trace, in [1/bound, bound]: bound^z, z = (mean − acceptance) / deviation, cut to ±1.

    Mean and deviation are those of the trace's domain at that time: otherwise hard domains, and all early traces, would
    count as badly drafted. 1 while the deviation is unknown (0).
    """
    if deviation <= 0:
        return 1.0
    deviations_below = (mean - acceptance) / deviation
    return float(bound ** max(-1.0, min(1.0, deviations_below)))


def capped_shares(masses: Mapping[str, float], cap: float) -> dict[str, float]:
    """Each tenant's share of the mix: its natural share (of the masses), except that none is above `cap`.

    What the capped tenants lose goes to the others in proportion, which are then drawn up to MAX_REPEAT times as often.
    Anything beyond that stays with the capped ones, so a single tenant has everything. Where there are fewer than 1/cap
    tenants the cap is an equal share.
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
    """The tenants' shares of the last steps: tokens by tenant, with a half-life of HALF_LIFE_TOKENS."""

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}

    def add(self, tenant: str, num_tokens: int) -> None:
        decay = 0.5 ** (num_tokens / HALF_LIFE_TOKENS)
        kept = ((name, tokens * decay) for name, tokens in self._tokens.items())
        self._tokens = {name: tokens for name, tokens in kept if tokens >= _FORGOTTEN_TOKENS}
        self._tokens[tenant] = self._tokens.get(tenant, 0.0) + num_tokens

    def share_with(self, tenant: str, num_tokens: int) -> float:
        """The share that the tenant would have after `num_tokens` more of its own."""
        total = sum(self._tokens.values()) + num_tokens
        return (self._tokens.get(tenant, 0.0) + num_tokens) / total if total else 0.0


def version_weight(lag: int, *, max_lag: int) -> float:
    """Weight by staleness: 1 up to `max_lag` (α) versions behind, 0 from 2α on, linear in between; α = 0: only lag 0.

    A lag below 0 (a version newer than the published one, after a rollback) has weight 1.
    """
    if lag <= max_lag:
        return 1.0
    return max(0.0, 2.0 - lag / max_lag) if max_lag else 0.0


def without_stale(example: Example, *, published: int, max_lag: int, rng: random.Random) -> Example:
    """A copy of the example that keeps each verdict with its `version_weight` as the probability. This equals weighting
    the verdicts in expectation, and dropped ones cost no work in the step.
    """
    versions = example.verdicts.versions.tolist()
    kept = [rng.random() < version_weight(published - version, max_lag=max_lag) for version in versions]
    if all(kept):
        return example
    return dataclasses.replace(example, verdicts=example.verdicts[torch.tensor(kept)])

"""The replay: the traces that the trainer learns from, new ones first, and a bounded memory of older ones.

    add ──▶ waiting ──(first step)──▶ memory ──(no room)──▶ forgotten

A trace waits until its first step and is kept for more: a live service brings too few tokens to use them once only.
Waiting and kept traces together are bounded in bytes. trainer/replay/reservoirs.py says which traces are kept and how
often each is drawn.

Each text is kept once, whoever sends it and however often. A repetition only renews the proposals of the kept trace.

**Rewards.** Reinforcement learning moves the target towards what it rewards, so the draft must become good there:
ReSpec (arXiv 2510.26475) weights the draft's distillation by the reward of the rollout. Here the replay draws a trace
with a probability by its weight, which is the same in expectation and spends no step on traces of little weight:

    weight = B^z,  z = (reward − mean of its group) / deviation of its group, cut to ±1

Only the rank within the group counts, as in GRPO's advantage: rewards have no common scale, and a prompt that every
answer solves teaches nothing. A trace whose group has no rewards, or only equal ones, weighs 1.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import structlog

from speculator.errors import StreamError
from speculator.redis.trace_stream import MAX_GROUPS, START, GroupRewards, RewardStream
from trainer.metrics import TrainerMetrics
from trainer.replay.reservoirs import (
    Provenance,
    Reservoirs,
    Slot,
    Stored,
    TenantMix,
    capped_shares,
    sampling_key,
    version_weight,
)

# Hashes of discarded texts, which would spoil a batch again; the oldest are dropped.
_MAX_REFUSED = 1000


class Admission(StrEnum):
    """What became of an arriving trace; all but NEW can be acked without a step."""

    NEW = "new"
    HELD_OUT = "held_out"
    """Offered again later (trainer/replay/eval_sets.py)."""
    GOLDEN = "golden"
    """Never learnt from (trainer/replay/eval_sets.py)."""
    REPEATED = "repeated"
    REFUSED = "refused"
    """Its text was discarded before."""
    NO_ROOM = "no_room"
    """Larger than the memory that the waiting traces leave."""
    OLD_TARGET = "old_target"
    """Too many target versions behind (trainer/replay/reservoirs.py)."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One batch. `passed_over` are new traces kept without a first step, because their tenant has had its share."""

    batch: list[Stored]
    """New ones first."""
    num_new: int
    passed_over: list[Stored]


class ReplayBuffer:
    """The waiting and the learnt traces. Owned by the training loop; not thread-safe."""

    def __init__(
        self,
        *,
        max_bytes: int,
        max_waiting: int,
        recent_share: float,
        max_tenant_share: float,
        max_target_lag: int = 0,
        rng: random.Random,
        seed: int = 0,
        reward_weight: Callable[[Provenance], float] = lambda _: 1.0,
    ) -> None:
        """`reward_weight`: how much more often than others a trace is drawn (`RewardWeights.weight`)."""
        self._max_bytes = max_bytes
        self._max_waiting = max_waiting
        self._max_tenant_share = max_tenant_share
        self._max_target_lag = max_target_lag
        self._target_version = 0
        self._rng = rng
        self._seed = seed
        self._reward_weight = reward_weight
        self._waiting: deque[Slot] = deque()
        self._reservoirs = Reservoirs(max_bytes=max_bytes, recent_share=recent_share, max_tenant_share=max_tenant_share)
        self._by_text: dict[bytes, Slot] = {}
        self._refused: dict[bytes, None] = {}
        self._mix = TenantMix()
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._by_text)

    @property
    def num_bytes(self) -> int:
        return self._reservoirs.num_bytes + self._waiting_bytes

    @property
    def num_tokens(self) -> int:
        return sum(slot.num_tokens for slot in self._by_text.values())

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def room(self) -> int:
        """How many more new traces may wait; at 0 the trainer is behind and the rest waits in Redis."""
        return max(self._max_waiting - len(self._waiting), 0)

    @property
    def waiting(self) -> list[Stored]:
        return [slot.stored for slot in self._waiting]

    @property
    def waiting_trace_ids(self) -> list[str]:
        return [stored.trace_id for stored in self.waiting]

    @property
    def members(self) -> dict[str, float]:
        """Learnt traces with their priorities: what `restore` needs after a restart."""
        return {slot.stored.trace_id: slot.priority for slot in self._reservoirs}

    def num_bytes_by_domain(self) -> dict[str, int]:
        sizes: Counter[str] = Counter()
        for slot in self._by_text.values():
            sizes[slot.domain] += slot.num_bytes
        return dict(sizes)

    def knows(self, stored: Stored) -> bool:
        """Whether a trace's text is in the replay, or was discarded."""
        text_hash = stored.provenance.text_hash
        return text_hash in self._by_text or text_hash in self._refused

    def add(self, stored: Stored, *, domain: str) -> Admission:
        """Offer a new trace."""
        text_hash = stored.provenance.text_hash
        if text_hash in self._refused:
            return Admission.REFUSED
        if not self._freshness(stored.provenance):
            return Admission.OLD_TARGET
        if (known := self._by_text.get(text_hash)) is not None:
            self._renew(known, stored)
            return Admission.REPEATED
        if stored.num_bytes + self._waiting_bytes > self._max_bytes:
            return Admission.NO_ROOM
        self._waiting.append(self._place(stored, domain))
        self._make_room()
        return Admission.NEW

    def restore(self, stored: Stored, *, domain: str, priority: float = 1.0) -> None:
        """Take a trace that was learnt from before a restart, unless its target is too old."""
        if self._freshness(stored.provenance) and stored.provenance.text_hash not in self._by_text:
            self._reservoirs.keep(self._place(stored, domain, priority))
            self._make_room()

    def follow_target(self, version: int) -> list[Stored]:
        """Set the newest target version; remove and return the traces that are too old for it."""
        self._target_version = version
        return self.forget(lambda provenance: not self._freshness(provenance))

    def draw(self, num_tokens: int) -> Draw:
        """Draw different traces for one batch of about `num_tokens` bases: a new one where there is one, and old ones
        by priority. When the waiting queue is full, the trainer is behind and takes new ones first.
        """
        behind = self.room == 0
        chosen: list[Slot] = []
        passed_over: list[Stored] = []
        shares = self._tenant_shares()
        while self._waiting and (behind or not chosen) and _num_tokens(chosen) < num_tokens:
            slot = self._waiting.popleft()
            self._reservoirs.keep(slot)
            # A tenant may have its share of the memory, or the cap where that is more; anything while no trace is kept.
            limit = max(shares.get(slot.tenant, 0.0), self._max_tenant_share) if shares else 1.0
            if self._mix.share_with(slot.tenant, slot.num_tokens) > limit:
                passed_over.append(slot.stored)
            else:
                chosen.append(slot)
        num_new = len(chosen)
        for slot in self._sample():
            if _num_tokens(chosen) >= num_tokens:
                break
            if slot not in chosen:
                chosen.append(slot)
        for slot in chosen:
            self._mix.add(slot.tenant, slot.num_tokens)
        batch = [slot.stored for slot in chosen]
        self._make_room()
        return Draw(batch=batch, num_new=num_new, passed_over=passed_over)

    def prioritise(self, stored: Stored, priority: float) -> None:
        """Set how much more often than others a trace is drawn."""
        if (slot := self._by_text.get(stored.provenance.text_hash)) is not None:
            slot.priority = priority

    def discard(self, stored: Iterable[Stored]) -> None:
        """Forget drawn traces that cannot be learnt from, and refuse their texts from now on."""
        for one in stored:
            text_hash = one.provenance.text_hash
            self._refused[text_hash] = None
            if (slot := self._by_text.get(text_hash)) is not None and slot.learnt:
                self._reservoirs.remove(slot)
                del self._by_text[text_hash]
        while len(self._refused) > _MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    def forget(self, is_gone: Callable[[Provenance], object]) -> list[Stored]:
        """Remove and return all traces, waiting ones too, for which `is_gone` is true."""
        gone = [slot for slot in self._by_text.values() if is_gone(slot.stored.provenance)]
        for slot in gone:
            if slot.learnt:
                self._reservoirs.remove(slot)
            else:
                self._waiting.remove(slot)
            del self._by_text[slot.stored.provenance.text_hash]
        return [slot.stored for slot in gone]

    @property
    def _waiting_bytes(self) -> int:
        return sum(slot.num_bytes for slot in self._waiting)

    def _place(self, stored: Stored, domain: str, priority: float = 1.0) -> Slot:
        provenance = stored.provenance
        key = sampling_key(provenance.text_hash, self._seed)
        slot = Slot(stored=stored, domain=domain, tenant=provenance.tenant, priority=priority, key=key)
        self._by_text[provenance.text_hash] = slot
        return slot

    def _renew(self, slot: Slot, stored: Stored) -> None:
        """Replace a kept trace by a newer one of its text; the slot keeps its tenant, so none can displace another."""
        is_older = stored.provenance.target_version < slot.stored.provenance.target_version
        if slot.learnt and stored.num_bytes <= slot.num_bytes and not is_older:
            slot.stored = stored

    def _make_room(self) -> None:
        given_up = self._reservoirs.make_room(self._waiting_bytes)
        self.num_evicted += len(given_up)
        for slot in given_up:
            del self._by_text[slot.stored.provenance.text_hash]

    def _masses(self) -> dict[str, float]:
        """Weighted tokens by tenant: the mix that would be drawn without a cap."""
        masses: defaultdict[str, float] = defaultdict(float)
        for slot in self._reservoirs:
            masses[slot.tenant] += self._weight(slot) * slot.num_tokens
        return masses

    def _tenant_shares(self) -> dict[str, float]:
        return capped_shares(self._masses(), self._max_tenant_share)

    def _sample(self) -> Iterator[Slot]:
        """Learnt traces in a random order, without repetition, by priority and reward and within the tenants' shares.

        Exponential races (Efraimidis and Spirakis 2006): the next slot is slot i with probability wᵢ / Σ w.
        """
        masses, shares = self._masses(), self._tenant_shares()
        slots = list(self._reservoirs)
        race = [
            (self._rng.expovariate(self._weight(slot) * shares[slot.tenant] / masses[slot.tenant]), index)
            for index, slot in enumerate(slots)
        ]
        heapq.heapify(race)
        while race:
            yield slots[heapq.heappop(race)[1]]

    def _weight(self, slot: Slot) -> float:
        """How often a trace is drawn, relative to others; above 0, since a trace with weight 0 is not kept."""
        provenance = slot.stored.provenance
        return slot.priority * self._reward_weight(provenance) * self._freshness(provenance)

    def _freshness(self, provenance: Provenance) -> float:
        return version_weight(self._target_version - provenance.target_version, max_lag=self._max_target_lag)


def _num_tokens(slots: list[Slot]) -> int:
    return sum(slot.num_tokens for slot in slots)


log = structlog.get_logger()
_POLL_EVERY_S = 1.0
_RETRY_S = 2.0
_CHUNK = 100


def reward_weights(rewards: Mapping[int, float], *, bound: float) -> dict[int, float]:
    """Weights of a group's samples by their number, each in [1/bound, bound]."""
    mean, deviation = statistics.fmean(rewards.values()), statistics.pstdev(rewards.values())
    if deviation <= 0:
        return dict.fromkeys(rewards, 1.0)
    return {
        number: float(bound ** max(-1.0, min(1.0, (reward - mean) / deviation))) for number, reward in rewards.items()
    }


class RewardWeights:
    """Reads rewards of rollout samples from Redis; drops the oldest groups. Owned by the training loop."""

    def __init__(
        self,
        stream: RewardStream,
        *,
        bound: float,
        metrics: TrainerMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """With a `bound` of 1 rewards have no effect, and nothing is read. `clock` gives seconds."""
        self._stream, self._bound, self._metrics, self._clock = stream, bound, metrics, clock
        self._last_id = START
        self._next_poll_s = -math.inf
        # By tenant and group, the newest last.
        self._rewards: OrderedDict[tuple[str, str], dict[int, float]] = OrderedDict()
        self._weights: dict[tuple[str, str], dict[int, float]] = {}

    def poll(self) -> None:
        """Read new rewards, at most every second. Without Redis, log and retry later."""
        if self._bound == 1 or self._clock() < self._next_poll_s:
            return
        self._next_poll_s = self._clock() + _POLL_EVERY_S
        try:
            while True:
                groups, last_id = self._stream.read(self._last_id, _CHUNK)
                for group in groups:
                    self._take(group)
                if last_id == self._last_id:
                    return
                self._last_id = last_id
        except StreamError as error:
            self._metrics.stream_errors.labels("rewards").inc()
            self._next_poll_s = self._clock() + _RETRY_S
            log.warning("rewards not read", error=str(error), retry_s=_RETRY_S)

    def weight(self, provenance: Provenance) -> float:
        """How much more often than others the trace is drawn."""
        # In SGLang a sample that was interrupted continues as a new request: "group/3#5f0c…".
        group_id, _, number = provenance.request_id.partition("#")[0].rpartition("/")
        of_group = self._weights.get((provenance.tenant, group_id))
        return of_group.get(int(number), 1.0) if of_group and number.isdigit() and number.isascii() else 1.0

    def _take(self, group: GroupRewards) -> None:
        key = group.tenant, group.group_id
        self._rewards[key] = self._rewards.pop(key, {}) | group.rewards
        self._weights[key] = reward_weights(self._rewards[key], bound=self._bound)
        self._metrics.rewards.inc(len(group.rewards))
        while len(self._rewards) > MAX_GROUPS:
            oldest, _ = self._rewards.popitem(last=False)
            del self._weights[oldest]

"""What becomes of an arriving trace: learnt from, held out, kept as golden, refused; and when it is forgotten.

A few early traces become the golden set, a share of the others is held out for a while, and the rest is offered to the
replay at once. Golden and held-out traces are done with as far as Redis is concerned: the next checkpoint lists them.

A trace whose text is here already, or was refused, is done with at once: it needs no step. It does not count for drift,
or one client that repeats itself could raise an alarm. "Here" is about this rank: where several train together, one
text may have a place in each.

When the target moves, only traces of the newest version judge drafts. What was held out of older ones, and the golden
set, are learnt from, and the next traces take their places. An operator's recording stays, and may veto.

`Forgetting` names the traces that must go: those of an erased tenant up to its order, and those that are too old. It
reads the orders every LOOK_S, and answers by the orders that it knows.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import structlog

from speculator.errors import StreamError
from speculator.host import now_ms
from speculator.redis.trace_deletion import Erasures, Remover, TrainerReport, covers
from trainer.checkpoint import Progress
from trainer.config import TrainerConfig
from trainer.drift import ALL, DomainNames, DriftMonitor
from trainer.metrics import TrainerMetrics
from trainer.ranks import Ranks
from trainer.replay.buffer import Admission, Replay
from trainer.replay.eval_sets import GoldenSet, HeldOut
from trainer.replay.memory import Provenance, Stored, priority
from trainer.replay.trace_source import TraceSource

_MANY_OLDER = 32
"""Traces of older targets in a row after which we warn; again after twice as many, and so on."""
log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """What one read brought: news to learn from, or only `num_repeated_tokens` of texts that are here already."""

    is_news: bool
    num_repeated_tokens: int
    traces: list[Stored]
    """All of them, whatever became of each."""


class Intake:
    """Fills replay, held-out pool and golden set, first with this rank's share of what the last checkpoint lists."""

    def __init__(
        self,
        source: TraceSource,
        replay: Replay,
        held_out: HeldOut,
        golden: GoldenSet,
        config: TrainerConfig,
        metrics: TrainerMetrics,
        progress: Progress,
        ranks: Ranks,
    ) -> None:
        self._source, self._replay, self._config, self._metrics = source, replay, config, metrics
        self.held_out, self.golden = held_out, golden
        self.num_traces, self.new_tokens = progress.num_traces, progress.new_tokens
        self.num_repeated = progress.num_repeated
        self._ranks = ranks
        self.target_version = progress.target_version
        """The newest of which a trace has come to any rank."""
        self._num_older, self._warn_at = 0, _MANY_OLDER
        self._follow(self.target_version)
        self.domains = DomainNames(config.max_domains, progress.domain_tenants)
        self.drift = DriftMonitor(progress.drift)
        self._priorities = progress.replay or {}
        # An operator's recording takes the place of golden traces, which then are learnt from in the end.
        self._were_golden = set(progress.golden if config.golden is None else ())
        self._were_held_out = {*progress.held_out, *progress.golden} - self._were_golden
        wanted = None if progress.replay is None else [one for one in progress.trace_ids if ranks.owns(one)]
        num_found = 0
        for stored in source.history(wanted):
            if ranks.owns(stored.trace_id):
                self._restore(stored)
                num_found += 1
        if wanted:
            # Pending ones come again with the next reads.
            log.info("replay filled again", num_traces=num_found, num_missing=len(wanted) - num_found)

    def read(self, block_ms: int) -> Arrivals:
        """Take as many traces as the replay has room for, and what leaves the held-out pool for them."""
        room = self._replay.room
        new = self._source.read(room, block_ms) if room else []
        self._follow_newest(new)
        self._notice_older(new)
        arrived = [(stored, self._take(stored)) for stored in new]
        for stored in self._source.take_found():
            self._restore(stored)
        admissions = [admission for _, admission in arrived]
        admissions += [self._offer(stored) for stored in self.held_out.release()]
        for name, traces in (("held_out", self.held_out), ("golden", self.golden)):
            self._metrics.held_out_traces.labels(name).set(len(traces))
        return Arrivals(
            is_news=Admission.NEW in admissions,
            num_repeated_tokens=sum(
                stored.num_bases for stored, admission in arrived if admission is Admission.REPEATED
            ),
            traces=[stored for stored, _ in arrived],
        )

    def _follow_newest(self, arrived: Sequence[Stored]) -> None:
        """Before anything is placed: what comes of a newer target judges drafts for it."""
        newest = max((stored.provenance.target_version for stored in arrived), default=0)
        version, previous = self._ranks.max(newest), self.target_version
        if version > previous:
            self.target_version = version
            num_forgotten = self._follow(version)
            log.info("the target has moved", version=version, previous=previous, num_forgotten=num_forgotten)

    def _notice_older(self, arrived: Sequence[Stored]) -> None:
        """Where whoever trains the target counts from the beginning again, nothing judges drafts any more."""
        if any(stored.provenance.target_version >= self.target_version for stored in arrived):
            self._num_older, self._warn_at = 0, _MANY_OLDER
            return
        self._num_older += len(arrived)
        if self._num_older >= self._warn_at:
            self._warn_at = 2 * self._num_older
            log.warning(
                "all traces are of older targets: go on counting where the last run ended, or begin with a new --state",
                newest_version=self.target_version,
                last_version=arrived[-1].provenance.target_version,
                num_traces=self._num_older,
            )

    def _follow(self, version: int) -> int:
        """How many traces are too old to be learnt from."""
        too_old = self._replay.follow_target(version)
        self._source.mark_used(too_old)
        old = self.held_out.forget(lambda one: one.target_version < version)
        # An operator's recording judges what it can, and is never learnt from; it does not pass for fresh traffic.
        has_old_recording = self._config.golden is not None and any(
            stored.provenance.target_version < version for stored in self.golden
        )
        if self._config.golden is None:
            old += self.golden.forget(lambda one: one.target_version < version)
        for stored in old:
            self._offer(stored)
        if old or has_old_recording:
            self.held_out.is_young = not has_old_recording
        self._metrics.target_version.set(version)
        return len(too_old)

    def renew_golden(self) -> int:
        """Learn from the golden traces from now on, and fill the set with those that come next; how many they were."""
        given_up = self.golden.give_up()
        for stored in given_up:
            self._offer(stored)
        return len(given_up)

    def forget(
        self, is_gone: Callable[[Provenance], object], *, is_golden_gone: Callable[[Provenance], object]
    ) -> list[Stored]:
        """Remove, and return, the traces that are gone, from wherever they are kept. None of them needs a step now."""
        gone = [*self._replay.forget(is_gone), *self.held_out.forget(is_gone), *self.golden.forget(is_golden_gone)]
        self._source.mark_used(gone)
        return gone

    @property
    def settled(self) -> tuple[int, int]:
        """(`num_traces`, `new_tokens`) without what is in hand: who goes on from the next checkpoint gets that again,
        and counts it then.
        """
        in_hand = self._source.trace_ids_in_hand
        unused = [stored for stored in self._replay.waiting if stored.trace_id in in_hand]
        return self.num_traces - len(unused), self.new_tokens - sum(stored.num_bases for stored in unused)

    @property
    def golden_trace_ids(self) -> list[str]:
        """None of an operator's recording, which is read again at every start."""
        return self.golden.trace_ids if self._config.golden is None else []

    @property
    def held_out_trace_ids(self) -> list[str]:
        """Settled with Redis and not learnt from, oldest first: those that were released and wait, then the pool."""
        in_hand = self._source.trace_ids_in_hand
        released = [trace_id for trace_id in self._replay.waiting_trace_ids if trace_id not in in_hand]
        return released + self.held_out.trace_ids

    def _take(self, stored: Stored) -> Admission:
        admission = self._place(stored)
        if admission is not Admission.NEW:
            self._source.mark_used([stored])
        if admission in (Admission.REPEATED, Admission.REFUSED, Admission.NO_ROOM, Admission.OLD_TARGET):
            self.num_repeated += admission is Admission.REPEATED
            return admission
        self.num_traces += 1
        self.new_tokens += stored.num_bases
        return admission

    def _place(self, stored: Stored) -> Admission:
        text_hash = stored.provenance.text_hash
        if text_hash in self.golden or text_hash in self.held_out:
            admission = Admission.REPEATED
        elif self._replay.knows(stored) or stored.provenance.target_version < self.target_version:
            return self._offer(stored)
        elif self.golden.wants(stored):
            self.golden.keep(stored)
            admission = Admission.GOLDEN
        elif self.held_out.chooses(stored):
            self.held_out.keep(stored)
            admission = Admission.HELD_OUT
        else:
            return self._offer(stored)
        self._metrics.admissions.labels(admission).inc()
        return admission

    def _offer(self, stored: Stored) -> Admission:
        """To the replay."""
        provenance = stored.provenance
        domain = self.domains.name(provenance.domain, provenance.tenant)
        admission = self._replay.add(stored, domain=domain)
        self._metrics.admissions.labels(admission).inc()
        return admission

    def met(self, stored: Stored, num_accepted: int, num_positions: int) -> None:
        """The draft in training has met a new trace, before it learnt from it: its likeliest proposals were what the
        target said at so many of these positions.

        That tells how good it is for this traffic, whether it was asked in service or earlier text was, or nobody.
        """
        if not num_positions:
            return
        domain = self.domains.name(stored.provenance.domain, stored.provenance.tenant)
        level = self.drift.level(domain)
        weight = priority(num_accepted / num_positions, *level, bound=self._config.max_priority)
        self._replay.prioritise(stored, weight)
        self.watch(domain, num_accepted, num_positions)

    def watch(self, domain: str, num_accepted: int, num_tokens: int) -> None:
        """Count one answer of a domain, and say so where acceptance has fallen."""
        for name in self.drift.observe(domain, num_accepted, num_tokens):
            series = self.drift.series[name]
            self._metrics.drift_alarms.labels(name).inc()
            log.warning("acceptance fell", domain=name, short=series.short, long=series.long, margin=series.margin)
        for name in (domain, ALL):
            series = self.drift.series[name]
            long = series.long if series.num_long else None
            self._metrics.observe_drift(name, short=series.short, long=long, margin=series.margin, alarm=series.alarm)

    def _restore(self, stored: Stored) -> None:
        """Where it was at the checkpoint; or, where it would judge drafts for a target that has moved, as a new one."""
        was_kept = stored.trace_id in self._were_golden or stored.trace_id in self._were_held_out
        if was_kept and stored.provenance.target_version < self.target_version:
            self._offer(stored)
        elif stored.trace_id in self._were_golden:
            self.golden.keep(stored)
        elif was_kept:
            self.held_out.keep(stored)
        else:
            domain = self.domains.name(stored.provenance.domain, stored.provenance.tenant)
            self._replay.restore(stored, domain=domain, priority=self._priorities.get(stored.trace_id, 1.0))


LOOK_S = 1.0
REASONS = ("erased", "expired")


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

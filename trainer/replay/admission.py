"""Admission of arriving traces: learnt from, held out, kept as golden, or refused; and which ones to forget.

A few early traces become the golden set, a share of the others is held out for a while, and the rest goes to the replay
at once. Golden and held-out traces can be acked in Redis as soon as a checkpoint lists them, without a step.

A trace whose text this rank has already, or refused, can be acked, too. It does not count for drift, or one client that
repeats itself could raise an alarm. Several ranks may each hold the same text.

When the target moves, only traces of its newest version judge drafts. Older held-out and golden traces go to the
replay, and the next traces take their places. An operator's recording stays, and may veto.

`RetentionPolicy` says which traces must go: those of an erased tenant from before its erasure order, and those that are
too old. It reads the erasure orders from Redis every POLL_S; in between it uses those that it read last.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import structlog

from speculator.errors import StreamError
from speculator.redis.trace_deletion import ErasureOrders, TraceRemover, TrainerReport, covers
from trainer.checkpoint import Progress
from trainer.config import TrainerConfig
from trainer.drift import ALL, DomainNames, DriftMonitor
from trainer.metrics import TrainerMetrics
from trainer.ranks import Ranks
from trainer.replay.buffer import Admission, ReplayBuffer
from trainer.replay.eval_sets import GoldenSet, HeldOut
from trainer.replay.reservoirs import Provenance, Stored, priority
from trainer.replay.trace_source import TraceSource

_MANY_OLDER = 32
"""Traces of older targets in a row that cause a warning; the next one comes after twice as many, and so on."""
log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """The result of one read. `num_repeated_tokens` are those of texts that this rank has already."""

    is_news: bool
    """The replay took a new trace."""
    num_repeated_tokens: int
    traces: list[Stored]
    """All traces that were read, admitted or not."""


class TraceAdmission:
    """Fills replay, held-out pool and golden set; at the start with this rank's share of the last checkpoint."""

    def __init__(
        self,
        source: TraceSource,
        replay: ReplayBuffer,
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
        """The newest target version among the traces of all ranks."""
        self._num_older, self._warn_at = 0, _MANY_OLDER
        self._follow(self.target_version)
        self.domains = DomainNames(config.max_domains, progress.domain_tenants)
        self.drift = DriftMonitor(progress.drift)
        self._priorities = progress.replay or {}
        # Where an operator's recording is the golden set, the checkpoint's golden traces are held out instead.
        self._were_golden = set(progress.golden if config.golden is None else ())
        self._were_held_out = {*progress.held_out, *progress.golden} - self._were_golden
        wanted = None if progress.replay is None else [one for one in progress.trace_ids if ranks.owns(one)]
        num_found = 0
        for stored in source.history(wanted):
            if ranks.owns(stored.trace_id):
                self._restore(stored)
                num_found += 1
        if wanted:
            # Missing traces that are still pending in Redis come with the next reads.
            log.info("replay restored", num_traces=num_found, num_missing=len(wanted) - num_found)

    def read(self, block_ms: int) -> Arrivals:
        """Read as many traces as the replay has room for and admit each; also admit those released from held-out."""
        room = self._replay.room
        new = self._source.read(room, block_ms) if room else []
        self._follow_newest(new)
        self._notice_older(new)
        arrived = [(stored, self._take(stored)) for stored in new]
        for stored in self._source.pop_found():
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
        """Move to a newer target version before the traces are admitted, so that its traces can be held out."""
        newest = max((stored.provenance.target_version for stored in arrived), default=0)
        version, previous = self._ranks.max(newest), self.target_version
        if version > previous:
            self.target_version = version
            num_forgotten = self._follow(version)
            log.info("the target has moved", version=version, previous=previous, num_forgotten=num_forgotten)

    def _notice_older(self, arrived: Sequence[Stored]) -> None:
        """Warn where all traces are of older targets: then no trace is held out. It happens when the target's trainer
        restarts its version count.
        """
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
        """Apply a new target version; returns how many traces were too old and dropped."""
        too_old = self._replay.follow_target(version)
        self._source.mark_used(too_old)
        old = self.held_out.forget(lambda one: one.target_version < version)
        # An operator's recording stays and is never learnt from; its old traces do not count as fresh traffic.
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
        """Move the golden traces to the replay, so that the next arrivals refill the set; returns how many moved."""
        given_up = self.golden.remove_all()
        for stored in given_up:
            self._offer(stored)
        return len(given_up)

    def forget(
        self, is_gone: Callable[[Provenance], object], *, is_golden_gone: Callable[[Provenance], object]
    ) -> list[Stored]:
        """Remove and return traces for which `is_gone` is true, from all sets; they can be acked without a step."""
        gone = [*self._replay.forget(is_gone), *self.held_out.forget(is_gone), *self.golden.forget(is_golden_gone)]
        self._source.mark_used(gone)
        return gone

    @property
    def progress_counts(self) -> tuple[int, int]:
        """(`num_traces`, `new_tokens`) without waiting unacked traces: after a restart Redis delivers those again, and
        they are counted then.
        """
        in_hand = self._source.unused_trace_ids
        unused = [stored for stored in self._replay.waiting if stored.trace_id in in_hand]
        return self.num_traces - len(unused), self.new_tokens - sum(stored.num_bases for stored in unused)

    @property
    def golden_trace_ids(self) -> list[str]:
        """For the checkpoint; empty for an operator's recording, which is read again at every start."""
        return self.golden.trace_ids if self._config.golden is None else []

    @property
    def held_out_trace_ids(self) -> list[str]:
        """Not learnt from and not to be delivered again, oldest first: released and waiting ones, then the pool."""
        in_hand = self._source.unused_trace_ids
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
        elif self.golden.accepts(stored):
            self.golden.keep(stored)
            admission = Admission.GOLDEN
        elif self.held_out.holds_out(stored):
            self.held_out.keep(stored)
            admission = Admission.HELD_OUT
        else:
            return self._offer(stored)
        self._metrics.admissions.labels(admission).inc()
        return admission

    def _offer(self, stored: Stored) -> Admission:
        """Offer a trace to the replay."""
        provenance = stored.provenance
        domain = self.domains.name(provenance.domain, provenance.tenant)
        admission = self._replay.add(stored, domain=domain)
        self._metrics.admissions.labels(admission).inc()
        return admission

    def record_prediction(self, stored: Stored, num_accepted: int, num_positions: int) -> None:
        """Record how well the draft in training predicted a new trace before it learnt from it: its likeliest proposal
        was the target's token at `num_accepted` of `num_positions`.

        This measures the draft on all traffic, whatever the engine proposed in service. It sets the trace's priority
        and feeds the drift monitor.
        """
        if not num_positions:
            return
        domain = self.domains.name(stored.provenance.domain, stored.provenance.tenant)
        level = self.drift.level(domain)
        weight = priority(num_accepted / num_positions, *level, bound=self._config.max_priority)
        self._replay.prioritise(stored, weight)
        self.observe_acceptance(domain, num_accepted, num_positions)

    def observe_acceptance(self, domain: str, num_accepted: int, num_tokens: int) -> None:
        """Feed one answer of a domain to the drift monitor; log where acceptance has fallen."""
        for name in self.drift.observe(domain, num_accepted, num_tokens):
            series = self.drift.series[name]
            self._metrics.drift_alarms.labels(name).inc()
            log.warning("acceptance fell", domain=name, short=series.short, long=series.long, margin=series.margin)
        for name in (domain, ALL):
            series = self.drift.series[name]
            long = series.long if series.num_long else None
            self._metrics.observe_drift(name, short=series.short, long=long, margin=series.margin, alarm=series.alarm)

    def _restore(self, stored: Stored) -> None:
        """Put a trace back into its set. A held-out or golden one of an older target goes to the replay as new."""
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


POLL_S = 1.0
REASONS = ("erased", "expired")


class RetentionPolicy:
    """Says which traces to forget, and reports to Redis what was removed. `name` identifies this process there; `ttl_s`
    0 sets no age limit. Ages are by Redis's clock; while Redis is away nothing is too old.
    """

    def __init__(
        self,
        erasures: ErasureOrders,
        remover: TraceRemover,
        *,
        name: str,
        ttl_s: float,
        metrics: TrainerMetrics,
    ) -> None:
        self._erasures, self._remover, self._name, self._ttl_s = erasures, remover, name, ttl_s
        self._metrics = metrics
        self._now_ms: int | None = None
        self._orders: dict[str, int] = {}
        self._ordered: set[str] = set()
        """Tenants whose order has just come: everything of theirs goes, whatever the clocks of their engines said."""
        self._are_known = False
        self._removed: Counter[str] = Counter()
        self._polled_s: float | None = None
        self._is_away = False
        self.is_refused = False
        """Redis did not take the last report: it is away, or full, or cannot write to its disk."""

    def reason(self, provenance: Provenance) -> str | None:
        """Why a trace must be forgotten, one of REASONS; None where it may be kept."""
        if provenance.tenant in self._ordered or covers(self._orders, provenance.tenant, provenance.created_ms):
            return "erased"
        if not self._ttl_s or self._now_ms is None:
            return None
        # The clock of an engine may be wrong: a trace from far in the future would never be too old.
        return "expired" if abs(self._now_ms - provenance.created_ms) > 1000 * self._ttl_s else None

    def reason_in_recording(self, provenance: Provenance) -> str | None:
        """The same for an operator's recording, which does not expire: the operator chose its age."""
        return "erased" if self.reason(provenance) == "erased" else None

    @property
    def may_have_orders(self) -> bool:
        """There is an erasure order, or the orders could not be read yet."""
        return bool(self._orders) or not self._are_known

    def poll(self) -> bool:
        """Read the erasure orders, every POLL_S. True where that was due: remove the traces that have a `reason`, then
        `report`. Without Redis the known orders hold.
        """
        now_s = time.monotonic()
        if self._polled_s is not None and now_s - self._polled_s < POLL_S:
            return False
        self._polled_s = now_s
        try:
            orders = self._erasures.orders()
            # Not by this machine's clock: one wrong reading would empty the replay, the evaluation sets and the disk.
            self._now_ms = self._erasures.time_ms()
        except StreamError as error:
            self._now_ms = None
            self._failed(error)
            return True
        # At the start an order may be older than what was kept since.
        self._ordered = {name for name in orders if self._are_known and orders[name] != self._orders.get(name)}
        self._orders, self._are_known, self._is_away = orders, True, self.is_refused
        return True

    def sweep(self) -> bool:
        """Remove what the orders cover from the stream: an engine that was cut off may send it after the erasure.

        False where it must be tried again.
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
        """Report to Redis that this process has removed everything that the orders cover."""
        self._ordered = set()
        report = TrainerReport(
            erased_ms=max(self._orders.values(), default=0),
            removed={tenant: self._removed[tenant] for tenant in self._orders},
        )
        try:
            self._erasures.report(self._name, report)
            if self.is_refused:
                self.is_refused = self._is_away = False
        except StreamError as error:
            self.is_refused = True
            self._failed(error)

    def close(self) -> None:
        try:
            self._erasures.remove_report(self._name)
        except StreamError as error:
            self._failed(error)

    def _failed(self, error: StreamError) -> None:
        self._metrics.stream_errors.labels("erasures").inc()
        if not self._is_away:
            log.warning("orders to forget not known for now", error=str(error))
        self._is_away = True

"""Hop 5 to 6: what becomes of an arriving trace. It is offered to the replay, and its acceptance is watched.

A trace whose text is in the replay already, or was refused, is done with at once: it needs no step, and it does not
count for drift, or one client that repeats itself could raise an alarm. "Already" is about the replay of this rank:
where several train together, one text may have a place in each.
"""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from trainer.checkpoint import Progress
from trainer.config import TrainerConfig
from trainer.distributed import Ranks
from trainer.domains import ALL, DomainNames
from trainer.drift import DriftMonitor
from trainer.metrics import TrainerMetrics
from trainer.priority import priority
from trainer.provenance import Stored
from trainer.replay import Admission, Replay
from trainer.source import TraceSource

log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """What one read brought: news, or only `num_repeated_tokens` of texts that the replay has."""

    is_news: bool
    num_repeated_tokens: int


class Intake:
    """Fills the replay, first with this rank's share of what all replays held at the last checkpoint."""

    def __init__(
        self,
        source: TraceSource,
        replay: Replay,
        config: TrainerConfig,
        metrics: TrainerMetrics,
        progress: Progress,
        ranks: Ranks,
    ) -> None:
        self._source, self._replay, self._config, self._metrics = source, replay, config, metrics
        self.num_traces, self.new_tokens = progress.num_traces, progress.new_tokens
        self.num_repeated = progress.num_repeated
        self.domains = DomainNames(config.max_domains, progress.domains)
        self.drift = DriftMonitor(progress.drift)
        self._priorities = progress.replay or {}
        wanted = None if progress.replay is None else [one for one in progress.replay if ranks.owns(one)]
        for stored in source.history(config.stream_max_bytes, wanted):
            if ranks.owns(stored.trace_id):
                self._restore(stored)
        if wanted:
            # Pending ones come again with the next reads.
            missing = len(wanted) - len(replay.members)
            log.info("replay filled again", num_traces=len(replay), num_missing=missing)

    def read(self, block_ms: int) -> Arrivals:
        """Take as many traces as the replay has room for."""
        room = self._replay.room
        arrived = [(stored, self._take(stored)) for stored in (self._source.read(room, block_ms) if room else ())]
        for stored in self._source.take_found():
            self._restore(stored)
        return Arrivals(
            is_news=any(admission is Admission.NEW for _, admission in arrived),
            num_repeated_tokens=sum(
                stored.num_bases for stored, admission in arrived if admission is Admission.REPEATED
            ),
        )

    def _take(self, stored: Stored) -> Admission:
        provenance, domain = stored.provenance, self.domains.name(stored.provenance.domain)
        weight = priority(provenance.acceptance, *self.drift.level(domain), bound=self._config.max_priority)
        admission = self._replay.add(stored, domain=domain, priority=weight)
        self._metrics.admissions.labels(admission).inc()
        if admission is not Admission.NEW:
            self.num_repeated += admission is Admission.REPEATED
            self._source.mark_used([stored])
            return admission
        self.num_traces += 1
        self.new_tokens += stored.num_bases
        if provenance.acceptance is not None:
            self.watch(domain, provenance.num_accepted, provenance.num_completion_tokens)
        return admission

    def watch(self, domain: str, num_accepted: int, num_tokens: int) -> None:
        """Count one answer of a domain, and say so where acceptance has fallen."""
        for name in self.drift.observe(domain, num_accepted, num_tokens):
            series = self.drift.series[name]
            self._metrics.drift_alarms.labels(name).inc()
            log.warning("acceptance fell", domain=name, short=series.short, long=series.long, margin=series.margin)
        for name in (domain, ALL):
            self._metrics.observe_drift(name, self.drift.series[name])

    def _restore(self, stored: Stored) -> None:
        domain, weight = self.domains.name(stored.provenance.domain), self._priorities.get(stored.trace_id, 1.0)
        self._replay.restore(stored, domain=domain, priority=weight)

"""All Prometheus metrics of the trainer."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from speculator.redis.stream_accounting import StreamLag
from trainer.statistics import Comparison

_AGE_BUCKETS_S = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800)
_STEP_BUCKETS_S = (0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 1, 2, 5)
_ADMISSIONS = (
    *("new", "held_out", "golden", "repeated", "refused", "no_room", "old_target"),
    "passed_over",
)
_STREAM_STATES = (
    *("undelivered", "pending", "acked", "lost", "dead_lettered", "erased", "expired"),
    *("skipped", "redelivered", "foreign"),
)


class TrainerMetrics:
    """The trainer's metrics. Label values are bounded: fixed words, and the domains of `DomainNames`.

    Each of several ranks has its own: steps, learnt tokens, loss, acceptance length, health and versions are about all
    ranks and equal on each; traces, replay, acceptance and drift are about the rank's own share.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._domains_with_bytes: set[str] = set()
        self._num_evicted = 0
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)

        # Traces that arrive.
        self.traces = counter(
            "slipstream_trainer_traces",
            "Traces read: admitted, duplicate, dead_lettered, erased with their tenant, expired",
            ["outcome"],
        )
        self.forgotten = counter(
            "slipstream_trainer_forgotten_traces",
            "Traces deleted from replay, evaluation sets and disk: erased with their tenant, expired",
            ["reason"],
        )
        self.other_target = counter(
            "slipstream_trainer_other_target_traces", "Traces of another target, all of them dead-lettered"
        )
        self.new_tokens = counter("slipstream_trainer_new_tokens", "Completion tokens received")
        self.trace_age = histogram(
            "slipstream_trainer_trace_age_seconds",
            "Time from a request's start to its trace's arrival here",
            buckets=_AGE_BUCKETS_S,
        )
        self.stream_errors = counter("slipstream_trainer_stream_errors", "Failed Redis calls", ["operation"])
        self.rewards = counter("slipstream_trainer_rewarded_samples", "Rollout samples whose rewards were read")

        # Learning.
        self.steps = counter(
            "slipstream_trainer_steps", "Optimiser steps: applied, skipped (not finite, or no label)", ["outcome"]
        )
        self.step_seconds = histogram("slipstream_trainer_step_seconds", "Time of one step", buckets=_STEP_BUCKETS_S)
        self.learnt_tokens = counter(
            "slipstream_trainer_learnt_tokens", "Completion tokens in all steps, repetitions included"
        )
        self.loss = gauge("slipstream_trainer_loss_nats", "Loss of the last step")
        self.accept_length = gauge(
            "slipstream_trainer_accept_length",
            "Acceptance length on the last step's traces, most of which were learned from before",
        )

        # The replay.
        self.replay_bytes = gauge("slipstream_trainer_replay_bytes", "Memory of the replay")
        self.replay_traces = gauge("slipstream_trainer_replay_traces", "Traces in the replay")
        self.waiting_traces = gauge("slipstream_trainer_waiting_traces", "Traces read and not learned from")
        self.known_traces = gauge("slipstream_trainer_known_traces", "Trace ids remembered to recognise repeats")
        self.admissions = counter(
            "slipstream_trainer_replay_admissions",
            "Traces by what the replay did: new, held_out (counted again when released), golden, repeated (known "
            "text), refused, no_room, old_target, passed_over (kept without a first step: tenant over its share)",
            ["outcome"],
        )
        self.evictions = counter("slipstream_trainer_replay_evictions", "Learned traces evicted for others")
        self.domain_bytes = gauge(
            "slipstream_trainer_replay_domain_bytes", "Memory of the replay by domain", ["domain"]
        )

        # Drift.
        self.acceptance = gauge(
            "slipstream_trainer_acceptance_ratio",
            "Share of answer tokens that the draft in training proposes first, before learning from them: average "
            "of recent requests (short) and of those before (long)",
            ["domain", "window"],
        )
        self.drift_margin = gauge(
            "slipstream_trainer_drift_margin_ratio",
            "Fall of the short average that raises an alarm; 1 until it is known",
            ["domain"],
        )
        self.drift_alarm = gauge(
            "slipstream_trainer_drift_alarm", "1 during a drift alarm: acceptance has fallen", ["domain"]
        )
        self.drift_alarms = counter("slipstream_trainer_drift_alarms", "Drift alarms raised", ["domain"])
        self.pressure = gauge("slipstream_trainer_pressure_ratio", "How much further training is worth; 0: nothing")

        # Rests beside busy engines.
        self.time_share = gauge(
            "slipstream_trainer_time_share_ratio",
            "Share of its time that training may compute, by the load of engines on its machine",
        )
        self.resting = gauge(
            "slipstream_trainer_resting",
            "1 while the trainer rests, because no engine uses the draft head and training would hardly change that",
        )
        self.yielded = counter(
            "slipstream_trainer_yielded_seconds", "Time that training waited for serving on its machine"
        )

        # Health of the weights.
        self.healthy = gauge(
            "slipstream_trainer_healthy", "0 while steps are not finite, or were recently: nothing is published"
        )
        self.restored = counter("slipstream_trainer_restored", "Times the last good weights were restored")

        # The gate.
        self.held_out_traces = gauge(
            "slipstream_trainer_held_out_traces", "Traces that judge candidates: held_out, golden", ["set"]
        )
        self.gate_decisions = counter(
            "slipstream_trainer_gate_decisions", "Candidates by the gate's decision: promote, refuse, hold", ["outcome"]
        )
        self.gate_seconds = gauge("slipstream_trainer_gate_seconds", "Duration of the gate's last decision")
        self.gate_change = gauge(
            "slipstream_trainer_gate_change_ratio",
            "Relative change of acceptance length from incumbent to candidate at the last decision, with bounds",
            ["set", "bound"],
        )

        # Versions in service.
        self.reviews = counter(
            "slipstream_trainer_review_decisions",
            "Versions in service by the review's decision: rolled_back, kept, undecided, withdrawn",
            ["outcome"],
        )
        self.review_change = gauge(
            "slipstream_trainer_review_change_ratio",
            "Relative change of acceptance length from the version before to the one in service at the last review, "
            "with bounds",
            ["bound"],
        )
        self.review_traces = counter(
            "slipstream_trainer_review_traces", "Traces that both versions decoded for reviews"
        )
        self.review_seconds = counter("slipstream_trainer_review_seconds", "Training time spent on reviews")
        self.publishing_paused = gauge(
            "slipstream_trainer_publishing_paused",
            "1 while nothing is published: engines rolled back two versions in a row, or one is on trial since",
        )
        self.started_over = counter(
            "slipstream_trainer_started_over", "Times training started over from the last good version"
        )

        # Stream and checkpoint.
        self.stream_lag = gauge(
            "slipstream_trainer_stream_entries",
            "Stream entries at the last checkpoint. Each is in one state: undelivered, pending (read, not "
            "acknowledged) or skipped (hidden by another client); or, since the stream began, acked, lost or erased. "
            "Counted besides: dead_lettered (of acked), expired (of acked and lost), redelivered, foreign (not ours)",
            ["state"],
        )
        self.stream_bytes = gauge(
            "slipstream_trainer_stream_bytes",
            "Payload bytes in the stream at the last checkpoint, acknowledged entries included",
        )
        self.checkpoint_seconds = gauge("slipstream_trainer_checkpoint_seconds", "Duration of the last checkpoint")

        # Versions.
        self.target_version = gauge("slipstream_trainer_target_version", "Newest target version of a received trace")
        self.published_version = gauge("slipstream_trainer_published_version", "Draft version last published")
        self.publish_errors = counter("slipstream_trainer_publish_errors", "Versions that could not be published")

        self._begin_at_zero()

    def serve(self, host: str, port: int) -> None:
        """Expose the registry on an address of this machine, from a daemon thread."""
        start_http_server(port, host, self.registry)

    def observe_arrival(self, num_tokens: int, created_ms: int) -> None:
        self.traces.labels("admitted").inc()
        self.new_tokens.inc(num_tokens)
        self.trace_age.observe(max(time.time() - created_ms / 1000, 0.0))

    def observe_step(
        self, *, applied: bool, num_tokens: int, loss: float, accept_length: float, seconds: float
    ) -> None:
        self.steps.labels("applied" if applied else "skipped").inc()
        self.step_seconds.observe(seconds)
        if applied:
            self.learnt_tokens.inc(num_tokens)
            self.loss.set(loss)
            self.accept_length.set(accept_length)

    def observe_replay(
        self, *, num_traces: int, num_waiting: int, num_evicted: int, bytes_by_domain: Mapping[str, int]
    ) -> None:
        """`num_evicted` counts since the start of the process."""
        self.replay_bytes.set(sum(bytes_by_domain.values()))
        self.replay_traces.set(num_traces)
        self.waiting_traces.set(num_waiting)
        self.evictions.inc(num_evicted - self._num_evicted)
        self._num_evicted = num_evicted
        for domain in self._domains_with_bytes | bytes_by_domain.keys():
            self.domain_bytes.labels(domain).set(bytes_by_domain.get(domain, 0))
        self._domains_with_bytes |= bytes_by_domain.keys()

    def observe_gate(
        self, outcome: str, seconds: float, *, fresh: Comparison | None, golden: Comparison | None
    ) -> None:
        self.gate_decisions.labels(outcome).inc()
        self.gate_seconds.set(seconds)
        for name, found in (("held_out", fresh), ("golden", golden)):
            if found is not None:
                for bound, value in _bounds(found):
                    self.gate_change.labels(name, bound).set(value)

    def observe_review(self, found: Comparison) -> None:
        for bound, value in _bounds(found):
            self.review_change.labels(bound).set(value)

    def observe_decoded(self, num_traces: int, seconds: float) -> None:
        """Traces that this rank has decoded for a review."""
        self.review_traces.inc(num_traces)
        self.review_seconds.inc(seconds)

    def observe_drift(self, domain: str, *, short: float, long: float | None, margin: float, alarm: bool) -> None:
        """`long` is None until it is known."""
        self.acceptance.labels(domain, "short").set(short)
        if long is not None:
            self.acceptance.labels(domain, "long").set(long)
        self.drift_alarm.labels(domain).set(alarm)
        self.drift_margin.labels(domain).set(min(margin, 1.0))

    def observe_lag(self, lag: StreamLag) -> None:
        for state in _STREAM_STATES:
            self.stream_lag.labels(state).set(getattr(lag, state))
        self.stream_bytes.set(lag.bytes)

    def _begin_at_zero(self) -> None:
        """Create all series with known labels at 0: `increase()` misses the first event of one that appears with it."""
        for metric, labels in (
            (self.traces, ("admitted", "duplicate", "dead_lettered", "erased", "expired")),
            (self.forgotten, ("erased", "expired")),
            (self.stream_errors, ("read", "ack", "lag", "recent", "take_over", "dead_letter", "erasures", "rewards")),
            (self.steps, ("applied", "skipped")),
            (self.admissions, _ADMISSIONS),
            (self.gate_decisions, ("promote", "refuse", "hold")),
            (self.reviews, ("rolled_back", "kept", "undecided", "withdrawn")),
            (self.drift_alarm, ("all",)),
            (self.drift_alarms, ("all",)),
            (self.held_out_traces, ("held_out", "golden")),
        ):
            for label in labels:
                metric.labels(label)


def _bounds(found: Comparison) -> list[tuple[str, float]]:
    bounds = ("estimate", found.change), ("lower", found.lower), ("upper", found.upper)
    return [(name, math.nan if value is None else value) for name, value in bounds]

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
            "Traces that were read: admitted, duplicate, dead_lettered; not kept: erased with their tenant, expired",
            ["outcome"],
        )
        self.forgotten = counter(
            "slipstream_trainer_forgotten_traces",
            "Traces removed from replay, held-out and golden set and disk: erased with their tenant, expired",
            ["reason"],
        )
        self.other_target = counter(
            "slipstream_trainer_other_target_traces",
            "Traces of another target than this trainer's, all of them dead-lettered",
        )
        self.new_tokens = counter("slipstream_trainer_new_tokens", "Completion tokens that arrived to learn from")
        self.trace_age = histogram(
            "slipstream_trainer_trace_age_seconds", "From a trace's birth to its arrival here", buckets=_AGE_BUCKETS_S
        )
        self.stream_errors = counter("slipstream_trainer_stream_errors", "Redis calls that failed", ["operation"])
        self.rewards = counter("slipstream_trainer_rewarded_samples", "Samples of rollouts whose rewards were read")

        # Learning.
        self.steps = counter(
            "slipstream_trainer_steps", "Optimiser steps; skipped = not finite, or no label", ["outcome"]
        )
        self.step_seconds = histogram("slipstream_trainer_step_seconds", "Time of one step", buckets=_STEP_BUCKETS_S)
        self.learnt_tokens = counter(
            "slipstream_trainer_learnt_tokens", "Completion tokens in all steps, repetitions included"
        )
        self.loss = gauge("slipstream_trainer_loss_nats", "Loss of the last step")
        self.accept_length = gauge(
            "slipstream_trainer_accept_length",
            "Committed tokens a verification on the last step's traces, most of which were learnt from before",
        )

        # The replay.
        self.replay_bytes = gauge("slipstream_trainer_replay_bytes", "Memory of the replay")
        self.replay_traces = gauge("slipstream_trainer_replay_traces", "Traces in the replay")
        self.waiting_traces = gauge(
            "slipstream_trainer_waiting_traces", "Traces that were read and not yet learnt from"
        )
        self.known_traces = gauge(
            "slipstream_trainer_known_traces", "Trace ids that are remembered, to know one that comes again"
        )
        self.admissions = counter(
            "slipstream_trainer_replay_admissions",
            "Traces by what the replay did with them: new; held_out = counted again when they are released; golden; "
            "repeated = their text is here already; refused; no_room; passed_over = kept without a first step, their "
            "tenant had its share",
            ["outcome"],
        )
        self.evictions = counter("slipstream_trainer_replay_evictions", "Learnt traces that gave way to others")
        self.domain_bytes = gauge(
            "slipstream_trainer_replay_domain_bytes", "Memory of the replay by domain", ["domain"]
        )
        self.proposal_weight = gauge(
            "slipstream_trainer_proposal_weight_ratio",
            "Mean share of the last batch's proposals that are fresh enough to count",
        )

        # Drift.
        self.acceptance = gauge(
            "slipstream_trainer_acceptance_ratio",
            "Share of answer tokens that the draft in training proposes first, before it learns from the trace: short "
            "average, and long average of the requests that have left it",
            ["domain", "window"],
        )
        self.drift_margin = gauge(
            "slipstream_trainer_drift_margin_ratio",
            "Fall of the short average that is an alarm; 1, which no fall exceeds, until it is learnt",
            ["domain"],
        )
        self.drift_alarm = gauge(
            "slipstream_trainer_drift_alarm", "1 while acceptance is below what it was", ["domain"]
        )
        self.drift_alarms = counter("slipstream_trainer_drift_alarms", "Drift alarms raised", ["domain"])
        self.pressure = gauge(
            "slipstream_trainer_pressure_ratio", "How much more training is worth its compute; 0 = idle"
        )

        # Rests beside busy engines.
        self.time_share = gauge(
            "slipstream_trainer_time_share_ratio",
            "Share of its time in which training computes, by how busy the engines of its machine are",
        )
        self.resting = gauge(
            "slipstream_trainer_resting",
            "1 while the trainer rests: no engine asks the draft head, and more training would hardly change that",
        )
        self.yielded = counter(
            "slipstream_trainer_yielded_seconds", "Time that training waited for serving on its machine"
        )

        # Health of the weights.
        self.healthy = gauge(
            "slipstream_trainer_healthy", "0 while steps are not finite, or were lately: nothing is published"
        )
        self.restored = counter("slipstream_trainer_restored", "Times the last good weights were taken back")

        # The gate.
        self.held_out_traces = gauge(
            "slipstream_trainer_held_out_traces", "Traces that judge candidates: held_out, golden", ["set"]
        )
        self.gate_decisions = counter(
            "slipstream_trainer_gate_decisions",
            "Candidates by what the gate decided: promote, refuse, hold",
            ["outcome"],
        )
        self.gate_seconds = gauge("slipstream_trainer_gate_seconds", "Time of the last decision of the gate")
        self.gate_change = gauge(
            "slipstream_trainer_gate_change_ratio",
            "Relative change of acceptance length from incumbent to candidate at the last decision, and its bounds",
            ["set", "bound"],
        )

        # Versions in service.
        self.reviews = counter(
            "slipstream_trainer_review_decisions",
            "Versions that came into service by what a second look on the same traces said: rolled_back, kept, "
            "undecided, withdrawn",
            ["outcome"],
        )
        self.review_change = gauge(
            "slipstream_trainer_review_change_ratio",
            "Relative change of acceptance length from incumbent to version at the last second look, and its bounds",
            ["bound"],
        )
        self.review_traces = counter("slipstream_trainer_review_traces", "Traces that both versions decoded for it")
        self.review_seconds = counter("slipstream_trainer_review_seconds", "Time that this took from training")
        self.publishing_paused = gauge(
            "slipstream_trainer_publishing_paused",
            "1 while nothing is published because engines rolled back two versions in a row, or one is on trial since",
        )
        self.started_over = counter(
            "slipstream_trainer_started_over", "Times the weights in training were given up for the last good version"
        )

        # Stream and checkpoint.
        self.stream_lag = gauge(
            "slipstream_trainer_stream_entries",
            "Stream entries at the start or the last checkpoint: undelivered and pending wait; acked, lost, "
            "dead_lettered, erased (before an ack) and expired (acked or lost) count since the stream began; done by "
            "other clients: skipped (unacked, not to be delivered), redelivered (acked again), foreign (theirs)",
            ["state"],
        )
        self.stream_bytes = gauge(
            "slipstream_trainer_stream_bytes", "Payload in the stream at that time, history included"
        )
        self.checkpoint_seconds = gauge("slipstream_trainer_checkpoint_seconds", "Time of the last checkpoint")

        # Versions.
        self.target_version = gauge(
            "slipstream_trainer_target_version", "Newest version of the target of which a trace has come"
        )
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

"""Prometheus collectors of the engines; the gateway's are in serving/gateway/metrics.py."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from serving.acceptance import AcceptanceByLength, LengthKey
from serving.capture.recorder import DROP_REASONS, RecorderStats
from serving.capture.sampling import BRANCH_OUTCOMES
from serving.hotswap.follower import SwapLog
from serving.speedup import (
    BASELINE,
    NOTHING_MEASURED,
    PLAN_MODEL,
    SERVED_PLAINLY,
    SUFFIX_ONLY,
    Group,
    Speedup,
    SpeedupMeter,
)

# Names and help texts of metrics that both engines have.
ROUNDS = (
    "slipstream_rounds",
    "Decode rounds by batch size and mode: speculative, control (no drafts), with_prompt (reads a prompt chunk, too)",
)
ROUND_SECONDS = "slipstream_round_seconds", "Time in decode rounds"
ROUND_TOKENS = "slipstream_round_tokens", "Tokens committed by decode rounds"
PROPOSALS = "slipstream_proposals", "Verified proposals by source and position; a tree counts once per position"
ACCEPTED = "slipstream_accepted", "Accepted proposals by source and position"
TEXTS = ("own", "group", "tenant")
"""Whose text a suffix proposal is from: the request's own, its prompt group's, its tenant's."""
ACCEPTED_TEXT = (
    "slipstream_accepted_text",
    "Accepted proposals from earlier text of the request (own), its prompt group or its tenant",
)
VERIFICATIONS = (
    "slipstream_verifications",
    "Verifications: one per request and drafting round, even without a proposal",
)
VERIFIED_TOKENS = (
    "slipstream_verified_tokens",
    "Tokens committed by verifications; divided by verifications, this is the acceptance length",
)
VERIFICATIONS_BY_LENGTH = (
    "slipstream_verifications_by_length",
    "Verifications by source and by length of the context or answer before them",
)
VERIFIED_TOKENS_BY_LENGTH = "slipstream_verified_tokens_by_length", "Tokens committed by these verifications"
BRANCH_ROWS = (
    "slipstream_capture_branch_rows",
    "Rejected proposals drawn for traces: kept, dropped for the budget, or cut with their answer's end",
)
SUFFIX_TOKENS = "slipstream_suffix_tokens", "Tokens of earlier text kept for proposals"
DRAFT_VERSION = "slipstream_draft_version", "Draft version in service"
DEPTH = "slipstream_depth", "Maximum proposals per round"
SWAPS = "slipstream_swaps", "Draft swaps: installed, failed"

GROUP_TEXT_OUTCOMES = ("published", "fetched", "buffer_full", "ended", "expired", "failed", "closed")

_GROUPS_LAST_S = 5.0
"""Speedups of groups are cached for so long: for 32 groups they take 25 ms, and the live page reads every second."""
_STALL_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
_TARGET_STALL_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class EngineMetrics:
    """What the decode loop counts. Labels are bounded by the number of slots and the largest depth."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.rounds = counter(*ROUNDS, ["mode", "batch"])
        self.round_seconds = counter(*ROUND_SECONDS, ["mode", "batch"])
        self.round_tokens = counter(*ROUND_TOKENS, ["mode", "batch"])
        self.expected_seconds = counter(
            "slipstream_round_expected_seconds", "Time that planned rounds were expected to take", ["batch"]
        )
        self.expected_tokens = counter(
            "slipstream_round_expected_tokens", "Tokens that planned rounds were expected to commit", ["batch"]
        )
        self.verifications = counter(*VERIFICATIONS)
        self.verified_tokens = counter(*VERIFIED_TOKENS)
        self.proposals = counter(*PROPOSALS, ["source", "position"])
        self.accepted = counter(*ACCEPTED, ["source", "position"])
        self.accepted_text = counter(*ACCEPTED_TEXT, ["text"])
        self.proposed_tokens = counter(
            "slipstream_proposed_tokens", "Verified proposals by source, all those of a tree", ["source"]
        )
        self.probes = counter(
            "slipstream_draft_probes",
            "Probes of an unused draft head, by whether its proposal was accepted or rejected",
            ["outcome"],
        )
        self.head_ab_rounds = counter(
            "slipstream_head_ab_rounds",
            "Drafting rounds of the draft head's A/B that read no prompt, with the head (both) and without it "
            "(suffix_only)",
            ["arm", "batch"],
        )
        self.head_ab_seconds = counter(
            "slipstream_head_ab_round_seconds", "Time in rounds of the draft head's A/B", ["arm", "batch"]
        )
        self.head_ab_tokens = counter(
            "slipstream_head_ab_round_tokens", "Tokens committed by rounds of the draft head's A/B", ["arm", "batch"]
        )
        self.head_ab_asked = counter(
            "slipstream_head_ab_asked_rounds", "Rounds of arm both in which the draft head proposed"
        )
        self.draft_version = gauge(*DRAFT_VERSION)
        self.last_swap = gauge("slipstream_last_swap_timestamp_seconds", "Unix time of the last swap")
        self.depth = gauge(*DEPTH)
        self.swaps = counter(*SWAPS, ["outcome"])
        self.swap_stall = histogram(
            "slipstream_swap_stall_seconds", "Decode time lost to a swap", buckets=_STALL_BUCKETS_S
        )
        self.capture_seconds = counter(
            "slipstream_capture_seconds", "Time that the decode loop spent handing over finished traces"
        )
        self.unlabelled = counter(
            "slipstream_capture_unlabelled_positions",
            "Captured prompt positions without target distribution: too many waited, the target changed, the engine "
            "stopped or erased the tenant",
        )
        self.branch_rows = counter(*BRANCH_ROWS, ["outcome"])
        self.capture_failures = counter(
            "slipstream_capture_failures", "Traces and distributions that could not be made (a bug)"
        )
        self.suffix_tokens = gauge(*SUFFIX_TOKENS)
        self.aborted = counter("slipstream_requests_aborted", "Requests whose client left")
        for metric, labels in (
            (self.accepted_text, TEXTS),
            (self.probes, ("accepted", "rejected")),
            (self.swaps, ("installed", "failed")),
            (self.branch_rows, BRANCH_OUTCOMES),
        ):
            for label in labels:
                metric.labels(label)


class TargetMetrics:
    """Metrics of a target whose weights change."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.version = gauge("slipstream_target_version", "Target version in service; 0: that of the start")
        self.moves = counter("slipstream_target_moves", "Announced targets: installed, refused", ["outcome"])
        for outcome in ("installed", "refused"):
            self.moves.labels(outcome)
        self.stall = histogram(
            "slipstream_target_stall_seconds",
            "Decode time lost to a new target; 0 if the engine updates itself",
            buckets=_TARGET_STALL_BUCKETS_S,
        )

    def installed(self, version: int, stall_s: float) -> None:
        self.version.set(version)
        self.moves.labels("installed").inc()
        self.stall.observe(stall_s)


class GroupTextMetrics(Collector):
    """Metrics of text that engines share within prompt groups (serving/group_cache/sync.py). Each count has one writer.

    Not Prometheus' own counters: SGLang would expose those too, since its processes share a folder of them.
    """

    def __init__(self) -> None:
        self.tokens = dict.fromkeys(GROUP_TEXT_OUTCOMES, 0)
        self.evicted = self.unreadable = 0

    def count(self, outcome: str, num_tokens: int) -> None:
        self.tokens[outcome] += num_tokens

    def collect(self) -> Iterator[Metric]:
        return group_text_metrics(tokens=self.tokens, evicted=self.evicted, unreadable=self.unreadable)


class ServingCollector(Collector):
    """Metrics computed at each scrape: speedup (measured and estimated), acceptance by length, trace counts."""

    def __init__(
        self,
        meter: SpeedupMeter,
        recorder: Callable[[], RecorderStats] | None,
        estimate: Callable[[], float | None] = lambda: None,
        end_to_end: Callable[[], Speedup] = lambda: NOTHING_MEASURED,
        head: Callable[[], Speedup] = lambda: NOTHING_MEASURED,
        by_length: AcceptanceByLength | None = None,
    ) -> None:
        self._head = head
        self._meter, self._recorder, self._estimate, self._end_to_end = meter, recorder, estimate, end_to_end
        self._by_length = by_length or AcceptanceByLength()
        self._groups: Mapping[Group, Speedup] = {}
        self._grouped_s = -math.inf

    def collect(self) -> Iterator[Metric]:
        yield from speedup_metrics(self._meter.measure(), self._end_to_end(), self._estimate())
        yield from _with_interval(
            "slipstream_speedup_head_ratio",
            "Gain of the draft head: time per token with earlier text alone over that with both, same batch sizes, "
            "last 20 stretches; needs its A/B",
            SUFFIX_ONLY,
            self._head(),
        )
        yield from _group_speedups(self._measured_groups())
        yield from by_length_metrics(self._by_length.verifications(), self._by_length.tokens())
        if self._recorder is None:
            return
        stats = self._recorder()
        yield from trace_metrics(
            captured=stats.captured,
            appended=stats.appended,
            dropped_by_reason=stats.dropped_by_reason,
            pending=stats.pending,
            num_bytes=stats.bytes_appended,
            num_tokens=stats.tokens_appended,
            share=stats.share,
            acked=stats.acked,
        )

    def _measured_groups(self) -> Mapping[Group, Speedup]:
        now_s = time.monotonic()
        if now_s - self._grouped_s >= _GROUPS_LAST_S:
            self._groups, self._grouped_s = self._meter.measure_groups(), now_s
        return self._groups


def trace_metrics(
    *,
    captured: int | None,
    appended: int | None,
    dropped_by_reason: Mapping[str, int],
    pending: int | None,
    num_bytes: int | None,
    num_tokens: int | None,
    share: float | None,
    acked: int | None,
    branch_rows: Mapping[str, int] | None = None,
) -> Iterator[Metric]:
    """A recorder's accounts; None is left out. Every reason of its own stands there from the start."""
    yield CounterMetricFamily("slipstream_traces_captured", "Finished traces of captured requests", captured)
    yield CounterMetricFamily("slipstream_traces_appended", "Traces written to the stream", appended)
    dropped = CounterMetricFamily("slipstream_traces_dropped", "Traces dropped, by reason", labels=["reason"])
    yield by_label(dropped, {**dict.fromkeys(DROP_REASONS, 0), **dropped_by_reason})
    yield GaugeMetricFamily("slipstream_traces_pending", "Traces waiting for the stream", pending)
    yield CounterMetricFamily("slipstream_trace_bytes", "Bytes of traces written to the stream", num_bytes)
    yield CounterMetricFamily("slipstream_trace_tokens", "Tokens of traces written to the stream", num_tokens)
    yield GaugeMetricFamily(
        "slipstream_capture_share_ratio",
        "Share of finished traces that capture keeps; below 1 if Redis or the trainer cannot take all",
        share,
    )
    yield GaugeMetricFamily(
        "slipstream_stream_acked_traces",
        "Traces of all engines that the trainer has acknowledged",
        acked,
    )
    if branch_rows is not None:
        rows = CounterMetricFamily(*BRANCH_ROWS, labels=["outcome"])
        yield by_label(rows, {**dict.fromkeys(BRANCH_OUTCOMES, 0), **branch_rows})


def by_length_metrics(verifications: Mapping[LengthKey, int], tokens: Mapping[LengthKey, int]) -> Iterator[Metric]:
    for about, counts in ((VERIFICATIONS_BY_LENGTH, verifications), (VERIFIED_TOKENS_BY_LENGTH, tokens)):
        yield by_label(CounterMetricFamily(*about, labels=["source", "of", "up_to"]), counts)


def group_text_metrics(*, tokens: Mapping[str, int], evicted: int | None, unreadable: int | None) -> Iterator[Metric]:
    """`tokens` by outcome. None is left out."""
    outcomes = CounterMetricFamily(
        "slipstream_group_text_tokens",
        "Tokens of prompt groups: published, fetched from others; or not published: buffer_full (Redis away), ended "
        "(or erased), expired, failed (a bug), closed",
        labels=["outcome"],
    )
    yield by_label(outcomes, tokens)
    yield CounterMetricFamily(
        "slipstream_group_texts_evicted", "Texts of prompt groups evicted to stay within bounds", evicted
    )
    yield CounterMetricFamily(
        "slipstream_group_texts_unreadable", "Texts of prompt groups with foreign content", unreadable
    )


def speedup_metrics(measured: Speedup, end_to_end: Speedup, estimated: float | None) -> Iterator[Metric]:
    """The measured speedup of decode rounds and of requests, each with interval and baseline, and the speedup that the
    planner's cost model estimates.

    They are never mixed. An unknown value has no sample.
    """
    yield from _with_interval(
        "slipstream_speedup_measured_ratio",
        "Measured speedup: time per token without drafts over that with drafts, same batch sizes, last two minutes",
        BASELINE,
        measured,
    )
    yield from _with_interval(
        "slipstream_speedup_end_to_end_ratio",
        "End-to-end speedup: time per token, prompts included, in plainly served stretches over that elsewhere; "
        "last 20 stretches",
        SERVED_PLAINLY,
        end_to_end,
    )
    milliseconds = measured.baseline_ms_per_token
    yield GaugeMetricFamily(
        "slipstream_baseline_seconds_per_token",
        "Time per token without drafts, at the batch sizes of drafting rounds",
        None if milliseconds is None else milliseconds / 1000,
    )
    expected = GaugeMetricFamily(
        "slipstream_speedup_estimated_ratio", "Speedup of planned rounds that a cost model expects", labels=["model"]
    )
    yield by_label(expected, {PLAN_MODEL: estimated})


def _with_interval(name: str, about: str, baseline: str, found: Speedup) -> Iterator[Metric]:
    yield from _bounded(name, about, ["baseline"], {(baseline,): found})


def _group_speedups(measured: Mapping[Group, Speedup]) -> Iterator[Metric]:
    """The measured speedup of tenants and domains with enough traffic; named apart, since a sum over all has it too."""
    yield from _bounded(
        "slipstream_speedup_measured_group_ratio",
        "Measured speedup of one tenant's requests of one domain",
        ["baseline", "tenant", "domain"],
        {(BASELINE, *group): speedup for group, speedup in measured.items()},
    )


def _bounded(
    name: str, about: str, labels: Sequence[str], found: Mapping[tuple[str, ...], Speedup]
) -> Iterator[Metric]:
    """Speedups, and the ends of their intervals."""
    yield by_label(GaugeMetricFamily(name, about, labels=labels), {key: one.ratio for key, one in found.items()})
    for end in ("lower", "upper"):
        ends = GaugeMetricFamily(f"{name}_{end}", f"{end.capitalize()} end of the 95% interval", labels=labels)
        yield by_label(ends, {key: getattr(one, end) for key, one in found.items()})


_Family = TypeVar("_Family", CounterMetricFamily, GaugeMetricFamily)
_Labels = TypeVar("_Labels", bound=str | tuple[str, ...])


def by_label(family: _Family, values: Mapping[_Labels, float | None]) -> _Family:
    """The family with a sample for each value, by its label or labels; a value of None has none."""
    for labels, value in values.items():
        if value is not None:
            family.add_metric([labels] if isinstance(labels, str) else labels, value)
    return family


def verdict_metrics(
    verdicts: Mapping[str, int], watched: int | None, role: str, accept_length: float | None
) -> Iterator[Metric]:
    """How trials of draft versions ended, which version is on trial, and this engine's part in it."""
    counts = CounterMetricFamily(
        "slipstream_draft_verdicts",
        "Trials of draft versions by result: promoted, rolled_back, withdrawn",
        labels=["outcome"],
    )
    yield by_label(counts, verdicts)
    yield GaugeMetricFamily("slipstream_watched_draft_version", "Draft version on trial; 0: none", value=watched)
    roles = GaugeMetricFamily(
        "slipstream_engine_role",
        "1 for this engine's role in a trial: canary, waiting for the canary's verdict, needs traffic, settled",
        labels=["role"],
    )
    yield by_label(roles, {role: 1.0} if role else {})
    yield GaugeMetricFamily(
        "slipstream_draft_accept_length",
        "Acceptance length of the draft version in service, over the last 1,000 verifications at most",
        value=accept_length,
    )


class VerdictCollector(Collector):
    """Verdicts of the follower on draft versions, computed at each scrape."""

    def __init__(self, log: Callable[[], SwapLog]) -> None:
        self._log = log

    def collect(self) -> Iterator[Metric]:
        log = self._log()
        yield from verdict_metrics(log.verdicts, log.watched, log.role, log.accept_length)

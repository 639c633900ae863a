"""Every collector of the serving side: names live here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from serving.estimate import MODEL
from serving.hotswap import SwapLog
from serving.recorder import RecorderStats
from serving.speedup import BASELINE, Group, Speedup, SpeedupMeter

_STALL_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)


class EngineMetrics:
    """What the decode loop counts. Labels are bounded by the number of slots and the largest depth."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.rounds = Counter(
            "slipstream_rounds", "Decode rounds; mode control = depth 0", ["mode", "batch"], registry=registry
        )
        self.round_seconds = Counter(
            "slipstream_round_seconds", "Time spent in decode rounds", ["mode", "batch"], registry=registry
        )
        self.round_tokens = Counter(
            "slipstream_round_tokens", "Tokens committed by decode rounds", ["mode", "batch"], registry=registry
        )
        self.expected_seconds = Counter(
            "slipstream_round_expected_seconds",
            "Time that planned rounds were expected to take; their tokens over this is the throughput that is expected",
            ["batch"],
            registry=registry,
        )
        self.expected_tokens = Counter(
            "slipstream_round_expected_tokens", "Tokens that they were expected to commit", ["batch"], registry=registry
        )
        self.verifications = Counter(
            "slipstream_verifications",
            "Verifications: one per request and drafting round, also where no proposal was worth it",
            registry=registry,
        )
        self.verified_tokens = Counter(
            "slipstream_verified_tokens",
            "Tokens that verifications earned, bonus included; over verifications = acceptance length",
            registry=registry,
        )
        self.proposals = Counter(
            "slipstream_proposals",
            "Verified proposals by source and position",
            ["source", "position"],
            registry=registry,
        )
        self.accepted = Counter(
            "slipstream_accepted", "Accepted ones by source and position", ["source", "position"], registry=registry
        )
        self.draft_version = Gauge("slipstream_draft_version", "Draft version in service", registry=registry)
        self.last_swap = Gauge("slipstream_last_swap_timestamp_seconds", "Time of the last swap", registry=registry)
        self.depth = Gauge("slipstream_depth", "Most proposals a round", registry=registry)
        self.swaps = Counter("slipstream_swaps", "Draft swaps by outcome", ["outcome"], registry=registry)
        self.swap_stall = Histogram(
            "slipstream_swap_stall_seconds", "Decode time lost to a swap", registry=registry, buckets=_STALL_BUCKETS_S
        )
        self.running = Gauge("slipstream_requests_running", "Requests being decoded", registry=registry)
        self.waiting = Gauge("slipstream_requests_waiting", "Requests queued", registry=registry)
        self.aborted = Counter("slipstream_requests_aborted", "Requests whose client left", registry=registry)

    def observe_round(
        self,
        *,
        batch: int,
        drafted: bool,
        seconds: float,
        committed: int,
        proposed: tuple[int, ...],
        accepted: tuple[int, ...],
        from_head: tuple[bool, ...],
        expected: tuple[float, float],
    ) -> None:
        """Count one round, as `serving.local.rounds.RoundReport` describes it; `expected` are tokens and seconds."""
        mode, size = ("speculative" if drafted else "control"), str(batch)
        self.rounds.labels(mode, size).inc()
        self.round_seconds.labels(mode, size).inc(seconds)
        self.round_tokens.labels(mode, size).inc(committed)
        if not drafted:
            return
        tokens, expected_s = expected
        self.expected_tokens.labels(size).inc(tokens)
        self.expected_seconds.labels(size).inc(expected_s)
        self.verifications.inc(batch)
        self.verified_tokens.inc(sum(accepted) + batch)
        for num_proposed, num_accepted, is_heads in zip(proposed, accepted, from_head, strict=True):
            source = "head" if is_heads else "suffix"
            for position in range(num_proposed):
                self.proposals.labels(source, str(position + 1)).inc()
            for position in range(num_accepted):
                self.accepted.labels(source, str(position + 1)).inc()


class ServingCollector(Collector):
    """Figures that are computed when scraped: the speedup, measured and estimated, and the recorder's accounts."""

    def __init__(
        self,
        meter: SpeedupMeter,
        recorder: Callable[[], RecorderStats] | None,
        estimate: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._meter, self._recorder, self._estimate = meter, recorder, estimate

    def collect(self) -> Iterator[Metric]:
        measured = self._meter.measure()
        yield speedup_gauge(measured.ratio)
        yield from speedup_bounds(measured.lower, measured.upper)
        yield from group_speedups(self._meter.measure_groups())
        yield estimated_speedup_gauge(self._estimate())
        if self._recorder is None:
            return
        stats = self._recorder()
        yield CounterMetricFamily("slipstream_traces_captured", "Finished traces offered", value=stats.captured)
        yield CounterMetricFamily("slipstream_traces_appended", "Traces in the stream", value=stats.appended)
        dropped = CounterMetricFamily("slipstream_traces_dropped", "Traces dropped, by reason", labels=["reason"])
        for reason, count in stats.dropped_by_reason.items():
            dropped.add_metric([reason], count)
        yield dropped
        yield GaugeMetricFamily("slipstream_traces_pending", "Traces waiting for the stream", value=stats.pending)
        yield CounterMetricFamily("slipstream_trace_bytes", "Bytes of appended traces", value=stats.bytes_appended)
        yield CounterMetricFamily("slipstream_trace_tokens", "Tokens of appended traces", value=stats.tokens_appended)


def speedup_gauge(ratio: float | None) -> GaugeMetricFamily:
    """The measured speedup under its baseline's name; without a sample while there is none."""
    gauge = GaugeMetricFamily(
        "slipstream_speedup_measured_ratio",
        "Time a token at depth 0 over time a token with drafting, same batch sizes, recent window",
        labels=["baseline"],
    )
    if ratio is not None:
        gauge.add_metric([BASELINE], ratio)
    return gauge


def speedup_bounds(lower: float | None, upper: float | None) -> Iterator[Metric]:
    """The ends of the measured speedup's 95% interval; without a sample while there is none."""
    for name, value in (("lower", lower), ("upper", upper)):
        gauge = GaugeMetricFamily(
            f"slipstream_speedup_measured_ratio_{name}",
            f"The {name} end of the measured speedup's 95% interval",
            labels=["baseline"],
        )
        if value is not None:
            gauge.add_metric([BASELINE], value)
        yield gauge


def group_speedups(measured: Mapping[Group, Speedup]) -> Iterator[Metric]:
    """The measured speedup of tenants and domains with enough traffic, under a name of its own: they overlap all."""
    labels = ["baseline", "tenant", "domain"]
    name = "slipstream_speedup_measured_group_ratio"
    gauges = {
        "ratio": GaugeMetricFamily(name, "Measured speedup of one tenant's requests of one domain", labels=labels),
        "lower": GaugeMetricFamily(f"{name}_lower", "The lower end of its 95% interval", labels=labels),
        "upper": GaugeMetricFamily(f"{name}_upper", "The upper end of its 95% interval", labels=labels),
    }
    for (tenant, domain), speedup in measured.items():
        for bound, gauge in gauges.items():
            value = getattr(speedup, bound)
            if value is not None:
                gauge.add_metric([BASELINE, tenant, domain], value)
    yield from gauges.values()


def estimated_speedup_gauge(ratio: float | None) -> GaugeMetricFamily:
    """The speedup that a cost model expects, under the model's name; never mixed with the measured one."""
    gauge = GaugeMetricFamily(
        "slipstream_speedup_estimated_ratio",
        "Accept length over what rounds cost, from the medians of measured rounds",
        labels=["model"],
    )
    if ratio is not None:
        gauge.add_metric([MODEL], ratio)
    return gauge


def verdict_metrics(verdicts: Mapping[str, int], watched: int | None) -> Iterator[Metric]:
    """How trials of draft versions ended, and which version is on trial now."""
    counts = CounterMetricFamily(
        "slipstream_draft_verdicts", "Draft versions by how their trial ended", labels=["outcome"]
    )
    for outcome, count in verdicts.items():
        counts.add_metric([outcome], count)
    yield counts
    yield GaugeMetricFamily(
        "slipstream_watched_draft_version", "Draft version on trial; 0 where none is", value=watched
    )


class VerdictCollector(Collector):
    """The follower's verdicts, computed when scraped."""

    def __init__(self, log: Callable[[], SwapLog]) -> None:
        self._log = log

    def collect(self) -> Iterator[Metric]:
        log = self._log()
        yield from verdict_metrics(log.verdicts, log.watched)

"""What the plugin reports, as the gateway's `/metrics`: the names are those of serving/metrics.py where they agree.

A scrape reads what the client last saw and waits for nothing. Without a report the series are absent, not zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from serving.metrics import estimated_speedup_gauge, speedup_bounds, speedup_gauge, verdict_metrics
from serving.sglang.client import EngineReport


class SglangCollector(Collector):
    def __init__(self, report: Callable[[], EngineReport | None], draft_version: Callable[[], int]) -> None:
        self._report, self._draft_version = report, draft_version

    def collect(self) -> Iterator[Metric]:
        report = self._report()
        yield _gauge("slipstream_draft_version", "Draft version in service", self._draft_version())
        yield _gauge("slipstream_engine_report_fresh", "Whether the plugin has reported lately", report is not None)
        if report is None:
            return
        yield from _draft_metrics(report)
        yield from _trace_metrics(report)
        yield from _speed_metrics(report)


def _draft_metrics(report: EngineReport) -> Iterator[Metric]:
    swaps = CounterMetricFamily("slipstream_swaps", "Draft swaps by outcome", labels=["outcome"])
    for outcome, count in (("installed", report.swaps), ("failed", report.swap_failures)):
        if count is not None:
            swaps.add_metric([outcome], count)
    yield swaps
    yield from verdict_metrics(report.verdicts, report.watched)
    stall_s = None if report.last_stall_ms is None else report.last_stall_ms / 1000
    yield _gauge("slipstream_last_swap_stall_seconds", "Decode time lost to the last swap", stall_s)
    yield _gauge("slipstream_depth", "Most proposals a round", report.depth)
    yield _gauge("slipstream_target_unchanged", "Whether the target's weights are those of the start", report.target_ok)


def _trace_metrics(report: EngineReport) -> Iterator[Metric]:
    yield _counter("slipstream_traces_captured", "Finished traces offered", report.captured)
    yield _counter("slipstream_traces_appended", "Traces in the stream", report.appended)
    dropped = CounterMetricFamily("slipstream_traces_dropped", "Traces dropped, by reason", labels=["reason"])
    for reason, count in report.dropped_by_reason.items():
        dropped.add_metric([reason], count)
    yield dropped
    yield _gauge("slipstream_traces_pending", "Traces waiting for the stream", report.pending)
    yield _counter("slipstream_trace_bytes", "Bytes of appended traces", report.trace_bytes)
    yield _counter("slipstream_trace_tokens", "Tokens of appended traces", report.trace_tokens)


def _speed_metrics(report: EngineReport) -> Iterator[Metric]:
    yield _counter("slipstream_verifications", "Verifications of drafting rounds", report.verifications)
    yield _counter(
        "slipstream_verified_tokens",
        "Tokens that verifications earned, bonus included; over verifications = acceptance length",
        report.verified_tokens,
    )
    yield speedup_gauge(report.speedup)
    yield from speedup_bounds(report.speedup_lower, report.speedup_upper)
    yield estimated_speedup_gauge(report.speedup_estimated)
    baseline_s = None if report.baseline_ms_per_token is None else report.baseline_ms_per_token / 1000
    yield _gauge("slipstream_baseline_seconds_per_token", "Time a token at depth 0", baseline_s)


def _gauge(name: str, help_text: str, value: float | None) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, help_text, value=value)


def _counter(name: str, help_text: str, value: float | None) -> CounterMetricFamily:
    return CounterMetricFamily(name, help_text, value=value)

"""Metrics of the plugin's report on the gateway's `/metrics`; shared ones have the names of serving/metrics.py.

A scrape reads the client's last report and waits for nothing. Without a report the series are absent, not zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from serving.acceptance import LengthKey
from serving.metrics import (
    ACCEPTED,
    ACCEPTED_TEXT,
    DEPTH,
    DRAFT_VERSION,
    PROPOSALS,
    ROUND_SECONDS,
    ROUND_TOKENS,
    ROUNDS,
    SUFFIX_TOKENS,
    SWAPS,
    VERIFICATIONS,
    VERIFIED_TOKENS,
    by_label,
    by_length_metrics,
    group_text_metrics,
    speedup_metrics,
    trace_metrics,
    verdict_metrics,
)
from serving.sglang.report import EngineReport
from serving.speedup import NOTHING_MEASURED


class SglangCollector(Collector):
    def __init__(
        self,
        report: Callable[[], EngineReport | None],
        draft_version: Callable[[], int],
        exports: Callable[[], bool] = lambda: True,
    ) -> None:
        """Nothing is collected unless `exports`."""
        self._report, self._draft_version, self._exports = report, draft_version, exports

    def collect(self) -> Iterator[Metric]:
        if not self._exports():
            return
        report = self._report()
        yield GaugeMetricFamily(*DRAFT_VERSION, self._draft_version())
        yield GaugeMetricFamily(
            "slipstream_engine_report_fresh",
            "1 while the plugin reports; at 0 its series are absent",
            report is not None,
        )
        if report is None:
            return
        yield from _draft_metrics(report)
        yield from _round_metrics(report)
        yield from group_text_metrics(
            tokens=report.group_text,
            evicted=report.group_texts_evicted,
            unreadable=report.group_texts_unreadable,
        )
        yield from trace_metrics(
            captured=report.captured,
            appended=report.appended,
            dropped_by_reason=report.dropped_by_reason,
            pending=report.pending,
            num_bytes=report.trace_bytes,
            num_tokens=report.trace_tokens,
            share=report.capture_share,
            acked=report.acked,
            branch_rows=report.branch_rows,
        )
        yield from _speed_metrics(report)


class PoolCollector(Collector):
    """How many engines stand behind a gateway; figures of each one are in its own report and on its own port."""

    def __init__(self, num_engines: Callable[[], int], num_on_version: Callable[[], int]) -> None:
        self._num_engines, self._num_on_version = num_engines, num_on_version

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "slipstream_pool_engines", "Engines behind the router whose plugin reports", self._num_engines()
        )
        yield GaugeMetricFamily(
            "slipstream_pool_same_version_engines",
            "Engines on the draft version that most engines run",
            self._num_on_version(),
        )


def _draft_metrics(report: EngineReport) -> Iterator[Metric]:
    outcomes = {"installed": report.swaps, "failed": report.swap_failures}
    yield by_label(CounterMetricFamily(*SWAPS, labels=["outcome"]), outcomes)
    yield from verdict_metrics(report.verdicts, report.watched, report.role, report.draft_accept_length)
    stall_s = None if report.last_stall_ms is None else report.last_stall_ms / 1000
    yield GaugeMetricFamily("slipstream_last_swap_stall_seconds", "Decode time lost to the last swap", stall_s)
    yield GaugeMetricFamily(*DEPTH, report.depth)
    failures = CounterMetricFamily(
        "slipstream_plugin_failures",
        "Plugin parts that an error turned off until SGLang restarts",
        labels=["part", "reason"],
    )
    yield by_label(failures, {failure.partition(":")[::2]: count for failure, count in report.failures.items()})


def _round_metrics(report: EngineReport) -> Iterator[Metric]:
    seconds = {mode: milliseconds / 1000 for mode, milliseconds in report.decode_ms.items()}
    for about, by_mode in ((ROUNDS, report.rounds), (ROUND_SECONDS, seconds), (ROUND_TOKENS, report.round_tokens)):
        family = CounterMetricFamily(*about, labels=["mode", "batch"])
        yield by_label(family, {(mode, "all"): value for mode, value in by_mode.items()})
    for about, of_head, of_text in (
        (PROPOSALS, report.proposals, report.text_proposals),
        (ACCEPTED, report.accepted, report.text_accepted),
    ):
        family = CounterMetricFamily(*about, labels=["source", "position"])
        by_label(family, {("head", position): count for position, count in of_head.items()})
        yield by_label(family, {("suffix", position): count for position, count in of_text.items()})
    yield by_label(CounterMetricFamily(*ACCEPTED_TEXT, labels=["text"]), report.accepted_text)
    yield GaugeMetricFamily(*SUFFIX_TOKENS, report.text_tokens)
    yield CounterMetricFamily(
        "slipstream_suffix_evicted", "Windows of earlier text evicted for others", report.text_evicted
    )


def _speed_metrics(report: EngineReport) -> Iterator[Metric]:
    yield CounterMetricFamily(*VERIFICATIONS, report.verifications)
    yield CounterMetricFamily(*VERIFIED_TOKENS, report.verified_tokens)
    measured = replace(
        NOTHING_MEASURED,
        ratio=report.speedup,
        baseline_ms_per_token=report.baseline_ms_per_token,
        lower=report.speedup_lower,
        upper=report.speedup_upper,
    )
    end_to_end = replace(
        NOTHING_MEASURED, ratio=report.end_to_end, lower=report.end_to_end_lower, upper=report.end_to_end_upper
    )
    yield from speedup_metrics(measured, end_to_end, report.speedup_estimated)
    yield from by_length_metrics(_by_key(report.verifications_by_length), _by_key(report.tokens_by_length))


def _by_key(counts: Mapping[str, int]) -> dict[LengthKey, int]:
    return {tuple(key.split("/")): count for key, count in counts.items() if key.count("/") == 2}

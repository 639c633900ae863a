"""The figures of rollouts, asked of the book when scraped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from serving.gateway.rollouts.book import RolloutBook
from serving.rollout.samples import EndReason, State


class RolloutCollector(Collector):
    def __init__(self, book: RolloutBook) -> None:
        self._book = book

    def collect(self) -> Iterator[Metric]:
        driver = self._book.driver
        samples = GaugeMetricFamily(
            "slipstream_rollout_samples",
            "Samples of rollouts under way: waiting without a token, paused with some, running",
            labels=["state"],
        )
        counts = driver.counts
        for state in State:
            if not state.has_ended:
                samples.add_metric([state], counts[state])
        yield samples
        ended = CounterMetricFamily(
            "slipstream_rollout_ended_samples",
            "Samples of rollouts that ended: by themselves (stop, length), or as stale, deadline, cancelled, refused",
            labels=["reason"],
        )
        for reason in get_args(EndReason):
            ended.add_metric([reason], self._book.ended[reason])
        yield ended
        leases = CounterMetricFamily(
            "slipstream_rollout_leases",
            "Samples given to an engine: begun, or resumed after an earlier lease; lost: the engine died with them",
            labels=["outcome"],
        )
        for outcome, count in (("begun", driver.num_begun), ("resumed", driver.num_resumed), ("lost", driver.num_lost)):
            leases.add_metric([outcome], count)
        yield leases
        yield CounterMetricFamily(
            "slipstream_rollout_tokens", "Tokens that samples of rollouts were given", driver.num_tokens
        )

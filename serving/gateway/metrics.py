"""The gateway's collectors, rollouts included. Labels are bounded: routes are templates, never paths of clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from serving.engine import EngineHealth
from serving.rollout.driver import Driver
from serving.rollout.samples import EndReason, SampleState

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


def process_registry() -> CollectorRegistry:
    """A registry with what the client library itself measures of a process."""
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return registry


class GatewayMetrics:
    """One set of collectors in `registry`; raises ValueError where the registry already has them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "slipstream_gateway_requests_total",
            "Requests by outcome; an answer that failed after its first byte counts as the failure's status, "
            "a client that left as 499",
            ["route", "status"],
            registry=registry,
        )
        self.refusals = Counter(
            "slipstream_gateway_refusals_total",
            "Requests that were refused before anything was done for them: no key, a wrong one, or too much at once",
            ["code"],
            registry=registry,
        )
        self.in_flight = Gauge(
            "slipstream_gateway_generations_in_flight",
            "Requests whose answer is being generated now",
            registry=registry,
        )
        self.duration_s = Histogram(
            "slipstream_gateway_request_duration_seconds",
            "From the request's headers to the last byte of the answer",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.first_token_s = Histogram(
            "slipstream_gateway_time_to_first_token_seconds",
            "From the request's headers to the engine's first token",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )


class HealthCollector(Collector):
    """What the engine behind the gateway says about itself, asked when scraped."""

    def __init__(self, health: Callable[[], EngineHealth]) -> None:
        self._health = health

    def collect(self) -> Iterator[Metric]:
        health = self._health()
        up = health.alive and health.ready
        yield GaugeMetricFamily("slipstream_engine_up", "1 while the engine takes requests", up)
        yield GaugeMetricFamily("slipstream_requests_running", "Requests that the engine decodes", health.num_running)
        yield GaugeMetricFamily("slipstream_requests_waiting", "Requests that wait for it", health.num_waiting)


class RolloutCollector(Collector):
    def __init__(self, driver: Driver, ended: Mapping[EndReason, int]) -> None:
        """`ended` counts the samples that ended since the start."""
        self._driver, self._ended = driver, ended

    def collect(self) -> Iterator[Metric]:
        driver = self._driver
        samples = GaugeMetricFamily(
            "slipstream_rollout_samples",
            "Samples of rollouts under way: waiting without a token, paused with some, running, awaiting answers",
            labels=["state"],
        )
        counts = driver.counts
        for state in SampleState:
            if not state.has_ended:
                samples.add_metric([state], counts[state])
        yield samples
        ended = CounterMetricFamily(
            "slipstream_rollout_ended_samples",
            "Samples of rollouts that ended: by themselves (stop, length, done), or as stale, deadline, cancelled, "
            "refused, redundant, environment",
            labels=["reason"],
        )
        for reason in get_args(EndReason):
            ended.add_metric([reason], self._ended[reason])
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
        yield CounterMetricFamily(
            "slipstream_rollout_read_again_tokens",
            "Tokens of samples that went on where they had not been before, prompts included",
            driver.num_read_again,
        )

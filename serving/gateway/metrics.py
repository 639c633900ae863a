"""The gateway's Prometheus collectors, rollouts included. Labels are bounded: routes are templates, not paths.

`model_name` is the name that clients ask for; a gateway has one. vLLM and SGLang use this label, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
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
from serving.rollout.interactive_share import SlotsShare
from serving.rollout.samples import EndReason, SampleState

_MODEL = "model_name"
_MAX_TENANTS = 64
_OTHERS = "other"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1.0,
    2.5,
)


def process_registry() -> CollectorRegistry:
    """A registry with the Prometheus client library's own metrics of a process."""
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return registry


class GatewayMetrics:
    """One set of collectors in `registry`; raises ValueError where the registry already has them."""

    def __init__(self, registry: CollectorRegistry, model_name: str, slots_share: SlotsShare | None = None) -> None:
        """`slots_share` gets the latencies, too."""
        self._model_name, self._slots_share = model_name, slots_share or SlotsShare()
        self._tenants: set[str] = set()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self._requests = counter(
            "slipstream_gateway_requests_total",
            "Requests by status; a failure after the first byte counts as its status, a client that left as 499",
            [_MODEL, "route", "status"],
        )
        self.refusals = counter(
            "slipstream_gateway_refusals_total",
            "Requests refused before any work: no key, a wrong key, or too many requests",
            ["code"],
        )
        self.in_flight = gauge(
            "slipstream_gateway_generations_in_flight", "Requests whose answer is being generated", [_MODEL]
        ).labels(model_name)
        self._duration_s = histogram(
            "slipstream_gateway_request_duration_seconds",
            "Time from the request's headers to the answer's last byte",
            [_MODEL, "route"],
            buckets=_SECONDS,
        )
        self._first_token_s = histogram(
            "slipstream_gateway_time_to_first_token_seconds",
            "Time from the request's headers to the engine's first token",
            [_MODEL, "route"],
            buckets=_SECONDS,
        )
        self._inter_token_s = histogram(
            "slipstream_gateway_inter_token_latency_seconds",
            "Mean time between an answer's tokens, once per answer; with SGLang, of streamed answers",
            [_MODEL, "route"],
            buckets=_TOKEN_SECONDS,
        )
        self._prompt_tokens = counter(
            "slipstream_gateway_prompt_tokens_total",
            "Prompt tokens, once per prompt however many samples it has; with SGLang, of finished answers",
            [_MODEL, "tenant"],
        )
        self._generation_tokens = counter(
            "slipstream_gateway_generation_tokens_total",
            "Answer tokens; with SGLang, of finished answers",
            [_MODEL, "tenant"],
        )

    def count_request(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(self._model_name, route, str(status)).inc()
        self._duration_s.labels(self._model_name, route).observe(seconds)

    def observe_first_token(self, route: str, seconds: float) -> None:
        self._first_token_s.labels(self._model_name, route).observe(seconds)
        self._slots_share.observe_first_token(seconds)

    def observe_between_chunks(self, seconds: float) -> None:
        self._slots_share.observe_between_chunks(seconds)

    def observe_pace(self, route: str, seconds: float, num_tokens: float) -> None:
        """Observe the time between tokens of one sample: `num_tokens` after its first chunk, and the seconds from that
        chunk to the last. A sample of one chunk is not counted.
        """
        if seconds > 0 and num_tokens > 0:
            self._inter_token_s.labels(self._model_name, route).observe(seconds / num_tokens)

    def count_tokens(self, tenant: str, *, prompt: int, generated: int) -> None:
        """Count one request's tokens; the first 64 tenants have a label each, the others share one."""
        if tenant not in self._tenants and len(self._tenants) >= _MAX_TENANTS:
            tenant = _OTHERS
        else:
            self._tenants.add(tenant)
        self._prompt_tokens.labels(self._model_name, tenant).inc(prompt)
        self._generation_tokens.labels(self._model_name, tenant).inc(generated)


class HealthCollector(Collector):
    """The engine's health, read at each scrape."""

    def __init__(self, health: Callable[[], EngineHealth], model_name: str) -> None:
        self._health, self._model_name = health, model_name

    def collect(self) -> Iterator[Metric]:
        health = self._health()
        up = health.alive and health.ready
        for name, about, value in (
            ("slipstream_engine_up", "1 while the engine takes requests", up),
            ("slipstream_requests_running", "Requests being decoded", health.num_running),
            ("slipstream_requests_waiting", "Requests waiting for the engine", health.num_waiting),
        ):
            gauge = GaugeMetricFamily(name, about, labels=[_MODEL])
            gauge.add_metric([self._model_name], value)
            yield gauge


class RolloutCollector(Collector):
    def __init__(self, driver: Driver, ended: Mapping[EndReason, int], slots_share: SlotsShare) -> None:
        """`ended` counts the samples that ended since the start."""
        self._driver, self._ended, self._slots_share = driver, ended, slots_share

    def collect(self) -> Iterator[Metric]:
        driver = self._driver
        samples = GaugeMetricFamily(
            "slipstream_rollout_samples",
            "Unfinished rollout samples: waiting (without a token), running, paused (with some), awaiting an "
            "observation",
            labels=["state"],
        )
        counts = driver.counts
        for state in SampleState:
            if not state.has_ended:
                samples.add_metric([state], counts[state])
        yield samples
        yield GaugeMetricFamily(
            "slipstream_rollout_slots_share",
            "Share of an engine's slots that rollouts may hold now",
            self._slots_share.share,
        )
        ended = CounterMetricFamily(
            "slipstream_rollout_ended_samples",
            "Ended rollout samples: by themselves (stop, length, done), or as stale, deadline, cancelled, refused, "
            "redundant, environment",
            labels=["reason"],
        )
        for reason in get_args(EndReason):
            ended.add_metric([reason], self._ended[reason])
        yield ended
        leases = CounterMetricFamily(
            "slipstream_rollout_leases",
            "Rollout samples given to an engine: begun, resumed after an earlier lease, or lost with a dead engine",
            labels=["outcome"],
        )
        for outcome, count in (("begun", driver.num_begun), ("resumed", driver.num_resumed), ("lost", driver.num_lost)):
            leases.add_metric([outcome], count)
        yield leases
        yield CounterMetricFamily(
            "slipstream_rollout_tokens", "Tokens generated for rollout samples", driver.num_tokens
        )
        yield CounterMetricFamily(
            "slipstream_rollout_read_again_tokens",
            "Tokens, prompts included, of rollout samples that went on at another engine",
            driver.num_read_again,
        )

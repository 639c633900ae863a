"""The gateway's collectors. Labels are bounded: routes are templates, never paths that a client chose."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


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

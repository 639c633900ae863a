"""What the services of one deployment must agree on, where nobody says otherwise."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

DEFAULT_REDIS_URL = "redis://127.0.0.1:6379/0"
DEFAULT_STREAM_MAX_BYTES = 512 * 1024 * 1024


def process_registry() -> CollectorRegistry:
    """With what the client library itself measures of a process."""
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return registry

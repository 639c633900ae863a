"""The gateway in front of an SGLang, wherever that runs."""

from __future__ import annotations

import socket
from collections.abc import Coroutine
from typing import Any

from serving.gateway.app import create_passthrough_app
from serving.gateway.config import GatewaySettings
from serving.gateway.server import GatewayServer, make_room, serve_until_signal
from serving.gateway.upstream import Upstream
from serving.metrics import TargetMetrics
from serving.sglang.gateway_metrics import PoolCollector, SglangCollector
from serving.sglang.outside.client import SglangClient
from serving.sglang.outside.pool import PoolClient
from serving.target import TargetDesk
from slipstream.start.shared_defaults import process_registry
from speculator.versions.operator import DraftDesk


async def serve_in_front(
    urls: tuple[str, ...],
    listener: socket.socket,
    client: SglangClient,
    *,
    settings: GatewaySettings,
    drafts: DraftDesk,
    target: str,
    beside: Coroutine[Any, Any, None] | None = None,
) -> None:
    """Serve on `listener` what SGLang answers at the first of `urls` that can be reached, until a signal or the end of
    `beside`; `target` is the fingerprint of what it serves.

    Raises ConfigError where this process may not have so many connections, and what `beside` raises.
    """
    make_room(settings, each=2)
    registry = process_registry()
    registry.register(SglangCollector(lambda: client.report, lambda: client.draft_version))
    if isinstance(client, PoolClient):
        registry.register(PoolCollector(lambda: client.num_engines, lambda: client.num_on_version))
    upstream = Upstream(*urls, max_connections=settings.max_in_flight)
    targets = TargetDesk(client, TargetMetrics(registry), folder=None)
    app = create_passthrough_app(
        client,
        upstream,
        settings=settings,
        registry=registry,
        drafts=drafts,
        targets=targets,
        target=target,
    )
    try:
        await serve_until_signal(
            GatewayServer(app, listener, max_connections=settings.max_connections),
            model=client.info.model,
            draft_version=client.draft_version,
            beside=beside,
        )
    finally:
        await upstream.close()

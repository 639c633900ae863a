"""A gateway from its start to the signal, or to the end of what it stands in front of."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Coroutine
from typing import Any

import structlog

from serving.gateway.server import GatewayServer

log = structlog.get_logger(__name__)


async def serve_until_signal(
    server: GatewayServer, *, model: str, draft_version: int, beside: Coroutine[Any, Any, None] | None = None
) -> None:
    """Serve until SIGTERM, SIGINT or the end of `beside`, then drain; raises what `beside` raised."""
    ends: list[asyncio.Task[Any]] = [] if beside is None else [asyncio.create_task(beside)]
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    # Before anybody learns that we serve: a signal in answer to that would otherwise end us on the spot.
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    await server.start()
    # What was made so far stays: a full collection that walked it all would hold up every answer.
    gc.collect()
    gc.freeze()
    log.info("serving", url=server.url, model=model, draft_version=draft_version)
    ends += asyncio.create_task(stopping.wait()), asyncio.create_task(server.wait())
    done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    log.info("stopping")
    await server.stop()
    # Or extension modules say at the end of the process that their objects leaked.
    gc.unfreeze()
    for task in ends:
        task.cancel()
    for task in done:
        task.result()

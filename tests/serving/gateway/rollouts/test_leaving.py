"""A client that leaves a rollout's stream at the very moment in which a sample ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from serving.gateway.config import GatewaySettings
from serving.gateway.rollouts.registry import RolloutRegistry
from serving.gateway.rollouts.routes import streamed
from serving.gateway.telemetry import Exchange
from tests.serving.rollout.engines import SeededEngine, work


@pytest.mark.parametrize("ticks", range(6))
def test_a_stream_ends_with_its_client_also_while_a_sample_ends(ticks: int) -> None:
    """`ticks` turns of the event loop lie between the two; Python 3.11's `wait_for` loses a cancellation there."""

    async def run() -> None:
        registry = RolloutRegistry([SeededEngine("one", holds_after=0)], GatewaySettings())
        rollout = registry.submit("default", "r", "key", {name: work(f"key/{name}") for name in ("a", "b")}, "")
        left = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(_: Any) -> None:
            pass

        scope = {"type": "http", "method": "GET", "headers": [], "state": {"exchange": Exchange()}}
        response = streamed(Request(scope), registry, rollout, after=0, limit_s=60)
        reading = asyncio.create_task(response(scope, receive, send))
        await asyncio.sleep(0.02)
        left.set()
        for _ in range(ticks):
            await asyncio.sleep(0)
        registry.cancel(rollout, {"a"})
        await asyncio.wait((reading,), timeout=2)
        assert reading.done(), "the stream goes on without its client"
        assert isinstance(reading.exception(), ClientDisconnect)
        assert rollout.num_readers == 0, "otherwise the rollout would never count as abandoned"
        await registry.driver.close()

    asyncio.run(run())

"""`slipstream serve` with the local engine: how it ends."""

from __future__ import annotations

import asyncio

import pytest

from slipstream.start.local import wait_for_failure
from speculator.errors import EngineDeadError
from tests.fixtures.doubles import DoubleEngine


def test_an_engine_that_fails_ends_the_server() -> None:
    """With exit code 1, so that a supervisor starts it again."""
    engine = DoubleEngine()

    async def run() -> None:
        watching = asyncio.create_task(wait_for_failure(engine, poll_s=0))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not watching.done()
        engine.alive, engine.detail = False, "RuntimeError"
        with pytest.raises(EngineDeadError, match="RuntimeError"):
            await watching

    asyncio.run(run())

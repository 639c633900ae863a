"""The gateway benchmark: its engine has the bounds it is measured against, and its figures are of the right rows."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from benchmarks.gateway import Load, QueuedEngine
from serving.engine import GenerateRequest
from speculator.errors import EngineBusyError
from speculator.sampling import SamplingParams


def test_slots_and_queue_are_bounded() -> None:
    async def run() -> None:
        engine = QueuedEngine(slots=2, max_waiting=3, delay_s=0.0)
        engine.hold_at = 0

        async def ask(number: int) -> int:
            request = GenerateRequest(
                request_id=str(number), prompt_token_ids=(1, 2), max_tokens=8, sampling=SamplingParams()
            )
            return sum([len(chunk.token_ids) async for chunk in engine.generate(request)])

        asked = [asyncio.create_task(ask(number)) for number in range(5)]
        await engine.holding.wait()
        with pytest.raises(EngineBusyError, match="3 requests"):
            await ask(5)
        engine.release.set()
        assert await asyncio.gather(*asked) == [8] * 5
        assert await ask(6) == 8

    asyncio.run(run())


def test_percentiles_are_of_one_status_and_what_is_missing_is_counted() -> None:
    status = np.array([200, 200, 200, 429, 500])
    load = Load(np.array([0.01, 0.02, 0.03, 0.5, 9.0]), np.full(5, 0.005), status, duration_s=2.0, num_asked=7)
    assert load.percentile_ms(50) == pytest.approx(20)
    assert load.percentile_ms(50, 429) == pytest.approx(500)
    assert load.per_second() == pytest.approx(1.5)
    assert load.num_unexpected == 1 + 2

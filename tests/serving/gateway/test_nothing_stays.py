"""Answers that have ended leave nothing in the process: objects are counted, which is exact where memory is not."""

from __future__ import annotations

import asyncio
import gc
import types
from collections import Counter
from typing import Any

import httpx

from serving.gateway import telemetry
from serving.gateway.openai import generation
from tests.fixtures.doubles import DoubleEngine
from tests.serving.gateway.client import CHAT, HELLO, gateway, serve

KINDS = (telemetry.Exchange, generation.AnswerStreams, asyncio.Task, asyncio.Timeout, types.CoroutineType)
BODY: dict[str, Any] = {"model": "double", "messages": HELLO, "max_tokens": 20}


class Forgetful(DoubleEngine):
    """The double remembers what it was asked."""

    def forget(self) -> None:
        for kept in (self.requests, self.finished, self.aborted):
            kept.clear()


def census() -> Counter[type]:
    gc.collect()
    return Counter(kind for each in gc.get_objects() if (kind := type(each)) in KINDS)


def test_answers_whole_streamed_left_and_refused() -> None:
    engine = Forgetful()
    app = gateway(engine)

    async def one(client: httpx.AsyncClient, number: int) -> None:
        match number % 4:
            case 0:
                assert (await client.post(CHAT, json=BODY)).status_code == 200
            case 1:
                assert (await client.post(CHAT, json={**BODY, "model": "none"})).status_code == 404
            case kind:
                async with client.stream("POST", CHAT, json={**BODY, "stream": True}) as response:
                    async for _ in response.aiter_raw():
                        if kind == 3:
                            return

    async def run() -> None:
        async with serve(app, grace_s=1) as server, httpx.AsyncClient(base_url=server.url) as client:
            for number in range(20):
                await one(client, number)

    before = census()
    asyncio.run(run())
    engine.forget()
    # The app and its engine are still there; of the event loop's own timers for idle connections nothing is.
    assert census() - before == Counter()

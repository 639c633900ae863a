"""The unmodified `openai` client against a gateway on a real socket."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from speculator.errors import EngineDeadError
from tests.fixtures.doubles import DoubleEngine, says
from tests.serving.gateway.client import HELLO, openai_client, running


def test_chat_and_completions_whole_and_streamed() -> None:
    async def run() -> None:
        engine = DoubleEngine(answer=says("Grüße from 日本"))
        async with running(engine) as server, openai_client(server) as client:
            whole = await client.chat.completions.create(
                model="double", messages=HELLO, extra_body={"slipstream": {"capture": False, "group_id": "g"}}
            )
            assert whole.choices[0].message.content == "Grüße from 日本"
            assert whole.choices[0].finish_reason == "stop"
            assert whole.usage.completion_tokens_details.accepted_prediction_tokens == 14
            assert engine.requests[0].policy.group_id == "g"
            assert not engine.requests[0].policy.capture

            # The message as the client's own object goes back as history.
            again = await client.chat.completions.create(
                model="double", messages=[*HELLO, whole.choices[0].message, *HELLO]
            )
            assert again.choices[0].message.content == "Grüße from 日本"

            stream = await client.chat.completions.create(
                model="double", messages=HELLO, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            assert text == "Grüße from 日本"
            assert chunks[0].choices[0].delta.role == "assistant"
            assert chunks[-2].choices[0].finish_reason == "stop"
            assert chunks[-1].usage.completion_tokens == 19

            completion = await client.completions.create(model="double", prompt=["a", "b"], n=2)
            assert [choice.text for choice in completion.choices] == ["Grüße from 日本"] * 4
            stream = await client.completions.create(model="double", prompt="a", stream=True)
            assert "".join([chunk.choices[0].text async for chunk in stream]) == "Grüße from 日本"

            assert [model.id async for model in client.models.list()] == ["double"]

    asyncio.run(run())


def test_engine_that_dies_mid_stream_raises() -> None:
    async def run() -> None:
        engine = DoubleEngine(failure=EngineDeadError("gone"), fail_at=3)
        async with running(engine) as server, openai_client(server) as client:
            stream = await client.chat.completions.create(model="double", messages=HELLO, stream=True)
            assert (await anext(stream)).choices[0].delta.role == "assistant"
            with pytest.raises(openai.APIError) as broken:
                await rest_of(stream)
            assert broken.value.code == "engine_unavailable"

    asyncio.run(run())


async def rest_of(stream: openai.AsyncStream[Any]) -> list[Any]:
    return [chunk async for chunk in stream]


def test_oversized_body_over_a_socket_gets_its_answer() -> None:
    async def run() -> None:
        async with running(DoubleEngine(), max_body_bytes=100_000) as server, openai_client(server) as client:
            for factor in (2, 3):
                with pytest.raises(openai.APIStatusError) as refused:
                    await client.completions.create(model="double", prompt="x" * 100_000 * factor)
                assert refused.value.status_code == 413

    asyncio.run(run())


def test_closing_a_stream_aborts() -> None:
    async def run() -> None:
        engine = DoubleEngine(hold_at=2)
        async with running(engine) as server, openai_client(server) as client:
            stream = await client.chat.completions.create(model="double", messages=HELLO, stream=True)
            await anext(stream)
            await stream.close()
            async with asyncio.timeout(5):
                await engine.abort_seen.wait()

    asyncio.run(run())

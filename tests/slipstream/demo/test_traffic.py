"""The demo's clients, against a gateway on a real socket."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterator

import httpx
import pytest

from slipstream.demo.topics import Prompt
from slipstream.demo.traffic import SETTLING_S, Traffic, TrafficStats
from tests.fixtures.doubles import DoubleEngine, says
from tests.serving.gateway.client import running


def _traffic(engine: DoubleEngine, *, prompts: int, samples: int, temperature: float = 0.0) -> TrafficStats:
    """One client asks that many prompts."""

    async def run() -> TrafficStats:
        async with running(engine) as server:

            def asked() -> Iterator[Prompt]:
                for number in range(prompts):
                    if number == prompts - 1:
                        traffic.stop()
                    yield Prompt("toy", f"question {number}")

            async with Traffic(
                server.url, engine.model, asked(), max_tokens=40, temperature=temperature, samples=samples
            ) as traffic:
                await traffic.run(1)
            return traffic.stats

    return asyncio.run(run())


def test_the_samples_of_a_prompt_are_one_group_and_each_has_gaps_of_its_own() -> None:
    engine = DoubleEngine(answer=says("0123456789"))
    stats = _traffic(engine, prompts=2, samples=3, temperature=0.8)
    assert (stats.requests, stats.failed) == (2, 0)
    groups = [request.policy.group_id for request in engine.requests]
    assert len(groups) == 6
    assert groups[:3] == [groups[0]] * 3
    assert groups[3:] == [groups[3]] * 3
    assert len({*groups, ""}) == 3
    assert {request.sampling.temperature for request in engine.requests} == {0.8}
    # Ten tokens in chunks of at most four: two gaps an answer, none between answers.
    assert stats.completion_tokens == 60
    assert len(stats.gaps) == 12


def test_a_stretch_counts_what_arrives_while_every_client_has_a_request_in_flight() -> None:
    engine = DoubleEngine(answer=says("0123456789"))

    async def run() -> tuple[TrafficStats, float]:
        async with running(engine) as server:
            prompts = (Prompt("toy", f"question {number}") for number in itertools.count())
            async with Traffic(server.url, engine.model, prompts, max_tokens=40, temperature=0) as traffic:
                begun_s = time.time()
                for seconds in (0.2, SETTLING_S + 0.5):
                    clients = asyncio.create_task(traffic.run(2))
                    await asyncio.wait([clients], timeout=seconds)
                    traffic.stop()
                    await clients
                return traffic.stats, begun_s

    stats, begun_s = asyncio.run(run())
    (stretch,) = stats.stretches  # the first was too short to count
    assert stats.failed == 0
    assert stretch.start_s >= begun_s + 0.2 + SETTLING_S
    assert stretch.seconds == pytest.approx(0.5, abs=0.3)
    assert 0 < stretch.tokens < stats.completion_tokens
    assert len(engine.requests) == stats.requests


def test_one_answer_has_no_group() -> None:
    engine = DoubleEngine(answer=says("0123456789"))
    stats = _traffic(engine, prompts=1, samples=1)
    assert [request.policy.group_id for request in engine.requests] == [""]
    assert len(stats.gaps) == 2


@pytest.mark.parametrize("num_finished", [0, 2, 3])
def test_a_stream_in_which_not_every_answer_ends_is_a_failed_request(num_finished: int) -> None:
    def chunk(index: int, finish_reason: str | None) -> str:
        choice = {"index": index, "delta": {"content": "text"}, "finish_reason": finish_reason}
        return f"data: {json.dumps({'id': 'x', 'object': 'chat.completion.chunk', 'choices': [choice]})}\n\n"

    body = "".join(chunk(index, "stop" if index < num_finished else None) for index in range(3)) + "data: [DONE]\n\n"

    def answer(request: httpx.Request) -> httpx.Response:
        traffic.stop()
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, text=body)

    prompts = itertools.repeat(Prompt("toy", "question"))
    http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    traffic = Traffic("http://none", "toy", prompts, max_tokens=1, temperature=0.8, samples=3, http=http)
    asyncio.run(traffic.run(1))
    assert (traffic.stats.requests, traffic.stats.failed) == (1, int(num_finished < 3))

"""The demo's clients, against a gateway on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from slipstream.topics import Prompt
from slipstream.traffic import Traffic, TrafficStats
from tests.doubles import DoubleEngine, says
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

            traffic = Traffic(
                server.url, engine.model, asked(), max_tokens=40, temperature=temperature, samples=samples
            )
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


def test_one_answer_has_no_group() -> None:
    engine = DoubleEngine(answer=says("0123456789"))
    stats = _traffic(engine, prompts=1, samples=1)
    assert [request.policy.group_id for request in engine.requests] == [""]
    assert len(stats.gaps) == 2


@pytest.mark.parametrize("samples", [1, 3])
def test_answers_that_are_cut_are_a_failed_request(samples: int) -> None:
    engine = DoubleEngine(answer=says("0123456789"), is_cut=True)
    stats = _traffic(engine, prompts=1, samples=samples)
    assert (stats.requests, stats.failed) == (1, 1)

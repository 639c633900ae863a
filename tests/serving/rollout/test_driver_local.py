"""The driver on two real engines: whatever moves where, a seed's text is the one that a single request gives."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from serving.engine import GenerateRequest
from serving.rollout.driver import Driver
from serving.rollout.engines import InProcessEngine
from serving.rollout.interactive_share import SlotsShare
from serving.rollout.order import ContextAware, Fifo
from serving.rollout.samples import GroupRequest, GroupWork, Sample, SampleId, SampleResult
from serving.rollout.scheduler import Policy
from speculator.draft.sampling_params import SamplingParams
from tests.fixtures.toy import make_toy_model
from tests.serving.local.harness import Answer, Harness, fixed_engine
from tests.serving.rollout.engines import Results

PROMPTS = ("the river", "a stone, 42")
NUM_SAMPLES, MAX_TOKENS = 4, 40
SAMPLING = SamplingParams(temperature=0.8, top_p=0.9, top_k=20)


class Restless(Fifo):
    """Whatever waits takes the place of what runs, chunk by chunk."""

    def displaces(self, waiting: Sample, running: Sample) -> bool:
        return True


POLICIES = {
    "fifo": Policy(order=Fifo(), chunk_tokens=7),
    "context-aware": Policy(order=ContextAware(), chunk_tokens=7),
    "restless": Policy(order=Restless(), chunk_tokens=5),
}


@dataclass
class Pair:
    x: Harness
    y: Harness
    model_dir: Path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two engines of one target, with drafts of one token more or less, and so different rounds."""
    model_dir = make_toy_model(tmp_path_factory.mktemp("target"))
    with ExitStack() as running:
        x, y = (running.enter_context(fixed_engine(model_dir, slots=3, depth=depth)) for depth in (3, 1))
        yield Pair(x, y, model_dir)


def works(engine: Harness, **fields: object) -> list[GroupWork]:
    return [
        GroupWork(
            request=GroupRequest(
                group_id=f"g{number}",
                prompt_token_ids=tuple(engine.engine.tokenizer.encode(prompt)),
                seeds=tuple(range(100 * number, 100 * number + NUM_SAMPLES)),
                max_tokens=MAX_TOKENS,
            ),
            sampling=SAMPLING,
            logprobs=True,
            **fields,  # type: ignore[arg-type]
        )
        for number, prompt in enumerate(PROMPTS)
    ]


def rolled_out(pair: Pair, policy: Policy, **fields: object) -> dict[SampleId, SampleResult]:
    async def run() -> Results:
        results = Results()
        engines = [
            InProcessEngine("x", pair.x.engine, SlotsShare()),
            InProcessEngine("y", pair.y.engine, SlotsShare(0.5)),
        ]
        driver = Driver(engines, policy, on_ended=results.take)
        groups = works(pair.x, **fields)
        driver.submit(groups)
        await results.wait_for(len(groups) * NUM_SAMPLES)
        driver.check()
        await driver.close()
        return results

    return {result.sample_id: result for result in asyncio.run(run()).by_sample.values()}


def alone(pair: Pair, **fields: object) -> dict[SampleId, Answer]:
    """Each sample as one request to one engine."""
    asked = {
        SampleId(work.request.group_id, number): GenerateRequest(
            request_id="alone",
            prompt_token_ids=work.request.prompt_token_ids,
            max_tokens=work.request.max_tokens,
            sampling=work.sampling,
            stop=work.stop,
            seed=seed,
            ignore_eos=work.ignore_eos,
        )
        for work in works(pair.x, **fields)
        for number, seed in enumerate(work.request.seeds)
    }
    return dict(zip(asked, pair.x.ask(*asked.values()), strict=True))


@pytest.fixture(scope="module")
def whole(pair: Pair) -> dict[SampleId, Answer]:
    return alone(pair, ignore_eos=True)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_seed_gives_the_same_text_with_every_policy(
    policy: Policy, pair: Pair, whole: dict[SampleId, Answer]
) -> None:
    results = rolled_out(pair, policy, ignore_eos=True)
    for sample_id, answer in whole.items():
        result = results[sample_id]
        assert (list(result.tokens), result.text, result.reason) == (
            answer.token_ids,
            answer.text,
            answer.finish_reason,
        )
    assert {result.engine for result in results.values()} == {"x", "y"}
    if policy is POLICIES["restless"]:
        assert sum(result.num_leases for result in results.values()) > 2 * len(results), "the case must move"


def test_a_stop_string_is_found_where_a_sample_moved_in_the_middle_of_it(
    pair: Pair, whole: dict[SampleId, Answer]
) -> None:
    stop = whole[SampleId("g0", 0)].text[13:17]
    results, expected = (
        rolled_out(pair, POLICIES["restless"], stop=(stop,)),
        alone(pair, stop=(stop,)),
    )
    assert {sample_id: result.text for sample_id, result in results.items()} == {
        sample_id: answer.text for sample_id, answer in expected.items()
    }
    assert results[SampleId("g0", 0)].reason == "stop"
    assert results[SampleId("g0", 0)].num_leases > 1, "the case must move"


def test_logprobs_are_of_the_distribution_that_was_sampled_from(pair: Pair) -> None:
    model = AutoModelForCausalLM.from_pretrained(pair.model_dir, dtype=torch.float64)
    results = rolled_out(pair, POLICIES["restless"], ignore_eos=True)
    for work in works(pair.x):
        prompt = work.request.prompt_token_ids
        for number in range(NUM_SAMPLES):
            result = results[SampleId(work.request.group_id, number)]
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *result.tokens]])).logits[0, len(prompt) - 1 : -1]
            assert result.logprobs == pytest.approx(by_hand(logits, result.tokens), abs=1e-9)


def by_hand(logits: torch.Tensor, tokens: tuple[int, ...]) -> list[float]:
    """Temperature, then the likeliest `top_k`, then of those the fewest that reach `top_p`."""
    found = []
    for row, token in zip(logits, tokens, strict=True):
        likeliest = (row / SAMPLING.temperature).exp().sort(descending=True)
        values = likeliest.values[: SAMPLING.top_k] / likeliest.values[: SAMPLING.top_k].sum()
        size = next(
            n for n in range(1, SAMPLING.top_k + 1) if n == SAMPLING.top_k or values[:n].sum() >= SAMPLING.top_p
        )
        kept = likeliest.indices[:size].tolist()
        found.append(float((values[kept.index(token)] / values[:size].sum()).log()))
    return found


def test_greedy_tokens_were_certain_and_who_does_not_ask_is_told_nothing(pair: Pair) -> None:
    asked, silent = pair.x.ask(
        pair.x.request("the river", max_tokens=9, logprobs=True), pair.x.request("the river", max_tokens=9)
    )
    assert [value for chunk in asked.chunks for value in chunk.logprobs] == [0.0] * 9
    assert [chunk.logprobs for chunk in silent.chunks if chunk.logprobs] == []

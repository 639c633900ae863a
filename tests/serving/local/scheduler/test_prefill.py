"""A piece of a prompt that is read in the pass of a round leaves what one that is read alone does."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from serving.local.decode.rounds import Piece, RoundReport
from serving.local.kernels.build import available
from serving.local.request import Generation
from serving.local.target.model import Target
from speculator.draft.sampling_params import SamplingParams
from speculator.proposals.planner import RoundPlanner
from tests.fixtures.toy import make_toy_model, random_draft
from tests.fixtures.waiting import wait_until
from tests.serving.local.harness import GREEDY, Harness, fixed_engine

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++: make system-packages installs it"),
    pytest.mark.skipif(not available(), reason="a CPU without AVX2, or with AMX"),
]
PROMPTS = [f"a prompt of several pieces, each of which is read on its own, number {number}" for number in range(6)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    model_dir = make_toy_model(tmp_path_factory.mktemp("toy"), hidden_size=256)
    return Target(model_dir, num_slots=4, context_length=256, cache_margin=17)


@pytest.fixture(scope="module")
def model_dir(target: Target) -> Path:
    return Path(target.config["_name_or_path"])


def _rounds(harness: Harness, mode: str) -> float:
    return sum(harness.metric("slipstream_rounds_total", mode=mode, batch=str(batch)) for batch in range(1, 5))


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.9)], ids=["greedy", "sampled"])
def test_texts_and_traces_are_the_same(
    target: Target, model_dir: Path, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for takes_windows in (True, False):
        monkeypatch.setattr(Target, "takes_windows", takes_windows)
        draft = random_draft(model_dir, seed=1)
        with fixed_engine(model_dir, draft=draft, dtype="bfloat16", target=target, control_share=0.1) as harness:
            requests = [
                harness.request(prompt, sampling=sampling, seed=seed, logprobs=True)
                for seed, prompt in enumerate(PROMPTS)
            ]
            answers = harness.ask(*requests)
            wait_until(lambda: len(harness.traces) == len(PROMPTS))
            assert (_rounds(harness, "with_prompt") > 10) == takes_windows
            assert _rounds(harness, "speculative") > 10
            # Of those with a prompt no time is compared.
            measured = harness.meter.measure()
            assert measured.speculative_rounds == _rounds(harness, "speculative")
            assert measured.baseline_rounds == _rounds(harness, "control")
        # Control rounds, which cut the chunks, come elsewhere.
        told = [
            [
                (token, logprob)
                for chunk in answer.chunks
                for token, logprob in zip(chunk.token_ids, chunk.logprobs, strict=True)
            ]
            for answer in answers
        ]
        traces = sorted(harness.traces, key=lambda trace: trace.header.request_id)
        seen.append((told, traces))
    (ours, our_traces), (theirs, their_traces) = seen
    assert ours == theirs
    for trace, other_trace in zip(our_traces, their_traces, strict=True):
        assert torch.equal(trace.aux_hidden, other_trace.aux_hidden)
        np.testing.assert_array_equal(trace.token_ids, other_trace.token_ids)
        np.testing.assert_array_equal(trace.target_topk_ids, other_trace.target_topk_ids)
        np.testing.assert_array_equal(trace.target_topk_logprobs, other_trace.target_topk_logprobs)


def test_clients_that_leave_and_drafts_that_come_between_two_pieces_change_no_text(
    target: Target, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fixed_engine(model_dir, depth=0, dtype="bfloat16", target=target) as harness:
        alone = [harness.ask(harness.request(prompt))[0].token_ids for prompt in PROMPTS]
    with fixed_engine(model_dir, draft=random_draft(model_dir, seed=1), dtype="bfloat16", target=target) as harness:
        harness.drafts[2] = random_draft(model_dir, seed=2)
        run, num_shared = harness.engine._loop._runner.run, 0
        clients: dict[str, asyncio.Task[list[int]]] = {}

        def leave(generation: Generation) -> None:
            client = clients[generation.request.request_id]
            client.get_loop().call_soon_threadsafe(client.cancel)

        def run_and_disturb(
            running: list[Generation], depth: int, piece: Piece | None = None, **arm: bool
        ) -> RoundReport:
            nonlocal num_shared
            report = run(running, depth, piece, **arm)
            if piece is not None:
                num_shared += 1
                if num_shared == 3:
                    pool.submit(harness.engine.install_draft, 2)
                elif num_shared == 9:
                    leave(piece.generation)
                elif num_shared == 20:
                    leave(running[0])
            return report

        async def one(prompt: str) -> list[int]:
            chunks = [chunk async for chunk in harness.engine.generate(harness.request(prompt))]
            return [token for chunk in chunks for token in chunk.token_ids]

        async def everybody() -> list[list[int] | BaseException]:
            clients.update({prompt: asyncio.create_task(one(prompt)) for prompt in PROMPTS})
            return await asyncio.gather(*clients.values(), return_exceptions=True)

        monkeypatch.setattr(harness.engine._loop._runner, "run", run_and_disturb)
        with ThreadPoolExecutor(1) as pool:
            answers = asyncio.run(everybody())
        assert harness.engine.draft_version == 2
    stayed = [isinstance(answer, list) for answer in answers]
    assert sum(stayed) == len(PROMPTS) - 2
    assert [answer for answer in answers if isinstance(answer, list)] == list(itertools.compress(alone, stayed))


def test_one_piece_in_eight_is_read_alone_so_that_rounds_are_timed(target: Target, model_dir: Path) -> None:
    planner = RoundPlanner(max_depth=4)
    timed = 0
    add_verification = planner.times.add_verification

    def count(*args: object) -> None:
        nonlocal timed
        timed += 1
        add_verification(*args)  # type: ignore[arg-type]

    planner.times.add_verification = count  # type: ignore[method-assign]
    with fixed_engine(model_dir, dtype="bfloat16", target=target, planner=planner) as harness:
        # One answer goes on while one prompt after the other is read.
        harness.ask(
            harness.request("first", max_tokens=200), *(harness.request(text, max_tokens=1) for text in PROMPTS)
        )
        wait_until(lambda: harness.traces)
        shared, alone = _rounds(harness, "with_prompt"), _rounds(harness, "speculative")
    num_pieces = sum(-(-len(harness.engine.tokenizer.encode(text)) // 8) for text in PROMPTS)
    assert timed == alone
    assert num_pieces * 7 // 8 - 2 <= shared <= num_pieces * 7 // 8 + 1

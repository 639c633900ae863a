"""A piece of a prompt that is read in the pass of a round leaves what one that is read alone does."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from serving.engine import CapturePolicy, WatchedRound
from serving.local.kernels.build import available
from speculator.draft.sampling_params import SamplingParams
from speculator.proposals.planner import RoundPlanner
from speculator.trace import Trace
from tests.fixtures.decoding import WholeTrees
from tests.fixtures.toy import make_toy_model, moved_model, random_draft
from tests.fixtures.waiting import wait_until
from tests.serving.local.harness import GREEDY, Answer, Harness, Row, WatchedTarget, fixed_engine

needs_kernels = pytest.mark.skipif(shutil.which("g++") is None or not available(), reason="no kernels on this machine")
PROMPTS = [f"a prompt of several pieces, each of which is read on its own, number {number}" for number in range(6)]
SAMPLED = SamplingParams(temperature=0.9)
both_samplings = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


@pytest.fixture
def target(model_dir: Path) -> WatchedTarget:
    """In float64; it takes rows of different length, and computes one after the other."""
    target = WatchedTarget(model_dir, dtype=torch.float64)
    target.any_rows = True
    return target


@pytest.fixture(params=["row by row", pytest.param("kernels", marks=needs_kernels)])
def any_target(request: pytest.FixtureRequest, tmp_path: Path) -> WatchedTarget:
    if request.param == "row by row":
        return WatchedTarget(make_toy_model(tmp_path), dtype=torch.float64)
    return WatchedTarget(make_toy_model(tmp_path, hidden_size=256))


def _rounds(harness: Harness, mode: str) -> float:
    return sum(harness.metric("slipstream_rounds_total", mode=mode, batch=str(batch)) for batch in range(1, 5))


def _ids(harness: Harness, *prompts: str) -> list[list[int]]:
    return [harness.engine.tokenizer.encode(prompt) for prompt in prompts]


def _ask(harness: Harness, sampling: SamplingParams, count: int = len(PROMPTS)) -> tuple[list[Answer], list[Trace]]:
    requests = [
        harness.request(text, sampling=sampling, seed=seed, logprobs=True) for seed, text in enumerate(PROMPTS[:count])
    ]
    answers = harness.ask(*requests)
    wait_until(lambda: len(harness.traces) == count)
    return answers, sorted(harness.traces, key=lambda trace: trace.header.request_id)


def _check_same(ours: tuple[list[Answer], list[Trace]], theirs: tuple[list[Answer], list[Trace]]) -> None:
    """Texts, log-probabilities, and what the traces say of the target."""
    for answer, other in zip(ours[0], theirs[0], strict=True):
        assert answer.token_ids == other.token_ids
        told, wanted = ([one for chunk in each.chunks for one in chunk.logprobs] for each in (answer, other))
        assert told == pytest.approx(wanted, abs=1e-6)
    for trace, other_trace in zip(ours[1], theirs[1], strict=True):
        np.testing.assert_array_equal(trace.token_ids, other_trace.token_ids)
        np.testing.assert_array_equal(trace.target_topk_ids, other_trace.target_topk_ids)
        torch.testing.assert_close(trace.aux_hidden, other_trace.aux_hidden)


@both_samplings
def test_texts_proposals_and_traces_are_those_of_pieces_read_alone(
    any_target: WatchedTarget, sampling: SamplingParams
) -> None:
    model_dir = Path(any_target.config["_name_or_path"])
    seen = []
    for any_rows in (True, False):
        any_target.any_rows = None if any_target.embed.dtype == torch.bfloat16 and any_rows else any_rows
        draft = random_draft(model_dir, seed=1)
        with fixed_engine(
            model_dir,
            draft=draft,
            dtype="bfloat16" if any_target.embed.dtype == torch.bfloat16 else "float64",
            target=any_target,
        ) as harness:
            seen.append(_ask(harness, sampling))
            assert (_rounds(harness, "with_prompt") > 10) == any_rows
            # Of those with a prompt no time is compared.
            assert harness.meter.measure().speculative_rounds == _rounds(harness, "speculative") > 10
    _check_same(*seen)
    for trace, other in zip(seen[0][1], seen[1][1], strict=True):
        if any_target.embed.dtype == torch.bfloat16:
            assert torch.equal(trace.aux_hidden, other.aux_hidden)
            np.testing.assert_array_equal(trace.target_topk_logprobs, other.target_topk_logprobs)
        # What the draft had read is the same, too.
        np.testing.assert_array_equal(trace.rounds.position, other.rounds.position)
        np.testing.assert_array_equal(trace.rounds.draft_tokens, other.rounds.draft_tokens)
        np.testing.assert_allclose(trace.rounds.draft_logprobs, other.rounds.draft_logprobs, atol=1e-2)


@both_samplings
def test_proposals_of_different_number_are_not_padded(
    model_dir: Path, target: WatchedTarget, sampling: SamplingParams
) -> None:
    """Texts, log-probabilities and traces are those of plain decoding."""

    def ask(harness: Harness) -> tuple[list[Answer], list[Trace]]:
        """Two of the last three ask what was answered before, on either side of one that is new."""
        settings: dict[str, Any] = {"max_tokens": 200, "sampling": sampling, "seed": 7, "logprobs": True}
        first, *others = (
            harness.request(f"a prompt of several pieces, number {number}", request_id=name, **settings)
            for name, number in {"a": 0, "b": 0, "c": 1, "d": 0}.items()
        )
        answers = harness.ask(first) + harness.ask(*others)
        wait_until(lambda: len(harness.traces) == 4)
        return answers, sorted(harness.traces, key=lambda trace: trace.header.request_id)

    with fixed_engine(model_dir, planner=WholeTrees(), suffix_depth=8, target=target) as harness:
        ours = ask(harness)
    uneven = [len({len(row.tokens) for row in rows}) > 1 for rows in target.passes if len(rows) == 3]
    # With two requests that decode, the third row is at most the five pieces of the last prompt.
    assert sum(uneven) > 5 + 3
    with fixed_engine(model_dir, depth=0) as harness:
        _check_same(ours, ask(harness))


def test_a_target_that_moves_between_two_shared_pieces(model_dir: Path, target: WatchedTarget, tmp_path: Path) -> None:
    """The prompt is read anew; who was running goes on."""
    new_dir = moved_model(model_dir, tmp_path / "1")
    with fixed_engine(new_dir) as harness:
        (new, *_), (new_trace, *_) = _ask(harness, GREEDY, count=1)
    with fixed_engine(model_dir, target=target) as harness:
        engine, (prompt,) = harness.engine, _ids(harness, PROMPTS[0])
        moved: list[Row] = []

        def move(rows: list[Row]) -> None:
            if len(rows) == 2 and rows[1].start and rows[1].is_piece_of(prompt) and not moved:
                moved.append(rows[1])
                threading.Thread(target=engine.update_target, args=(1, new_dir)).start()
                wait_until(lambda: harness.inbox.num_tasks == 1)

        target.on_pass = move
        first, second = harness.ask(harness.request("first", max_tokens=100), harness.request(PROMPTS[0]))
        wait_until(lambda: len(harness.traces) == 2)
    read = [row.start for rows in target.passes for row in rows if row.is_piece_of(prompt)]
    assert read.count(0) == 2, "before the move and after it"
    assert second.token_ids == new.token_ids
    assert len(first.token_ids) == 100
    trace = next(one for one in harness.traces if one.header.request_id == PROMPTS[0])
    assert trace.header.target_version == 1
    torch.testing.assert_close(trace.aux_hidden, new_trace.aux_hidden)
    np.testing.assert_array_equal(trace.target_topk_ids, new_trace.target_topk_ids)


def test_samples_of_a_group_copy_what_a_shared_pass_has_read(model_dir: Path, target: WatchedTarget) -> None:
    prompt = "a prompt that is longer than the kept window of twenty positions"

    def ask(policy: CapturePolicy) -> tuple[int, list[list[int]]]:
        target.passes.clear()
        with fixed_engine(model_dir, target=target) as harness:
            samples = [
                harness.request(prompt, request_id=str(seed), seed=seed, policy=policy, sampling=SAMPLED)
                for seed in range(3)
            ]
            answers = harness.ask(harness.request("first", max_tokens=100), *samples)
            assert _rounds(harness, "with_prompt") > 0
            return target.num_read(*_ids(harness, prompt)), [answer.token_ids for answer in answers]

    together, texts = ask(CapturePolicy(group_id="g"))
    alone, same = ask(CapturePolicy())
    assert texts == same
    assert alone - together == 2 * len(prompt), "the last token is a round's"


def test_control_rounds_make_way_for_no_prompt_and_prompts_of_one_piece_are_shared_all_the_same(
    model_dir: Path, target: WatchedTarget
) -> None:
    rounds: list[WatchedRound] = []
    with fixed_engine(model_dir, control_share=0.2, target=target, on_round=rounds.append) as harness:
        for start in range(0, 64, 16):
            harness.ask(*(harness.request(f"p{number}", max_tokens=12) for number in range(start, start + 16)))
    shared = [round_ for round_ in rounds if round_.read_prompt]
    assert len(shared) >= 0.8 * 64
    assert all(round_.drafted for round_ in shared)


def test_a_long_prompt_makes_way_for_control_rounds_that_are_due(model_dir: Path, target: WatchedTarget) -> None:
    rounds: list[WatchedRound] = []
    with fixed_engine(model_dir, control_share=0.2, target=target, on_round=rounds.append) as harness:
        harness.ask(
            harness.request("first", max_tokens=200), *(harness.request(text, max_tokens=1) for text in PROMPTS)
        )
    num_pieces = sum(-(-len(text) // 8) for text in PROMPTS)
    shared = [at for at, round_ in enumerate(rounds) if round_.read_prompt]
    assert 8 * (num_pieces - len(shared)) > num_pieces + 8, "more than one piece in eight is read alone"
    assert all(rounds[at].drafted for at in shared)
    assert any(not round_.drafted for round_ in rounds[shared[0] : shared[-1]])


def test_clients_that_leave_and_drafts_that_come_between_two_pieces_change_no_text(
    model_dir: Path, target: WatchedTarget
) -> None:
    with fixed_engine(model_dir, depth=0) as harness:
        alone = [harness.ask(harness.request(prompt))[0].token_ids for prompt in PROMPTS]
    with fixed_engine(model_dir, draft=random_draft(model_dir, seed=1), target=target) as harness:
        harness.drafts[2] = random_draft(model_dir, seed=2)
        clients: list[asyncio.Task[list[int]]] = []
        prompts, begun, num_shared = _ids(harness, *PROMPTS), 0, 0

        def leave(client: asyncio.Task[list[int]]) -> None:
            client.get_loop().call_soon_threadsafe(client.cancel)

        def disturb(rows: list[Row]) -> None:
            nonlocal begun, num_shared
            if any(map(rows[-1].is_piece_of, prompts)):
                begun += rows[-1].start == 0
                num_shared += len(rows) > 1
                if len(rows) > 1 and num_shared == 3:
                    pool.submit(harness.engine.install_draft, 2)
                elif len(rows) > 1 and num_shared == 9:
                    leave(clients[begun - 1])  # whose prompt is being read
                elif len(rows) > 1 and num_shared == 20:
                    leave(clients[0])

        async def one(prompt: str) -> list[int]:
            chunks = [chunk async for chunk in harness.engine.generate(harness.request(prompt))]
            return [token for chunk in chunks for token in chunk.token_ids]

        async def all_requests() -> list[list[int] | BaseException]:
            clients.extend(asyncio.create_task(one(prompt)) for prompt in PROMPTS)
            return await asyncio.gather(*clients, return_exceptions=True)

        target.on_pass = disturb
        with ThreadPoolExecutor(1) as pool:
            answers = asyncio.run(all_requests())
        assert harness.engine.draft_version == 2
    stayed = [isinstance(answer, list) for answer in answers]
    assert sum(stayed) == len(PROMPTS) - 2
    assert [answer for answer in answers if isinstance(answer, list)] == list(itertools.compress(alone, stayed))


def test_one_piece_in_eight_is_read_alone_so_that_rounds_are_timed(model_dir: Path, target: WatchedTarget) -> None:
    planner = RoundPlanner(max_depth=4)
    timed = 0
    add_verification = planner.times.add_verification

    def count(*args: object) -> None:
        nonlocal timed
        timed += 1
        add_verification(*args)  # type: ignore[arg-type]

    planner.times.add_verification = count  # type: ignore[method-assign]
    with fixed_engine(model_dir, target=target, planner=planner) as harness:
        # One answer goes on while one prompt after the other is read.
        harness.ask(
            harness.request("first", max_tokens=200), *(harness.request(text, max_tokens=1) for text in PROMPTS)
        )
        wait_until(lambda: harness.traces)
        shared, alone = _rounds(harness, "with_prompt"), _rounds(harness, "speculative")
    num_pieces = sum(-(-len(text) // 8) for text in PROMPTS)
    assert timed == alone
    assert num_pieces * 7 // 8 - 2 <= shared <= num_pieces * 7 // 8 + 1

"""Passes over rows of different length, on any machine: proposals, and a piece of a prompt beside them.

In float64, with a pass over rows of different length that computes one row after the other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from serving.engine import CapturePolicy
from serving.local.decode.rounds import Piece, RoundReport
from serving.local.request import Generation
from serving.local.target.layers import Parents
from serving.local.target.model import Target
from speculator.draft.sampling_params import SamplingParams
from speculator.trace import Trace
from tests.fixtures.decoding import WholeTrees
from tests.fixtures.toy import make_toy_model, moved_model
from tests.fixtures.waiting import wait_until
from tests.serving.local.harness import GREEDY, Answer, Harness, fixed_engine

PROMPTS = [f"a prompt of several pieces, number {number}" for number in range(6)]
SAMPLED = SamplingParams(temperature=0.9)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_model(tmp_path_factory.mktemp("toy"))


def _one_row_after_the_other(
    target: Target, rows: Sequence[Sequence[int]], *, starts: Sequence[int], parents: Sequence[Parents]
) -> tuple[Tensor, Tensor]:
    passes = [
        target.forward(torch.tensor([list(row)]), first_slot=slot, starts=[start], parents=[of_row])
        for slot, (row, start, of_row) in enumerate(zip(rows, starts, parents, strict=True))
    ]
    return torch.cat([hidden_1Td[0] for hidden_1Td, _ in passes]), torch.cat([aux_1Tw[0] for _, aux_1Tw in passes])


@pytest.fixture
def windows() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "takes_windows", True)
        patch.setattr(Target, "forward_windows", _one_row_after_the_other)
        yield patch


@dataclass
class Seen:
    """Pieces that were read while others decoded, and how."""

    shared: list[Piece] = field(default_factory=list)
    alone: list[Piece] = field(default_factory=list)
    controlled: int = 0
    """Shared ones whose round was plain."""
    put_off: int = 0
    """Shared ones that did not end their prompt, where a control round was due."""

    @classmethod
    def of(cls, harness: Harness) -> Seen:
        seen, loop = cls(), harness.engine._loop
        run, prefill, decode = loop._runner.run, loop._runner.prefill, loop._decode

        def watched_run(
            running: Sequence[Generation], depth: int, piece: Piece | None = None, **arm: bool
        ) -> RoundReport:
            if piece is not None:
                seen.shared.append(piece)
                seen.controlled += depth == 0
            return run(running, depth, piece, **arm)

        def watched_prefill(piece: Piece, *, drafting: bool) -> None:
            if loop.num_running:
                seen.alone.append(piece)
            prefill(piece, drafting=drafting)

        def watched_decode(piece: Piece | None) -> None:
            if piece is not None and not piece.ends_prompt:
                seen.put_off += loop._control.is_due(loop.num_running)
            decode(piece)

        loop._runner.run, loop._runner.prefill = watched_run, watched_prefill  # type: ignore[method-assign]
        loop._decode = watched_decode  # type: ignore[method-assign]
        return seen


def _ask(harness: Harness, sampling: SamplingParams, count: int = len(PROMPTS)) -> tuple[list[Answer], list[Trace]]:
    requests = [harness.request(text, sampling=sampling, seed=seed) for seed, text in enumerate(PROMPTS[:count])]
    answers = harness.ask(*requests)
    wait_until(lambda: len(harness.traces) == count)
    return answers, sorted(harness.traces, key=lambda trace: trace.header.request_id)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_texts_proposals_and_traces_are_those_of_pieces_read_alone(
    model_dir: Path, sampling: SamplingParams, windows: pytest.MonkeyPatch
) -> None:
    with fixed_engine(model_dir) as harness:
        seen = Seen.of(harness)
        answers, traces = _ask(harness, sampling)
        assert len(seen.shared) > 10
    windows.undo()
    with fixed_engine(model_dir) as harness:
        seen = Seen.of(harness)
        others, other_traces = _ask(harness, sampling)
        assert not seen.shared
    assert [one.token_ids for one in answers] == [one.token_ids for one in others]
    for trace, other in zip(traces, other_traces, strict=True):
        torch.testing.assert_close(trace.aux_hidden, other.aux_hidden)
        np.testing.assert_array_equal(trace.target_topk_ids, other.target_topk_ids)
        # What the draft had read is the same, too.
        np.testing.assert_array_equal(trace.rounds.position, other.rounds.position)
        np.testing.assert_array_equal(trace.rounds.draft_tokens, other.rounds.draft_tokens)
        np.testing.assert_allclose(trace.rounds.draft_logprobs, other.rounds.draft_logprobs, atol=1e-2)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_proposals_of_different_number_are_not_padded(
    model_dir: Path, sampling: SamplingParams, windows: pytest.MonkeyPatch
) -> None:
    """Texts, log-probabilities and traces are those of plain decoding."""
    passes: list[list[int]] = []
    uneven: list[bool] = []

    def watched(target: Target, rows: Sequence[Sequence[int]], **others: Any) -> tuple[Tensor, Tensor]:
        passes.append([len(row) for row in rows])
        return _one_row_after_the_other(target, rows, **others)

    def ask(harness: Harness) -> tuple[list[Answer], list[Trace]]:
        """Two of the last three ask what was answered before, on either side of one that is new."""
        settings: dict[str, Any] = {"max_tokens": 200, "sampling": sampling, "seed": 7, "logprobs": True}
        first, *others = (
            harness.request(PROMPTS[number], request_id=name, **settings)
            for name, number in {"a": 0, "b": 0, "c": 1, "d": 0}.items()
        )
        answers = harness.ask(first) + harness.ask(*others)
        wait_until(lambda: len(harness.traces) == 4)
        return answers, sorted(harness.traces, key=lambda trace: trace.header.request_id)

    windows.setattr(Target, "forward_windows", watched)
    with fixed_engine(model_dir, planner=WholeTrees(), suffix_depth=8) as harness:
        run = harness.engine._loop._runner.run

        def watched_run(
            running: Sequence[Generation], depth: int, piece: Piece | None = None, **arm: bool
        ) -> RoundReport:
            report = run(running, depth, piece, **arm)
            verified = [1 + num for num in report.proposed]
            assert passes[-1] == [*verified, *([] if piece is None else [len(piece.tokens)])]
            assert report.num_tokens == sum(verified)
            uneven.append(len(verified) == 3 and len(set(verified)) > 1)
            return report

        harness.engine._loop._runner.run = watched_run  # type: ignore[method-assign]
        answers, traces = ask(harness)
    assert sum(uneven) > 3
    windows.undo()
    with fixed_engine(model_dir, depth=0) as harness:
        others, other_traces = ask(harness)
    for answer, other in zip(answers, others, strict=True):
        assert answer.token_ids == other.token_ids
        told, wanted = ([one for chunk in each.chunks for one in chunk.logprobs] for each in (answer, other))
        assert told == pytest.approx(wanted, abs=1e-6)
    for trace, other_trace in zip(traces, other_traces, strict=True):
        np.testing.assert_array_equal(trace.token_ids, other_trace.token_ids)
        np.testing.assert_array_equal(trace.target_topk_ids, other_trace.target_topk_ids)
        torch.testing.assert_close(trace.aux_hidden, other_trace.aux_hidden)


@pytest.mark.usefixtures("windows")
def test_a_target_that_moves_between_two_shared_pieces(model_dir: Path, tmp_path: Path) -> None:
    """The prompt is read anew; who was running goes on."""
    new_dir = moved_model(model_dir, tmp_path / "1")
    with fixed_engine(new_dir) as harness:
        (new, *_), (new_trace, *_) = _ask(harness, GREEDY, count=1)
    with fixed_engine(model_dir) as harness:
        engine, seen = harness.engine, Seen.of(harness)
        run, runner = engine._loop._runner.run, engine._loop._runner
        moved: list[Piece] = []

        def run_and_move(
            running: Sequence[Generation], depth: int, piece: Piece | None = None, **arm: bool
        ) -> RoundReport:
            report = run(running, depth, piece, **arm)
            if piece is not None and piece.start and not moved:
                moved.append(piece)
                threading.Thread(target=engine.move_target, args=(1, new_dir)).start()
                wait_until(lambda: engine._inbox.staged_move() is not None)
            return report

        runner.run = run_and_move  # type: ignore[method-assign]
        first, second = harness.ask(harness.request("first", max_tokens=100), harness.request(PROMPTS[0]))
        wait_until(lambda: len(harness.traces) == 2)
        read = [piece.start for piece in seen.shared + seen.alone if piece.generation is moved[0].generation]
    assert read.count(0) == 2, "before the move and after it"
    assert second.token_ids == new.token_ids
    assert len(first.token_ids) == 100
    trace = next(one for one in harness.traces if one.header.request_id == PROMPTS[0])
    assert trace.header.target_version == 1
    torch.testing.assert_close(trace.aux_hidden, new_trace.aux_hidden)
    np.testing.assert_array_equal(trace.target_topk_ids, new_trace.target_topk_ids)


@pytest.mark.usefixtures("windows")
def test_samples_of_a_group_copy_what_a_shared_pass_has_read(model_dir: Path) -> None:
    prompt, policy = "a prompt that is longer than the kept window of twenty positions", CapturePolicy(group_id="g")

    def ask(policy: CapturePolicy) -> tuple[Seen, list[list[int]]]:
        with fixed_engine(model_dir) as harness:
            seen = Seen.of(harness)
            samples = [
                harness.request(prompt, request_id=str(seed), seed=seed, policy=policy, sampling=SAMPLED)
                for seed in range(3)
            ]
            answers = harness.ask(harness.request("first", max_tokens=100), *samples)
            return seen, [answer.token_ids for answer in answers]

    seen, texts = ask(policy)
    alone, same = ask(CapturePolicy())
    assert texts == same

    def tokens_read(by: Seen) -> int:
        return sum(len(piece.tokens) for piece in by.shared + by.alone)

    assert seen.shared
    assert tokens_read(alone) - tokens_read(seen) == 2 * len(prompt), "the last token is a round's"


@pytest.mark.usefixtures("windows")
def test_control_rounds_make_way_for_no_prompt_and_prompts_of_one_piece_are_shared_all_the_same(
    model_dir: Path,
) -> None:
    with fixed_engine(model_dir, control_share=0.2) as harness:
        seen = Seen.of(harness)
        for start in range(0, 64, 16):
            harness.ask(*(harness.request(f"p{number}", max_tokens=12) for number in range(start, start + 16)))
    pieces = len(seen.shared) + len(seen.alone)
    assert pieces >= 40
    assert len(seen.shared) >= 0.8 * pieces
    assert seen.controlled == 0


@pytest.mark.usefixtures("windows")
def test_a_long_prompt_makes_way_for_control_rounds_that_are_due(model_dir: Path) -> None:
    with fixed_engine(model_dir, control_share=0.2) as harness:
        seen = Seen.of(harness)
        harness.ask(
            harness.request("first", max_tokens=200), *(harness.request(text, max_tokens=1) for text in PROMPTS)
        )
    assert 8 * len(seen.alone) > len(seen.shared) + len(seen.alone) + 8, "more than one piece in eight"
    assert seen.put_off == seen.controlled == 0

"""Spans: what was captured of a request becomes a well-formed trace, or none, and never a wrong one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from serving.engine import CapturePolicy
from serving.sglang.capture.request import (
    MAX_COMPLETION_TOKENS,
    InconsistentSpanError,
    Origin,
    RequestSpan,
    Rounds,
    Rows,
    SpanRequest,
)
from speculator.draft.sampling_params import SamplingParams
from speculator.trace import BranchRows, Trace, VerifyRounds, check_trace

WIDTH, KEPT = 6, 4


def request(num_prompt_tokens: int = 5, *, constrained: bool = False) -> SpanRequest:
    return SpanRequest(
        request_id="r",
        num_prompt_tokens=num_prompt_tokens,
        sampling=SamplingParams(temperature=0.0),
        policy=CapturePolicy(tenant="t", group_id="g", domain="d"),
        constrained=constrained,
        created_ms=0,
    )


def rows(start: int, count: int, labelled: int) -> Rows:
    positions = torch.arange(start, start + count, dtype=torch.bfloat16)
    ids = np.arange(labelled * KEPT, dtype=np.int32).reshape(labelled, KEPT) + 100 * (start + count - labelled)
    return Rows(
        start=start,
        features=positions[:, None].repeat(1, WIDTH),
        topk_ids=ids,
        topk_logprobs=np.tile(np.array([-0.5, -1.5, -2.5, -3.5], np.float16), (labelled, 1)),
    )


def round_(position: int, tokens: list[int], path: list[int]) -> Rounds:
    verified = VerifyRounds(
        position=np.array([position], np.int32),
        draft_tokens=np.array([tokens], np.int32),
        draft_logprobs=np.full((1, len(tokens)), -1, np.float16),
        draft_parents=np.arange(-1, len(tokens) - 1, dtype=np.int8)[None],
        num_accepted=np.array([len(path)], np.int8),
        draft_version=np.full(1, 3, np.int32),
    )
    return Rounds(verified=verified, path=np.array([[*path, *tokens[len(path) :]]], np.int32))


def trace_of(span: RequestSpan, tokens: list[int]) -> Trace | None:
    trace = span.trace(tokens, Origin("e", "f" * 64, "target_only"))
    if trace is not None:
        check_trace(trace)
    return trace


def test_a_trace_is_as_old_as_its_request() -> None:
    span = RequestSpan(dataclasses.replace(request(), created_ms=1_000))
    span.add_rows(rows(0, 5, 1))
    span.add_rows(rows(5, 1, 1))
    trace = trace_of(span, [11, 12, 13, 14, 15, 21, 31])
    assert trace is not None
    assert trace.header.created_ms == 1_000


def test_a_round_that_began_at_the_last_token_of_an_answer_is_left_out() -> None:
    """Overlap scheduling verifies once more behind the end. The last token has no row."""
    span = RequestSpan(request())
    span.add_rows(rows(0, 5, 1))
    for position in (5, 6):
        span.add_rounds(round_(position, [31, 32], []))
        span.add_rows(rows(position, 1, 1))
    trace = trace_of(span, [11, 12, 13, 14, 15, 21, 22])
    assert trace is not None
    assert (trace.num_tokens, trace.rounds.position.tolist()) == (6, [5])


def test_an_answer_of_a_chunked_prompt_and_two_rounds() -> None:
    span = RequestSpan(request())
    span.add_rows(rows(0, 3, 1))
    span.add_rows(rows(3, 2, 1))
    span.add_rounds(round_(5, [21, 22, 23], [21]))
    span.add_rows(rows(5, 2, 2))
    span.add_rounds(round_(7, [31, 32, 33], []))
    span.add_rows(rows(7, 1, 1))
    #         prompt           first  accepted  bonus  bonus
    trace = trace_of(span, [1, 2, 3, 4, 5, 20, 21, 30, 40])
    assert trace is not None
    assert trace.token_ids.tolist() == [1, 2, 3, 4, 5, 20, 21, 30]
    assert trace.aux_hidden[:, 0].tolist() == list(range(8))
    assert (trace.target_topk_ids[:, 0] >= 0).tolist() == [False, False, True, False, True, True, True, True]
    assert trace.rounds.position.tolist() == [5, 7]
    assert trace.rounds.num_accepted.tolist() == [1, 0]
    assert trace.rounds.draft_version.tolist() == [3, 3]
    assert (trace.header.tenant, trace.header.group_id, trace.header.domain) == ("t", "g", "d")


def test_a_prefix_from_the_cache_is_not_in_the_span() -> None:
    span = RequestSpan(request())
    span.add_rows(rows(3, 2, 1))
    span.add_rows(rows(5, 1, 1))
    trace = trace_of(span, [1, 2, 3, 4, 5, 20, 21])
    assert trace is not None
    assert (trace.header.first_position, trace.token_ids.tolist()) == (3, [4, 5, 20])


def test_what_follows_the_end_of_the_answer_is_left_out() -> None:
    """A stop token in the middle of an accepted run, or a step that overlap scheduling launched too many."""
    span = RequestSpan(request())
    span.add_rows(rows(0, 5, 1))
    span.add_rounds(round_(5, [21, 22, 23], [21, 22, 23]))
    span.add_rows(rows(5, 4, 4))
    span.add_rounds(round_(9, [31, 32, 33], [31]))
    span.add_rows(rows(9, 2, 2))
    trace = trace_of(span, [1, 2, 3, 4, 5, 20, 21])
    assert trace is not None
    assert trace.token_ids.tolist() == [1, 2, 3, 4, 5, 20]
    assert trace.rounds.position.tolist() == [5]
    assert trace.rounds.num_accepted.tolist() == [3]


def test_a_one_token_answer_teaches_nothing() -> None:
    span = RequestSpan(request())
    span.add_rows(rows(0, 5, 1))
    assert trace_of(span, [1, 2, 3, 4, 5, 20]) is None


def test_nothing_computed_makes_no_trace() -> None:
    assert trace_of(RequestSpan(request()), [1, 2, 3, 4, 5, 20]) is None


def test_rounds_of_different_depth_are_padded() -> None:
    span = RequestSpan(request())
    span.add_rows(rows(0, 5, 1))
    span.add_rounds(round_(5, [21], []))
    span.add_rows(rows(5, 1, 1))
    span.add_rounds(round_(6, [31, 32, 33], [31, 32]))
    span.add_rows(rows(6, 3, 3))
    trace = trace_of(span, [1, 2, 3, 4, 5, 20, 30, 31, 32, 40])
    assert trace is not None
    assert trace.rounds.draft_tokens.tolist() == [[21, -1, -1], [31, 32, 33]]


def test_a_gap_is_an_error() -> None:
    span = RequestSpan(request())
    span.add_rows(rows(0, 3, 1))
    with pytest.raises(InconsistentSpanError, match="positions from 4 follow positions up to 3"):
        span.add_rows(rows(4, 1, 1))


def test_accepted_proposals_that_were_not_served_are_an_error() -> None:
    span = RequestSpan(request())
    span.add_rows(rows(0, 5, 1))
    span.add_rounds(round_(5, [21, 22], [21]))
    span.add_rows(rows(5, 2, 2))
    with pytest.raises(InconsistentSpanError, match="position 5 were not served"):
        trace_of(span, [1, 2, 3, 4, 5, 20, 99, 30])


def test_constrained_answers_are_marked_from_their_first_token_on() -> None:
    span = RequestSpan(request(constrained=True))
    span.add_rows(rows(0, 5, 1))
    span.add_rows(rows(5, 1, 1))
    trace = trace_of(span, [1, 2, 3, 4, 5, 20, 30])
    assert trace is not None
    assert trace.constrained.tolist() == [False] * 4 + [True, True]


def test_a_giant_answer_is_cut() -> None:
    span = RequestSpan(request(1))
    span.add_rows(rows(0, 1, 1))
    for start in range(1, MAX_COMPLETION_TOKENS + 50):
        span.add_rows(rows(start, 1, 1))
    assert span.is_cut
    trace = trace_of(span, list(range(MAX_COMPLETION_TOKENS + 60)))
    assert trace is not None
    assert trace.num_tokens == MAX_COMPLETION_TOKENS + 1
    held = span.num_bytes
    span.add_rows(rows(MAX_COMPLETION_TOKENS + 50, 1, 1))
    assert span.num_bytes == held


def rejected_rows(rounds: list[int], nodes: list[int]) -> BranchRows:
    num = len(nodes)
    return BranchRows(
        round=np.array(rounds, np.int32),
        node=np.array(nodes, np.int8),
        hidden=torch.tensor(nodes)[:, None].repeat(1, WIDTH).bfloat16(),
        topk_ids=np.tile(np.arange(KEPT, dtype=np.int32), (num, 1)),
        topk_logprobs=np.tile(np.array([-0.5, -1.5, -2.5, -3.5], np.float16), (num, 1)),
    )


@pytest.mark.parametrize(("num_served", "kept"), [(5, [(0, 0), (0, 1), (1, 2)]), (4, [(0, 0), (0, 1)]), (1, [])])
def test_rows_behind_rejections_go_with_the_text_before_them(num_served: int, kept: list[tuple[int, int]]) -> None:
    """The second round accepts two proposals; an end token in the midst of them cuts off the third one's row."""
    span = RequestSpan(request())
    span.add_rows(rows(0, 5, 1))
    assert span.num_bytes == 5 * WIDTH * 2 + KEPT * (4 + 2)
    span.add_rounds(dataclasses.replace(round_(5, [21, 22], []), rejected=rejected_rows([0, 0], [0, 1])))
    span.add_rows(rows(5, 1, 1))
    before = span.num_bytes
    span.add_rounds(dataclasses.replace(round_(6, [31, 32, 33], [31, 32]), rejected=rejected_rows([0], [2])))
    assert span.num_bytes - before == WIDTH * 2 + KEPT * (4 + 2) + 4 + 1
    span.add_rows(rows(6, 3, 3))
    trace = trace_of(span, [1, 2, 3, 4, 5, *[20, 30, 31, 32, 40][:num_served]])
    assert sum(map(len, span.rejected)) == 3
    if not kept:
        assert trace is None
        return
    assert trace is not None
    assert trace.branches is not None
    assert [*zip(trace.branches.round.tolist(), trace.branches.node.tolist(), strict=True)] == kept
    assert trace.branches.hidden[:, 0].tolist() == [node for _, node in kept]


def test_what_fills_up_a_row_of_text_has_no_row_behind_a_rejection() -> None:
    span = RequestSpan(request())
    span.add_rows(rows(0, 5, 1))
    span.add_rounds(dataclasses.replace(round_(5, [21, -1], []), rejected=rejected_rows([0, 0], [0, 1])))
    span.add_rows(rows(5, 1, 1))
    trace = trace_of(span, [1, 2, 3, 4, 5, 20, 30])
    assert trace is not None
    assert trace.branches is not None
    assert trace.branches.node.tolist() == [0]

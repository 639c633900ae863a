"""What the assembler takes together, what it holds in memory, and what costs a trace; fed by capture."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from serving.sglang.capture.assembler import Gathering
from serving.sglang.capture.device_reads import HostCopy
from serving.sglang.capture.request import CaptureState, RequestSpan
from speculator.trace import Trace, check_trace
from tests.fixtures.waiting import wait_until
from tests.serving.sglang.harness import Request, end, make_capture, prefill, settle, verify


def test_verifications_taken_together_say_what_each_one_says() -> None:
    """Depths in turn, one request beside another and alone, and a swap in the middle; so whichever thread reduces."""

    def run(gather_s: float, behind_bytes: int = 1 << 30) -> list[Trace]:
        torch.manual_seed(0)
        traces: list[Trace] = []
        capture = make_capture(traces, gathering=Gathering(gather_s, behind_bytes=behind_bytes))
        first, second = Request([1, 2, 3], "a"), Request([4, 5], "b")
        prefill(capture, [first, second])
        first.output_ids, second.output_ids = [10], [11]
        verify(capture, [first, second], [3, 2], [[], []], [0, 0])
        verify(capture, [first, second], [4, 3], [[], []], [0, 0])
        verify(capture, [first, second], [5, 4], [[21, 22], [23, 24]], [2, 0])
        verify(capture, [first, second], [8, 5], [[25, 26], [27, 28]], [0, 1])
        verify(capture, [first, second], [9, 7], [[25, 26], [27, 28]], [0, 1], version=8)
        verify(capture, [second], [9], [[29, 30]], [2], version=8)
        end(capture, first)
        end(capture, second)
        settle(capture)
        return traces

    for alone, together in [*zip(run(0), run(10), strict=True), *zip(run(0), run(10, -1), strict=True)]:
        check_trace(together)
        assert together.token_ids.tolist() == alone.token_ids.tolist()
        for name in ("position", "draft_tokens", "draft_logprobs", "num_accepted", "draft_version"):
            assert getattr(together.rounds, name).tolist() == getattr(alone.rounds, name).tolist()
        assert torch.equal(together.aux_hidden, alone.aux_hidden)
        assert together.target_topk_ids.tolist() == alone.target_topk_ids.tolist()
        assert together.target_topk_logprobs.tolist() == alone.target_topk_logprobs.tolist()
        assert together.rounds.draft_version.tolist() == [7, 7, 8, 8][: len(together.rounds.position)]


def test_the_end_of_a_request_waits_for_no_more_of_its_kind_and_nor_does_the_stop() -> None:
    traces: list[Trace] = []
    capture = make_capture(traces, gathering=Gathering(3600.0))
    first, second = Request([1, 2, 3], "a"), Request([4, 5], "b")
    for request in (first, second):
        prefill(capture, [request])
        request.output_ids = [10]
        verify(capture, [request], [len(request.origin_input_ids)], [[21, 22]], [1])
    end(capture, first)
    wait_until(lambda: traces)
    assert traces[0].header.request_id == "a"
    verify(capture, [second], [4], [[23, 24]], [0])
    settle(capture)
    wait_until(lambda: capture.assembler.queued_bytes == 0)


@pytest.mark.parametrize("is_much", [False, True])
def test_much_is_taken_at_once_and_little_waits(is_much: bool) -> None:
    traces: list[Trace] = []
    capture = make_capture(traces, gathering=Gathering(3600, num_bytes=1 if is_much else 1 << 30))
    request = Request([1, 2, 3])
    prefill(capture, [request])
    if is_much:
        wait_until(lambda: capture.assembler.queued_bytes == 0)
    request.output_ids = [10]
    verify(capture, [request], [3], [[21, 22]], [2])
    if not is_much:
        assert capture.assembler.queued_bytes > 0
    end(capture, request)
    settle(capture)
    assert len(traces) == 1
    assert (capture.assembler.queued_bytes, capture.assembler.held_bytes) == (0, 0)


def test_what_cannot_be_read_costs_its_own_traces_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[Trace] = []
    capture = make_capture(traces)
    read = HostCopy.wait
    first, second = Request([1, 2, 3], "a"), Request([4, 5], "b")
    monkeypatch.setattr(HostCopy, "wait", lambda copy: {})
    prefill(capture, [first])
    end(capture, first)
    wait_until(lambda: capture.assembler.dropped)
    monkeypatch.setattr(HostCopy, "wait", read)
    prefill(capture, [second])
    second.output_ids = [11]
    verify(capture, [second], [2], [[23, 24]], [0])
    end(capture, second)
    settle(capture)
    assert [trace.header.request_id for trace in traces] == ["b"]
    assert (capture.assembler.dropped, capture.assembler.held_bytes) == ({"failed": 1}, 0)


def test_an_end_that_cannot_be_taken_is_counted() -> None:
    capture, unlike_a_span = make_capture([]), cast(RequestSpan, SimpleNamespace(num_bytes=0))
    capture.assembler.end(CaptureState(unlike_a_span), [1, 2, 3])
    settle(capture)
    assert capture.assembler.dropped == {"failed": 1}


def test_positions_that_do_not_follow_drop_the_trace() -> None:
    traces: list[Trace] = []
    capture = make_capture(traces)
    request = Request([1, 2, 3])
    prefill(capture, [request])
    request.output_ids = [10]
    for position in (3, 4, 6):
        verify(capture, [request], [position], [[]], [0])
    end(capture, request)
    settle(capture)
    assert (traces, capture.assembler.dropped) == ([], {"inconsistent": 1})


def test_an_inconsistent_request_costs_none_that_was_verified_beside_it() -> None:
    traces: list[Trace] = []
    capture = make_capture(traces)
    requests = [Request([1, 2, 3], "a"), Request([4, 5], "b"), Request([6], "c")]
    prefill(capture, requests)
    for request in requests:
        request.output_ids = [10]
    verify(capture, requests, [3, 2, 1], [[]] * 3, [0] * 3)
    verify(capture, requests, [4, 7, 2], [[]] * 3, [0] * 3)
    for request in requests:
        end(capture, request)
    settle(capture)
    assert [trace.header.request_id for trace in traces] == ["a", "c"]
    assert (capture.assembler.dropped, capture.assembler.held_bytes) == ({"inconsistent": 1}, 0)


def test_beyond_the_buffer_traces_are_dropped_and_counted_and_room_comes_back() -> None:
    traces: list[Trace] = []
    capture = make_capture(traces, buffer_bytes=2000)
    large = Request(list(range(1, 400)), "large")
    prefill(capture, [large])
    end(capture, large)
    deadline = time.monotonic() + 5
    while not capture.assembler.dropped and time.monotonic() < deadline:
        time.sleep(0.01)
    small = Request([1, 2], "small")
    prefill(capture, [small])
    small.output_ids = [10]
    verify(capture, [small], [2], [[21, 22]], [1])
    end(capture, small)
    settle(capture)
    assert capture.assembler.dropped == {"buffer_full": 1}
    assert [trace.header.request_id for trace in traces] == ["small"]


def in_step(capture: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Waits until the assembler has taken all that it was handed, and its memory is what it will be."""
    assembler, handed, taken = capture.assembler, list[object](), list[object]()
    hand_over, take_prefill, take_verifications = (
        getattr(assembler, name) for name in ("hand_over", "_take_prefill", "_take_verifications")
    )

    def handing_over(step: object) -> None:
        handed.append(step)
        hand_over(step)

    def taking_prefill(step: object) -> None:
        take_prefill(step)
        taken.append(step)

    def taking_verifications(alike: Sequence[object]) -> None:
        take_verifications(alike)
        taken.extend(alike)

    monkeypatch.setattr(assembler, "hand_over", handing_over)
    monkeypatch.setattr(assembler, "_take_prefill", taking_prefill)
    monkeypatch.setattr(assembler, "_take_verifications", taking_verifications)
    return lambda: wait_until(lambda: len(taken) == len(handed))


def test_a_full_buffer_costs_the_newest_requests_and_their_memory_is_free_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traces: list[Trace] = []
    capture = make_capture(traces, buffer_bytes=3000, context_window=64)
    wait = in_step(capture, monkeypatch)
    requests = [Request(list(range(1, 61)), name) for name in "abcde"]
    for request in requests:
        prefill(capture, [request])
        wait()
        request.output_ids = [10]
    running = [request for request in requests if request.rid not in {"d", "e"}]
    verify(capture, running, [60] * 3, [[21, 22]] * 3, [1] * 3)
    wait()
    assert capture.assembler.held_share <= 1
    for request in requests:
        end(capture, request)
    settle(capture)
    kept = [trace.header.request_id for trace in traces]
    assert kept == [request.rid for request in requests[: len(kept)]], "those that began first"
    assert 0 < len(kept) < len(requests)
    lost = capture.assembler.dropped + capture.refused
    assert lost == {"buffer_full": len(requests) - len(kept)}
    assert capture.assembler.held_bytes == 0


def test_once_the_buffer_is_full_room_is_made_for_more_than_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def held_of(count: int, buffer_bytes: int) -> int:
        capture = make_capture([], buffer_bytes=buffer_bytes)
        wait = in_step(capture, monkeypatch)
        for number in range(count):
            prefill(capture, [Request(list(range(1, 21)), str(number))])
            wait()
        settle(capture)
        return capture.assembler.held_bytes

    one = held_of(1, 1 << 20)
    assert held_of(10, int(10.5 * one)) == 10 * one
    assert held_of(11, int(10.5 * one)) == 9 * one, "at most nine tenths of it"


def test_what_was_begun_under_another_target_is_not_recorded() -> None:
    traces: list[Trace] = []
    capture = make_capture(traces)
    first, second = Request([1, 2, 3], "a"), Request([4, 5], "b")
    prefill(capture, [first])
    first.output_ids = [10]
    capture.assembler.target_version = 2
    verify(capture, [first], [3], [[21, 22]], [0])
    prefill(capture, [second])
    second.output_ids = [11]
    verify(capture, [second], [2], [[23, 24]], [0])
    end(capture, first)
    end(capture, second)
    settle(capture)
    assert [(trace.header.request_id, trace.header.target_version) for trace in traces] == [("b", 2)]
    assert capture.assembler.dropped == {"target_moved": 1}


def test_nothing_is_kept_of_a_request_that_has_ended() -> None:
    traces: list[Trace] = []
    capture = make_capture(traces)
    request = Request([1, 2, 3])
    prefill(capture, [request])
    request.output_ids = [10]
    verify(capture, [request], [3], [[21, 22]], [1])
    spans = weakref.WeakSet(capture._open_tickets)
    assert len(spans) == 1
    end(capture, request)
    settle(capture)
    gc.collect()
    assert (len(traces), len(spans), capture.assembler.held_bytes) == (1, 0, 0)

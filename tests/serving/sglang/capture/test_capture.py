"""Capture with stand-ins for SGLang's objects: what is picked, refused, and freed, and what a trace says of it."""

from __future__ import annotations

import gc
import math
import sys
import weakref
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from fastapi import HTTPException
from torch.utils._python_dispatch import TorchDispatchMode

from serving.capture.sampling import BRANCH_ROOM, CaptureSampler
from serving.request_metadata import HEADER, OTHER_TARGET, RequestMetadata
from serving.sglang.capture.assembler import Gathering
from serving.sglang.capture.capture import ByteBudget, StepCapture
from serving.sglang.capture.device_reads import DraftLogprobRecorder, TextRows
from serving.sglang.capture.request import (
    attach_metadata,
    attach_metadata_to_generation,
    is_for_another_target,
    policy_of,
    sampling_of,
)
from serving.sglang.capture.verification_rows import TopTokens, in_order, tree_parents
from serving.sglang.device import CpuDevice, Device
from serving.sglang.plugin import hooks
from speculator.draft.sampling_params import SamplingParams
from speculator.host import now_ms
from speculator.trace import NO_DRAFT, Trace, check_trace, decode_trace, encode_trace
from tests.fixtures.waiting import wait_until
from tests.serving.sglang.harness import (
    KEPT,
    VOCAB,
    WIDTH,
    Request,
    Step,
    called,
    end,
    make_capture,
    prefill,
    settle,
    verify,
)
from tests.serving.sglang.slow_device import SlowDevice


def test_a_batch_of_two_becomes_two_traces() -> None:
    traces: list[Trace] = []
    capture = make_capture(traces)
    first, second = Request([1, 2, 3], "a"), Request([4, 5], "b")
    prefill(capture, [first, second])
    first.output_ids, second.output_ids = [10], [11]
    verify(capture, [first, second], [3, 2], [[21, 22], [23, 24]], [2, 0])
    verify(capture, [second], [3], [[25, 26]], [1])
    end(capture, first)
    end(capture, second)
    settle(capture)
    assert [trace.header.request_id for trace in traces] == ["a", "b"]
    for trace in traces:
        check_trace(trace)
    assert traces[0].token_ids.tolist() == [1, 2, 3, 10, 21, 22]
    assert traces[1].token_ids.tolist() == [4, 5, 11, 30, 25]
    assert traces[1].rounds.num_accepted.tolist() == [0, 1]
    assert traces[0].rounds.draft_version.tolist() == [7]


def test_rounds_of_earlier_text_are_no_drafts() -> None:
    """And what fills a row up was proposed by nobody, even where it was accepted."""
    traces: list[Trace] = []
    capture = make_capture(traces)
    batch = [Request([1, 2, 3], "text"), Request([1, 2, 3], "head"), Request([1, 2, 3], "filled")]
    prefill(capture, batch)
    for request in batch:
        request.output_ids = [10]
    text = TextRows(
        is_text_at=torch.tensor([[True, True, False], [False] * 3, [True, False, False]]),
        logprobs=torch.full((3, 3), -0.25),
        num_of_head=1,
    )
    verify(capture, batch, [3] * 3, [[21, 22, 23], [24, 25, 26], [27, 28, 29]], [1, 0, 2], text=text)
    verify(capture, batch, [5, 4, 6], [[31, 32, 33]] * 3, [0, 0, 0])
    for request in batch:
        end(capture, request)
    settle(capture)
    rounds = {trace.header.request_id: trace.rounds for trace in traces}
    for trace in traces:
        check_trace(trace)
    assert {name: of.draft_version.tolist() for name, of in rounds.items()} == {
        "text": [NO_DRAFT, 7],
        "head": [7, 7],
        "filled": [NO_DRAFT, 7],
    }
    assert {name: of.draft_tokens[0].tolist() for name, of in rounds.items()} == {
        "text": [21, 22, -1],
        "head": [24, -1, -1],
        "filled": [27, 28, -1],
    }
    assert rounds["text"].draft_logprobs[0].tolist() == [-0.25, -0.25, 0]
    assert rounds["text"].draft_tokens[1].tolist() == [31, 32, 33]


@pytest.mark.parametrize("gather_s", [0, 10])
@pytest.mark.parametrize("device", [CpuDevice(), SlowDevice()], ids=["host", "device"])
def test_of_some_chains_the_rejected_rows_are_kept_as_the_target_computed_them(device: Device, gather_s: float) -> None:
    """Beside a request that opted out, whose rows go nowhere, and one under a grammar."""
    torch.manual_seed(0)
    rng, traces = np.random.default_rng(0), list[Trace]()
    capture = make_capture(traces, device=device, gathering=Gathering(gather_s), branch_share=0.1)
    requests = [Request([1, 2, 3], "a"), Request([4, 5], "b", custom_params={"slipstream": {"capture": False}})]
    requests += [Request([6, 7, 8, 9], "c"), Request([6, 7], "constrained", min_p=0.5)]
    prefill(capture, requests)
    for request in requests:
        request.output_ids = [10]
    computed: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]] = {}
    num_rejected = num_committed = 0
    for _ in range(150):
        positions = [len(request.origin_input_ids) + len(request.output_ids) - 1 for request in requests]
        accepted = rng.integers(0, 4, 4).tolist()
        num_rejected += sum(3 - accepted[row] for row in (0, 2))
        num_committed += sum(1 + accepted[row] for row in (0, 2))

        def seen(hook: Any, objects: list[Any], positions: list[int] = positions) -> object:
            if objects:
                output = objects[1].logits_output
                of_each = zip(output.hidden_states.split(4), output.next_token_logits.split(4), strict=True)
                for request, position, (hidden, logits) in zip(requests, positions, of_each, strict=True):
                    computed[request.rid, position] = hidden.clone(), logits.clone()
            return hook()

        # Not the token that the harness takes for the target's own.
        chains = rng.integers(0, 30, (4, 3)).tolist()
        verify(capture, requests, positions, chains, accepted, step=seen)
    for request in requests:
        end(capture, request)
    settle(capture)
    found = {trace.header.request_id: decode_trace(encode_trace(trace)) for trace in traces}
    assert found.keys() == {"a", "c", "constrained"}
    assert found["constrained"].branches is None
    num_kept = 0
    for name in ("a", "c"):
        rows, rounds = found[name].branches, found[name].rounds
        assert rows is not None
        num_kept += len(rows)
        for row, (round_, node) in enumerate(zip(rows.round.tolist(), rows.node.tolist(), strict=True)):
            assert node >= rounds.num_accepted[round_]
            hidden, logits = computed[name, int(rounds.position[round_])]
            top = logits[node + 1].log_softmax(-1).topk(KEPT)
            assert rows.topk_ids[row].tolist() == top.indices.tolist()
            np.testing.assert_allclose(rows.topk_logprobs[row], top.values.numpy(), atol=2e-3)
            torch.testing.assert_close(rows.hidden[row].float(), hidden[node + 1].float(), rtol=0.07, atol=0.02)
        # All that were rejected in a verification, or none.
        for round_ in set(rows.round.tolist()):
            assert rows.node[rows.round == round_].tolist() == [*range(rounds.num_accepted[round_], 3)]
    assert 0.05 * num_rejected < num_kept < 0.15 * num_rejected
    assert num_kept <= BRANCH_ROOM * num_committed
    assert (capture.assembler.branch_rows["kept"], capture.assembler.branch_rows["cut"]) == (num_kept, 0)
    assert capture.assembler.held_bytes == 0


def test_rows_behind_rejections_beyond_their_budget_are_counted_and_not_copied() -> None:
    """Hardly anything is accepted, and 15 proposals are rejected at a time."""
    traces: list[Trace] = []
    probe = DraftLogprobRecorder(num_slots=4, max_batch=4, max_proposals=15, topk=1, device=torch.device("cpu"))
    capture = make_capture(traces, probe=probe, branch_share=0.1)
    request = Request([1, 2, 3])
    prefill(capture, [request])
    request.output_ids = [10]
    for number in range(400):
        verify(capture, [request], [3 + number], [[*range(15)]], [0])
    end(capture, request)
    settle(capture)
    (trace,) = traces
    kept = trace.num_branches
    assert 0.2 * 400 < kept <= BRANCH_ROOM * 400
    over = capture.assembler.branch_rows["budget"]
    assert over > 0
    assert kept + over == pytest.approx(0.1 * 400 * 15, rel=0.4)


def test_retracted_requests_start_again() -> None:
    traces: list[Trace] = []
    capture = make_capture(traces)
    request = Request([1, 2, 3])
    prefill(capture, [request])
    request.output_ids = [10]
    verify(capture, [request], [3], [[21, 22]], [1])
    capture.on_release(request)  # not finished: retracted
    request.origin_input_ids, prompt = [1, 2, 3, 10, 21, 30], [1, 2, 3]
    prefill(capture, [request])
    request.origin_input_ids, request.output_ids = prompt, [10, 21, 30, 40]
    verify(capture, [request], [6], [[41, 42]], [0])
    end(capture, request)
    settle(capture)
    (trace,) = traces
    assert trace.token_ids.tolist() == [1, 2, 3, 10, 21, 30, 40]
    assert trace.rounds.position.tolist() == [6]
    assert capture.assembler.dropped == {"retracted": 1}


def test_an_order_to_erase_covers_what_waits_for_its_first_prefill_or_for_another_one() -> None:
    traces: list[Trace] = []
    capture = make_capture(traces)
    retracted, queued = Request([1, 2, 3], "retracted"), Request([4, 5], "queued")
    for request in (retracted, queued):
        request.time_stats.scheduler_recv_time -= 60
    received_ms = now_ms() - 60_000
    prefill(capture, [retracted])
    capture.on_release(retracted)
    prefill(capture, [retracted, queued])
    retracted.output_ids, queued.output_ids = [10], [11]
    verify(capture, [retracted, queued], [3, 2], [[21, 22], [23, 24]], [1, 1])
    for request in (retracted, queued):
        end(capture, request)
    settle(capture)
    assert [abs(trace.header.created_ms - received_ms) < 30_000 for trace in traces] == [True, True]


def test_beyond_the_longest_answer_of_a_trace_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.sglang.capture.request.MAX_COMPLETION_TOKENS", 4)
    traces: list[Trace] = []
    capture = make_capture(traces, gathering=Gathering(seconds=0))
    request = Request([1, 2, 3])
    prefill(capture, [request])
    request.output_ids = [10]
    for position in (3, 5):
        verify(capture, [request], [position], [[21, 22]], [1])
    span = vars(request)["_slipstream_ticket"].span
    wait_until(lambda: span.is_cut)
    monkeypatch.setattr(capture.assembler, "hand_over", lambda _: pytest.fail("rows were copied"))
    for position in range(7, 43, 2):
        verify(capture, [request], [position], [[21, 22]], [1])
    end(capture, request)
    settle(capture)
    (trace,) = traces
    assert trace.token_ids.tolist() == [1, 2, 3, 10, 21, 30, 21]
    assert trace.rounds.position.tolist() == [3, 5]
    assert not capture.assembler.dropped


@pytest.mark.parametrize(("ends", "first"), [([6], 4), ([5, 6], 4), ([2, 6], 4)])
def test_of_a_long_prompt_its_last_positions_are_kept(ends: list[int], first: int) -> None:
    """In however many chunks it is read, and beside a prompt that is shorter."""
    traces: list[Trace] = []
    capture = make_capture(traces, context_window=2)
    long, short, start = Request([1, 2, 3, 4, 5, 6], "long"), Request([9], "short"), 0
    for stop in ends:
        requests, starts, lengths = [long], [start], [stop - start]
        if stop == 6:
            requests, starts, lengths = [long, short], [start, 0], [stop - start, 1]
        hidden = torch.tensor([*range(start, stop), *[99] * (len(requests) - 1)])[:, None].repeat(1, WIDTH).bfloat16()
        batch = SimpleNamespace(reqs=requests, prefix_lens=starts, extend_lens=lengths)
        capture.read_prefill(batch, hidden, torch.randn(len(requests), VOCAB))
        start = stop
    long.output_ids, short.output_ids = [10], [11]
    verify(capture, [long, short], [6, 1], [[21], [22]], [0, 0])
    for request in (long, short):
        end(capture, request)
    settle(capture)
    found = {trace.header.request_id: decode_trace(encode_trace(trace)) for trace in traces}
    assert found["long"].header.first_position == first
    assert found["long"].token_ids.tolist() == [5, 6, 10]
    assert found["long"].aux_hidden[:2, 0].tolist() == [4, 5]
    assert (found["short"].header.first_position, found["short"].aux_hidden[0, 0].item()) == (0, 99)


def test_a_step_after_the_end_is_ignored() -> None:
    """Overlap scheduling launches one more verification before it learns that the request has ended."""
    traces: list[Trace] = []
    capture = make_capture(traces)
    request = Request([1, 2, 3])
    prefill(capture, [request])
    request.output_ids = [10]
    verify(capture, [request], [3], [[21, 22]], [0])
    end(capture, request)
    verify(capture, [request], [4], [[23, 24]], [0])
    settle(capture)
    assert len(traces) == 1


def test_what_is_read_after_the_end_is_not_held() -> None:
    """The verdict of a verification that was launched before the end comes behind it."""
    traces: list[Trace] = []
    capture = make_capture(traces)
    request = Request([1, 2, 3])
    prefill(capture, [request])
    request.output_ids = [10]
    verify(capture, [request], [3], [[21, 22]], [0])

    def ending(hook: Callable[[], object], launched: list[Any]) -> object:
        if not launched:
            end(capture, request)
        return hook()

    verify(capture, [request], [4], [[23, 24]], [0], step=ending)
    settle(capture)
    assert len(traces) == 1
    assert (capture.assembler.held_bytes, capture.assembler.queued_bytes) == (0, 0)


@pytest.mark.parametrize("device", [CpuDevice(), SlowDevice()], ids=["host", "device"])
def test_what_sglang_overwrites_behind_a_step_is_captured_as_it_was(device: Device) -> None:
    """Sampling turns a prefill's logits into probabilities, in place, and a graph writes into its outputs again."""

    def captured(step: Step) -> Trace:
        torch.manual_seed(0)
        traces: list[Trace] = []
        capture, request = make_capture(traces, device=device), Request([1, 2, 3])
        prefill(capture, [request], step=step)
        request.output_ids = [10]
        verify(capture, [request], [3], [[21, 22]], [1], step=step)
        end(capture, request)
        settle(capture)
        return traces[0]

    def overwriting(hook: Callable[[], object], objects: list[Any]) -> object:
        done = hook()
        for one in objects:
            if output := getattr(one, "logits_output", None):
                if not device.is_host:
                    output.hidden_states.zero_()
                    output.next_token_logits.zero_()
            elif isinstance(one, torch.Tensor) and one.shape[-1] == VOCAB:
                one.copy_(one.softmax(-1))
        return done

    plain, overwritten = captured(called), captured(overwriting)
    assert torch.equal(plain.aux_hidden.view(torch.uint8), overwritten.aux_hidden.view(torch.uint8))
    assert plain.target_topk_ids.tolist() == overwritten.target_topk_ids.tolist()
    assert plain.target_topk_logprobs.tolist() == overwritten.target_topk_logprobs.tolist()


@pytest.mark.parametrize("unlike", [{"lora_id": "adapter"}, {"multimodal_inputs": object()}, {"input_embeds": [[0.0]]}])
def test_what_is_not_the_target_on_text_is_not_captured(unlike: dict[str, Any]) -> None:
    traces: list[Trace] = []
    capture = make_capture(traces)
    request, like = Request([1, 2, 3], "unlike"), Request([1, 2, 3], "like")
    vars(request).update(unlike)
    requests = [request, like]
    prefill(capture, requests)
    for one in requests:
        one.output_ids = [10]
    verify(capture, requests, [3, 3], [[21, 22], [21, 22]], [0, 0])
    for one in requests:
        end(capture, one)
    settle(capture)
    assert [trace.header.request_id for trace in traces] == ["like"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("grammar", object()),
        ("custom_logit_processor", "of the client"),
        ("logit_bias", {"7": 2.0}),
        ("min_new_tokens", 3),
        ("min_p", 0.5),
    ],
)
def test_what_else_changes_the_distribution_leaves_an_answer_without_labels(name: str, value: object) -> None:
    traces: list[Trace] = []
    capture, request = make_capture(traces), Request([1, 2, 3])
    setattr(request if hasattr(request, name) else request.sampling_params, name, value)
    prefill(capture, [request])
    request.output_ids = [10]
    verify(capture, [request], [3], [[21, 22]], [0])
    end(capture, request)
    settle(capture)
    assert [trace.constrained.tolist() for trace in traces] == [[False, False, True, True]]


def test_opted_out_requests_beside_captured_ones() -> None:
    traces: list[Trace] = []
    capture = make_capture(traces)
    silent = Request([1, 2], "silent", custom_params={"slipstream": {"capture": False}})
    open_ = Request([3, 4], "open")
    prefill(capture, [silent, open_])
    silent.output_ids, open_.output_ids = [10], [11]
    verify(capture, [silent, open_], [2, 2], [[21], [22]], [1, 1])
    end(capture, silent)
    end(capture, open_)
    settle(capture)
    (trace,) = traces
    assert trace.token_ids.tolist() == [3, 4, 11, 22]
    assert (capture.refused, capture.assembler.dropped) == ({}, {})


@pytest.mark.parametrize("num_proposals", [0, 2])
@pytest.mark.parametrize("is_behind", [False, True])
@pytest.mark.parametrize("is_cpu", [False, True])
def test_a_trace_is_the_same_beside_whoever_opts_out_and_wherever_logits_are_reduced(
    num_proposals: int, is_behind: bool, is_cpu: bool
) -> None:
    def run(neighbour_opts_out: bool, is_cpu: bool, behind_bytes: int = 1 << 30) -> Trace:
        torch.manual_seed(0)
        traces: list[Trace] = []
        capture = make_capture(traces, gathering=Gathering(behind_bytes=behind_bytes))
        capture.reduces_late = is_cpu
        first = Request([1, 2], custom_params={"slipstream": {"capture": not neighbour_opts_out}})
        second = Request([3, 4])
        prefill(capture, [first, second])
        first.output_ids, second.output_ids = [10], [11]
        verify(capture, [first, second], [2, 2], [[21, 22][:num_proposals]] * 2, [num_proposals, 0])
        verify(capture, [first, second], [3 + num_proposals, 3], [[23, 24][:num_proposals]] * 2, [0, num_proposals])
        end(capture, second)
        settle(capture)
        (trace,) = traces
        return trace

    expected = run(neighbour_opts_out=False, is_cpu=True)
    found = run(neighbour_opts_out=True, is_cpu=is_cpu, behind_bytes=-1 if is_behind else 1 << 30)
    check_trace(found)
    assert torch.equal(found.aux_hidden, expected.aux_hidden)
    for name in ("token_ids", "target_topk_ids", "target_topk_logprobs"):
        assert getattr(found, name).tolist() == getattr(expected, name).tolist()
    for name in ("position", "draft_tokens", "draft_logprobs", "num_accepted", "draft_version"):
        assert getattr(found.rounds, name).tolist() == getattr(expected.rounds, name).tolist()


def test_an_aborted_request_is_counted_and_freed() -> None:
    traces: list[Trace] = []
    capture = make_capture(traces)
    request = Request([1, 2, 3])
    prefill(capture, [request])
    end(capture, request, "abort")
    settle(capture)
    assert (traces, capture.assembler.dropped) == ([], {"aborted": 1})


def test_a_request_that_just_vanishes_frees_its_span() -> None:
    capture = make_capture([])
    request = Request([1, 2, 3])
    prefill(capture, [request])
    ticket = weakref.ref(vars(request)["_slipstream_ticket"])
    del request
    settle(capture)
    del capture
    gc.collect()
    assert ticket() is None


def test_without_room_no_request_is_captured_and_that_is_counted() -> None:
    capture = make_capture([], gathering=Gathering(3600), buffer_bytes=1)
    prefill(capture, [Request([1, 2, 3])])
    assert not capture.refused
    prefill(capture, [Request([4, 5])])
    assert capture.refused == {"buffer_full": 1}
    settle(capture)


def test_the_budget_admits_until_it_is_spent_and_again_later() -> None:
    now = [0.0]
    budget = ByteBudget(100, clock=lambda: now[0])
    assert budget.admits()
    budget.spend(500)
    assert not budget.admits()
    now[0] = 2.0
    assert not budget.admits()
    now[0] = 4.0
    assert budget.admits()
    budget.spend(150)
    now[0] = 4.2
    assert not budget.admits(), "no time counts twice"
    now[0] = 10_000.0
    assert budget.admits()
    budget.spend(250)
    assert not budget.admits(), "no more is saved up than two seconds bring"


def test_what_sampling_does_not_follow_is_counted_and_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    unread = SimpleNamespace(lag=lambda: pytest.fail("nothing is looked at here"))
    sampler = CaptureSampler(unread, floor=0.01, at_start=True)
    traces: list[Trace] = []
    capture, requests = make_capture(traces, sampler=sampler), [Request([1, 2, 3], rid=f"{row}") for row in range(2)]
    follows = iter([True, False])
    monkeypatch.setattr(sampler, "follows", lambda: next(follows))
    prefill(capture, requests)
    copied = capture.assembler.held_bytes
    for request in requests:
        request.output_ids = [10]
    verify(capture, requests, [3, 3], [[5], [6]], [1, 1])
    for request in requests:
        end(capture, request)
    settle(capture)
    assert [trace.header.request_id for trace in traces] == ["0"]
    assert capture.refused == {"sampled_stream": 1}
    assert 0 < copied <= 3 * WIDTH * 2 + VOCAB * 4


def test_no_budget_is_no_limit() -> None:
    budget = ByteBudget(0)
    budget.spend(10**12)
    assert budget.admits()


def _trees(capture: StepCapture, requests: list[Request], paths: list[list[int]]) -> None:
    """A verification of trees of three nodes; features count the accepted steps, logits say the node."""
    num_nodes = 3
    index = torch.full((len(paths), num_nodes), -1)
    for row, path in enumerate(paths):
        index[row, : len(path)] = torch.tensor(path) + num_nodes * row
    links = torch.tensor([[1, -1, -1]] * len(paths))
    batch = SimpleNamespace(
        reqs=requests,
        spec_info=SimpleNamespace(
            draft_token=torch.tensor([[10, 21, 22]] * len(paths)).flatten(),
            draft_token_num=num_nodes,
            draft_probs=None,
            topk=2,
            retrieve_next_token=links,
            retrieve_next_sibling=torch.tensor([[-1, 2, -1]] * len(paths)),
        ),
        seq_lens=torch.full((len(paths),), 2),
        req_pool_indices=torch.arange(len(paths)),
    )
    logits = torch.zeros(len(paths) * num_nodes, VOCAB)
    logits[torch.arange(len(logits)), 3 + torch.arange(len(logits))] = 9.0
    result = SimpleNamespace(
        accept_lens=torch.tensor([len(path) for path in paths]),
        logits_output=SimpleNamespace(
            hidden_states=torch.arange(float(len(logits)))[:, None].repeat(1, WIDTH).bfloat16(),
            next_token_logits=logits,
        ),
    )
    capture.after_verify(batch, capture.before_verify(batch), result, index, 1)
    for request, path in zip(requests, paths, strict=True):
        request.output_ids += [*[[10, 21, 22][node] for node in path[1:]], 30]


@pytest.mark.parametrize("device", [CpuDevice(), SlowDevice()], ids=["host", "device"])
def test_of_some_trees_of_a_batch_what_was_committed_alone_is_copied(device: Device) -> None:
    """The first and the third of three trees."""
    traces: list[Trace] = []
    probe = DraftLogprobRecorder(num_slots=4, max_batch=4, max_proposals=3, topk=2, device=torch.device("cpu"))
    capture = make_capture(traces, device=device, probe=probe, gathering=Gathering(3600))
    requests = [Request([1, 2], "a"), Request([1, 2], "b", custom_params={"slipstream": {"capture": False}})]
    requests.append(Request([1, 2], "c"))
    prefill(capture, requests)
    before = capture.assembler.queued_bytes
    for request in requests:
        request.output_ids = [10]
    _trees(capture, requests, [[0, 1], [0], [0, 2]])
    assert capture.assembler.queued_bytes == before, "nobody knows yet what was committed"
    capture.verified([1, 0, 1])
    of_row = WIDTH * 2 + VOCAB * 4 if device.is_host else WIDTH + 2 + KEPT * 8
    of_tree = 8 + 3 * (8 + 8 + 8 + 8) + 3 * 4
    assert 4 * of_row < capture.assembler.queued_bytes - before <= 4 * of_row + 3 * of_tree
    for request in requests:
        end(capture, request)
    settle(capture)
    assert [trace.header.request_id for trace in traces] == ["a", "c"]
    first, third = (decode_trace(encode_trace(trace)) for trace in traces)
    # SGLang has compacted the features, not the logits.
    assert first.aux_hidden[2:, 0].tolist() == [0, 1]
    assert third.aux_hidden[2:, 0].tolist() == [6, 7]
    assert first.target_topk_ids[2:, 0].tolist() == [3, 4]
    assert third.target_topk_ids[2:, 0].tolist() == [9, 11]


def test_what_another_stream_reads_is_not_given_out_again_before() -> None:
    """SGLang launches a step on one stream and takes its result on another."""
    device = SlowDevice()
    probe = DraftLogprobRecorder(num_slots=4, max_batch=4, max_proposals=3, topk=2, device=torch.device("cpu"))
    capture = make_capture([], device=device, probe=probe)
    request = Request([1, 2])
    prefill(capture, [request])
    _trees(capture, [request], [[0, 1]])
    assert device.log[-1] == "main: event"
    before = len(device.log)
    capture.verified([1])
    # Features, ids and log-probabilities of the likeliest tokens, what belongs to trees, the accepted path.
    assert device.log[before : before + 2] == ["side: wait event", "side: record stream 5"]
    assert all(line.startswith("side: ") for line in device.log[before:])
    settle(capture)


def test_a_verification_without_a_verdict_is_not_kept_for_ever() -> None:
    probe = DraftLogprobRecorder(num_slots=4, max_batch=4, max_proposals=3, topk=2, device=torch.device("cpu"))
    capture = make_capture([], probe=probe, gathering=Gathering(3600))
    request = Request([1, 2])
    prefill(capture, [request])
    before = capture.assembler.queued_bytes
    _trees(capture, [request], [[0]])
    capture.verified([0])
    one = capture.assembler.queued_bytes - before
    for _ in range(20):
        _trees(capture, [request], [[0]])
    for _ in range(20):
        capture.verified([0])
    assert capture.assembler.queued_bytes == before + 9 * one
    settle(capture)


def test_tree_links_become_parents() -> None:
    #        0
    #      1   2
    #     3 4   5
    next_token = [1, 3, 5, -1, -1, -1]
    next_sibling = [-1, 2, -1, 4, -1, -1]
    assert tree_parents(next_token, next_sibling) == [-1, -1, 0, 0, 1]
    assert tree_parents([1, 2, 3, -1], [-1] * 4) == [-1, 0, 1]


def test_what_was_drawn_is_recorded_with_the_probability_that_it_was_drawn_with() -> None:
    """Whatever the draft likes best. A token that stands for none has the least probability."""
    traces: list[Trace] = []
    capture = make_capture(traces)
    request = Request([1, 2])
    prefill(capture, [request])
    request.output_ids = [10]
    drawn_from = torch.zeros(1, 2, VOCAB)
    drawn_from[0, 0, [21, 3]] = torch.tensor([0.25, 0.75])
    verify(capture, [request], [2], [[21, 22]], [1], drawn_from=drawn_from)
    end(capture, request)
    settle(capture)
    (trace,) = traces
    check_trace(trace)
    assert trace.header.verification == "target_only"
    assert trace.rounds.draft_logprobs[0].tolist() == pytest.approx([math.log(0.25), math.log(1e-30)], rel=1e-3)


def test_a_trees_logprobs_are_its_nodes_own() -> None:
    traces: list[Trace] = []
    probe = DraftLogprobRecorder(num_slots=4, max_batch=4, max_proposals=3, topk=2, device=torch.device("cpu"))
    capture = make_capture(traces, probe=probe)
    request = Request([1, 2])
    prefill(capture, [request])
    request.output_ids = [10]
    # Candidates' cumulative probabilities: two at the first level, two below the first of them.
    probe.on_tree([torch.tensor([[[0.5, 0.25]]]), torch.tensor([[[0.4, 0.1]]])], torch.tensor([[0, 1, 2]]))
    spec_info = SimpleNamespace(
        draft_token=torch.tensor([10, 21, 22, 23]),
        draft_token_num=4,
        draft_probs=None,
        topk=2,
        retrieve_next_token=torch.tensor([[1, 3, -1, -1]]),
        retrieve_next_sibling=torch.tensor([[-1, 2, -1, -1]]),
    )
    batch = SimpleNamespace(
        reqs=[request], spec_info=spec_info, seq_lens=torch.tensor([2]), req_pool_indices=torch.tensor([0])
    )
    features = torch.arange(4.0)[:, None].repeat(1, WIDTH).bfloat16()
    logits = torch.zeros(4, VOCAB)
    logits[2, 5] = 9.0
    result = SimpleNamespace(
        accept_lens=torch.tensor([2]),
        logits_output=SimpleNamespace(hidden_states=features, next_token_logits=logits),
    )
    capture.after_verify(batch, capture.before_verify(batch), result, torch.tensor([[0, 2, -1]]), 1)
    capture.verified([1])
    request.output_ids += [22, 30]
    end(capture, request)
    settle(capture)
    (trace,) = traces
    check_trace(trace)
    assert trace.rounds.draft_parents.tolist() == [[-1, -1, 0]]
    assert np.exp(trace.rounds.draft_logprobs[0].astype(np.float32)) == pytest.approx([0.5, 0.25, 0.8], rel=1e-3)
    assert trace.rounds.num_accepted.tolist() == [1]
    # Features were compacted by SGLang, logits were not: the second committed row is node 2.
    assert trace.aux_hidden[2:, 0].tolist() == [0, 1]
    assert trace.target_topk_ids[3, 0] == 5


def test_equal_logits_are_in_the_order_of_argmax() -> None:
    ids, logprobs = in_order(torch.tensor([[9, 3, 7]], dtype=torch.int32), torch.tensor([[-1.0, -1.0, -0.5]]))
    assert ids.tolist() == [[7, 3, 9]]
    assert logprobs.tolist() == [[-0.5, -1.0, -1.0]]


@pytest.mark.parametrize("vocab_size", [64, 100, 1024, 1000])
def test_the_likeliest_tokens_are_those_of_a_full_sort(vocab_size: int) -> None:
    """Also where many are equal, as in bfloat16."""
    torch.manual_seed(0)
    logits = (torch.randn(6, vocab_size) * 3).bfloat16()
    top = TopTokens(8, CpuDevice())(logits)
    expected = torch.log_softmax(logits.float(), -1)
    assert torch.equal(top["topk_logprobs"], expected.sort(-1, descending=True).values[:, :8])
    assert torch.equal(expected.gather(-1, top["topk_ids"].long()), top["topk_logprobs"])
    assert all(len(set(row)) == 8 for row in top["topk_ids"].tolist())


class LogSoftmaxes(TorchDispatchMode):
    """Notes how many rows each one takes at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "log_softmax" in str(func):
            self.rows.append(len(args[0]))
        return func(*args, **(kwargs or {}))


def test_of_many_rows_only_some_exist_as_log_probabilities_at_a_time() -> None:
    torch.manual_seed(0)
    logits, whole = torch.randn(1200, 100).bfloat16(), TopTokens(8, CpuDevice())
    with LogSoftmaxes() as seen:
        found = whole(logits)
    assert (sum(seen.rows), max(seen.rows)) == (1200, 512)
    for name, value in found.items():
        assert torch.equal(value, torch.cat([TopTokens(8, CpuDevice())(part)[name] for part in logits.split(400)]))


def test_greedy_is_top_k_1() -> None:
    params = Request([]).sampling_params
    assert sampling_of(params) == SamplingParams(temperature=0.0)
    params.top_k, params.temperature = 1 << 30, 0.5
    assert sampling_of(params) == SamplingParams(temperature=0.5)


def test_policies_of_requests() -> None:
    assert policy_of(None).capture
    assert not policy_of({"slipstream": {"capture": False}}).capture
    assert policy_of({"slipstream": {"tenant": "t"}}).tenant == "t"
    assert policy_of({"slipstream": "nonsense"}).tenant == "default"


@pytest.mark.parametrize(
    ("meant", "own", "refused"), [("a", "b", True), ("a", "a", False), ("", "b", False), ("a", "", False)]
)
def test_a_gateway_of_another_target_is_noticed(meant: str, own: str, refused: bool) -> None:
    assert is_for_another_target({"slipstream": {"target": meant}}, own, lambda: "default") == refused
    assert not is_for_another_target(None, own, lambda: "default"), "it did not come through a gateway"


@pytest.mark.parametrize(
    ("least", "label", "refused"),
    [(3, "2", True), (3, "3", False), (3, "4", False), (3, "default", True), (0, "default", False), (0, "1", False)],
)
def test_weights_that_are_older_than_a_gateway_means_are_noticed(least: int, label: str, refused: bool) -> None:
    marks = {"slipstream": {"target": "a", **({"target_version": least} if least else {})}}
    assert is_for_another_target(marks, "a", lambda: label) == refused


@pytest.mark.parametrize("has_header", [True, False])
@pytest.mark.parametrize("meant", ["own", "another"])
def test_a_server_refuses_what_is_for_another_target_whether_the_header_or_the_body_says_so(
    monkeypatch: pytest.MonkeyPatch, has_header: bool, meant: str
) -> None:
    """A router may lose either."""
    monkeypatch.setattr(hooks, "_target_fingerprint", "own")
    marks = RequestMetadata(rid="r", cache_salt="t", policy={"target": meant})
    body = SimpleNamespace(custom_params=None if has_header else {"slipstream": marks.policy})
    raw_request = SimpleNamespace(headers=marks.to_header() if has_header else {})
    if meant == "own":
        hooks.before_conversion(None, body, raw_request)
        return
    with pytest.raises(HTTPException) as refused:
        hooks.before_conversion(None, body, raw_request)
    assert (refused.value.status_code, refused.value.detail) == (503, OTHER_TARGET)


@pytest.mark.parametrize("meant", ["own", "another"])
def test_a_response_is_marked_by_the_header_alone(monkeypatch: pytest.MonkeyPatch, meant: str) -> None:
    """Its body has no field for what the gateway adds."""
    monkeypatch.setattr(hooks, "_target_fingerprint", "own")
    marks = RequestMetadata(rid="r", cache_salt="t/s", policy={"target": meant, "tenant": "t"})
    # SGLang's reasoning parsers put values of their own there.
    params: dict[str, Any] = {"temperature": 0.5, "custom_params": {"theirs": [7, 8]}}
    generation = SimpleNamespace(rid="resp_r", cache_salt=None, extra_key=None, sampling_params=params)
    raw_request = SimpleNamespace(headers=marks.to_header())
    asked = (None, "resp_r", "prompt", generation, params, object())
    if meant == "own":
        hooks.before_response(*asked, raw_request=raw_request, priority=0)
        assert (generation.rid, generation.cache_salt, generation.extra_key) == ("r", "t/s", None)
        older = SimpleNamespace(rid="resp_r", extra_key=None, sampling_params={})
        attach_metadata_to_generation(older, marks.to_header()[HEADER])
        assert older.extra_key == "t/s"
        assert params == {"temperature": 0.5, "custom_params": {"theirs": [7, 8], "slipstream": marks.policy}}
        return
    with pytest.raises(HTTPException) as refused:
        hooks.before_response(*asked, raw_request=raw_request, priority=0)
    assert (refused.value.status_code, refused.value.detail) == (503, OTHER_TARGET)


def test_a_response_that_came_past_the_gateway_is_left_as_it_is() -> None:
    generation = SimpleNamespace(rid="resp_r", cache_salt=None, sampling_params={})
    hooks.before_response(None, "resp_r", "prompt", generation, {}, object(), SimpleNamespace(headers={}))
    assert generation == SimpleNamespace(rid="resp_r", cache_salt=None, sampling_params={})


def test_a_header_stands_for_what_a_router_lost() -> None:
    marks = RequestMetadata(rid="r", cache_salt="t", policy={"capture": False, "tenant": "t"})
    body = SimpleNamespace(rid=None, cache_salt=None, custom_params={"mine": 1})
    attach_metadata(body, marks.to_header()[HEADER])
    assert (body.rid, body.cache_salt) == ("r", "t")
    assert body.custom_params == {"mine": 1, "slipstream": marks.policy}
    with pytest.raises(ValueError, match=r".+"):
        attach_metadata(body, "{}")


@pytest.mark.parametrize(("captures_unmarked", "params"), [(True, None), (False, {"slipstream": {"tenant": "t"}})])
def test_an_unmarked_request_is_captured_where_the_operator_says_so(captures_unmarked: bool, params: Any) -> None:
    capture = make_capture([], capture_unmarked=captures_unmarked)
    assert capture.open_span(Request([1, 2], custom_params=params)) is not None
    assert not capture.refused
    strict = make_capture([], capture_unmarked=False)
    assert strict.open_span(Request([1, 2], custom_params={"mine": 1})) is None
    assert strict.refused == {"unmarked": 1}
    strict.open_span(Request([1, 2], custom_params={"slipstream": {"capture": False}}))
    assert strict.refused == {"unmarked": 1}, "an opt-out is no loss"


@pytest.mark.parametrize("captures_unmarked", [True, False])
def test_a_health_check_is_no_request_that_could_be_captured(captures_unmarked: bool) -> None:
    capture = make_capture([], capture_unmarked=captures_unmarked)
    assert capture.open_span(Request([0], rid="HEALTH_CHECK_1b2c")) is None
    assert not capture.refused


@pytest.mark.parametrize("ids", [[-1], [8], [1, 2**40]])
def test_tokens_that_the_target_lacks_are_refused_before_they_end_the_scheduler(ids: list[int]) -> None:
    """Also those of rollouts, which another engine would be given next."""
    manager = SimpleNamespace(model_config=SimpleNamespace(vocab_size=8))
    with pytest.raises(ValueError, match="token ids must lie in 0…7"):
        hooks.check_request(manager, SimpleNamespace(input_ids=ids, top_logprobs_num=0), ids)
    for taken in (None, [], [0, 7]):
        hooks.check_request(manager, SimpleNamespace(input_ids=taken, top_logprobs_num=8), [0])
        # A request for an embedding.
        hooks.check_request(manager, SimpleNamespace(input_ids=taken), [0])
    with pytest.raises(ValueError, match="at most 8 logprobs"):
        hooks.check_request(manager, SimpleNamespace(input_ids=None, top_logprobs_num=9), [0])


@pytest.mark.parametrize("ids", [[-1], [7, 8], [10**9]])
def test_stop_tokens_that_the_target_lacks_are_refused_before_they_end_the_scheduler(ids: list[int]) -> None:
    """With `min_tokens` it looks them up in a table of the target's tokens."""
    manager = SimpleNamespace(model_config=SimpleNamespace(vocab_size=8))
    with pytest.raises(ValueError, match="stop_token_ids must lie in 0…7"):
        hooks.check_request(manager, SimpleNamespace(input_ids=[0], sampling_params={"stop_token_ids": ids}), [0])
    for taken in ({}, None, {"stop_token_ids": None}, {"stop_token_ids": []}, {"stop_token_ids": [0, None, 7]}):
        hooks.check_request(manager, SimpleNamespace(input_ids=[0], sampling_params=taken), [0])


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"top_k": 2**31}, "top_k"),
        ({"temperature": 1e31}, "temperature"),
        ({"repetition_penalty": 1e-42}, "repetition_penalty"),
        ({"logit_bias": {"1": 0.5, "2": -1e39}}, "logit_bias"),
        ({"logit_bias": {"1": float("nan")}}, "logit_bias"),
        ({"min_new_tokens": 1, "regex": "a"}, "min_tokens"),
        ({"min_new_tokens": 1, "stop_token_ids": list(range(8))}, "min_tokens"),
    ],
)
def test_what_may_leave_no_probabilities_is_refused_before_it_ends_the_scheduler(
    params: dict[str, Any], name: str
) -> None:
    manager = SimpleNamespace(model_config=SimpleNamespace(vocab_size=8))
    with pytest.raises(ValueError, match=name):
        hooks.check_request(manager, SimpleNamespace(input_ids=[0], sampling_params=params), [0])
    plain = {"top_k": -1, "temperature": None, "repetition_penalty": 1.0, "logit_bias": {"1": -100}, "regex": "a"}
    for taken in (plain | {"min_new_tokens": 0}, {"min_new_tokens": 3, "regex": None, "stop_token_ids": [1]}):
        hooks.check_request(manager, SimpleNamespace(input_ids=[0], sampling_params=taken), [0])


class _Params(msgspec.Struct, kw_only=True, array_like=True):
    stop: str | None = None
    spaces: bool = True


class _Message(msgspec.Struct, tag=True, kw_only=True, array_like=True):
    input_ids: list[int] | None
    params: _Params = msgspec.field(default_factory=_Params)
    priority: int | None = None


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"priority": 2**64}, "64 bits"),
        ({"priority": "high"}, "^priority: Expected `int | null`, got `str`$"),
        ({"params": {"spaces": []}}, r"^params\.spaces: Expected `bool`, got `array`$"),
        ({"params": {"other": "x"}}, "Unexpected keyword argument 'other'"),
    ],
)
def test_what_the_scheduler_could_not_read_is_refused(
    fields: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stand-ins for SGLang's structs; `tests/sglang/test_messages.py` has its own."""

    def decode(data: bytes) -> _Message:
        return msgspec.msgpack.decode(data, type=_Message)

    io_struct = SimpleNamespace(msgpack_encode=msgspec.msgpack.encode, msgpack_decode=decode)
    for name, module in (("sglang", {}), ("sglang.srt", {}), ("sglang.srt.managers", {"io_struct": io_struct})):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(module)

    def make(params: dict[str, Any], **fields: Any) -> _Message:
        return _Message(input_ids=[1], params=_Params(**params), **fields)

    made = hooks.around_message(make, {"stop": "a"}, priority=-(2**63))
    assert (made.input_ids, made.params.stop) == ([1], "a")
    with pytest.raises(ValueError, match=why):
        hooks.around_message(make, **({"params": {}} | fields))


def test_a_grammar_that_lets_no_token_through_does_not_end_the_scheduler() -> None:
    grammar = SimpleNamespace(accepted_tokens=[3], vocab_size=70)
    mask = torch.zeros(3, 3, dtype=torch.int32)
    mask[0, 1] = 6
    for row in (0, 1):
        hooks.after_grammar_mask(None, grammar, mask, row)
    assert mask[0].tolist() == [0, 6, 0], "it lets some through"
    assert mask[2].tolist() == [0, 0, 0], "it was not asked"
    bits = [bit for word in mask[1].tolist() for bit in f"{word & 0xFFFFFFFF:032b}"]
    assert bits.count("1") == 1
    other = torch.zeros(1, 3, dtype=torch.int32)
    hooks.after_grammar_mask(None, grammar, other, 0)
    assert torch.equal(other[0], mask[1]), "as on another rank"

"""Rows behind rejections in traces of the local engine: as the target computes them, bounded, and cut with the text."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry
from transformers import AutoModelForCausalLM

from serving.capture.sampling import BRANCH_ROOM
from serving.engine import CapturePolicy, GenerateRequest
from serving.local.capture import LocalCapture
from serving.local.config import LocalEngineConfig
from serving.local.request import ActiveRequest, RoundRecord, TopK
from serving.metrics import EngineMetrics
from speculator.draft.eagle3 import aux_layer_ids
from speculator.draft.sampling_params import SamplingParams
from speculator.proposals.draft_tree import DraftTree
from speculator.trace import NO_DRAFT, BranchRows, Trace, check_trace, decode_trace, encode_trace
from tests.fixtures.decoding import WholeTrees
from tests.fixtures.waiting import wait_until
from tests.serving.local.harness import GREEDY, Harness, fixed_engine

PROMPTS = ("one question", "and another one", "a third")
ALL = 1.0


def rows_in(harness: Harness, outcome: str) -> float:
    return harness.metric("slipstream_capture_branch_rows_total", outcome=outcome)


def asked(harness: Harness, *, times: int = 1, sampling: SamplingParams = GREEDY) -> list[Trace]:
    for seed in range(times):
        harness.ask(*(harness.request(one, sampling=sampling, seed=seed, max_tokens=48) for one in PROMPTS))
    wait_until(lambda: len(harness.traces) == times * len(PROMPTS))
    return harness.traces


def check_rows(model_dir: Path, prompts: dict[str, list[int]], traces: Iterable[Trace]) -> int:
    """Each against the target's own pass over the text up to the rejected proposal; how many there were."""
    model, count = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64), 0
    for trace in traces:
        check_trace(trace)
        rows, rounds = trace.branches, trace.rounds
        if rows is None:
            continue
        answer = trace.token_ids[trace.header.num_prompt_tokens - trace.header.first_position :].tolist()
        text = [*prompts[trace.header.request_id], *answer]
        for row in range(len(rows)):
            round_, node = int(rows.round[row]), int(rows.node[row])
            path = []
            while node >= 0:
                path.insert(0, int(rounds.draft_tokens[round_, node]))
                node = int(rounds.draft_parents[round_, node])
            tokens = [*text[: rounds.position[round_] + 1], *path]
            with torch.no_grad():
                out = model(torch.tensor([tokens]), output_hidden_states=True)
            features = torch.cat([out.hidden_states[layer][0, -1] for layer in aux_layer_ids(8)])
            torch.testing.assert_close(rows.hidden[row], features.bfloat16())
            expected = out.logits[0, -1].log_softmax(-1).topk(8)
            assert rows.topk_ids[row].tolist() == expected.indices.tolist()
            np.testing.assert_allclose(rows.topk_logprobs[row], expected.values.numpy(), rtol=2e-3, atol=2e-3)
            count += 1
    return count


def test_kept_rows_are_what_the_target_computes_after_the_rejected_text(model_dir: Path) -> None:
    """Of chains of the head: the first rejected proposal, and those behind it."""
    with fixed_engine(model_dir, branch_share=ALL) as harness:
        traces = asked(harness)
        prompts = {one: harness.engine.tokenizer.encode(one) for one in PROMPTS}
        count = rows_in(harness, "kept")
    assert check_rows(model_dir, prompts, traces) == count > 20
    rows = [trace.branches for trace in traces if trace.branches is not None]
    assert any((np.diff(of.round) == 0).any() for of in rows), "none behind another rejected one"
    assert all((trace.rounds.draft_version == 1).all() for trace in traces)
    again = decode_trace(encode_trace(traces[0]))
    assert again.branches is not None
    np.testing.assert_array_equal(again.branches.topk_ids, rows[0].topk_ids)


def test_so_are_those_of_trees_that_earlier_text_proposes(model_dir: Path) -> None:
    with fixed_engine(model_dir, planner=WholeTrees(), suffix_depth=8, branch_share=ALL) as harness:
        traces = asked(harness, times=3, sampling=SamplingParams(temperature=1.0))
        prompts = {one: harness.engine.tokenizer.encode(one) for one in PROMPTS}
    kept = [trace for trace in traces if trace.branches is not None]
    assert any((trace.rounds.draft_version[trace.branches.round] == NO_DRAFT).any() for trace in kept if trace.branches)
    assert check_rows(model_dir, prompts, kept) > 10


def test_they_are_bounded_and_what_had_no_room_is_counted(model_dir: Path) -> None:
    with fixed_engine(model_dir, branch_share=ALL) as harness:
        traces = asked(harness, times=2)
        kept, over = rows_in(harness, "kept"), rows_in(harness, "budget")
    num_committed = sum(trace.num_completion_tokens for trace in traces)
    num_rejected = sum(
        int((trace.rounds.draft_tokens >= 0).sum() - trace.rounds.num_accepted.sum()) for trace in traces
    )
    assert 0.15 * num_committed < kept <= BRANCH_ROOM * (num_committed + len(traces))
    assert kept == sum(trace.num_branches for trace in traces)
    assert kept + over == num_rejected


@pytest.mark.parametrize("share", [0.0, 0.05])
def test_a_share_of_the_rejected_proposals_is_kept(model_dir: Path, share: float) -> None:
    with fixed_engine(model_dir, branch_share=share) as harness:
        traces = asked(harness, times=8)
        over = rows_in(harness, "budget")
    num_rejected = sum(
        int((trace.rounds.draft_tokens >= 0).sum() - trace.rounds.num_accepted.sum()) for trace in traces
    )
    num_kept = sum(trace.num_branches for trace in traces)
    assert num_rejected > 1000
    assert share * 0.5 <= num_kept / num_rejected
    assert (num_kept + over) / num_rejected <= share * 1.5


def test_a_request_that_opted_out_leaves_none_and_makes_no_room(model_dir: Path) -> None:
    with fixed_engine(model_dir, branch_share=ALL) as harness:
        private = CapturePolicy(capture=False)
        harness.ask(*(harness.request(one, policy=private, max_tokens=48) for one in PROMPTS))
        harness.ask(harness.request("public", max_tokens=2))
        wait_until(lambda: harness.traces)
        (trace,) = harness.traces
        assert (trace.header.request_id, trace.branches) == ("public", None)
        assert rows_in(harness, "kept") == 0


@pytest.mark.parametrize(("num_taken", "kept", "num_cut"), [(4, [0, 0, 1], 0), (3, [0, 0], 1), (2, [0, 0], 1)])
def test_what_the_end_of_an_answer_cuts_off_takes_its_rows_along(num_taken: int, kept: list[int], num_cut: int) -> None:
    """A round with a rejected proposal, and one that commits three tokens, of which an end token takes some away."""
    registry, traces = CollectorRegistry(), list[Trace]()
    target: Any = None
    config = LocalEngineConfig(model_dir=Path(), model_name="toy")
    metrics = EngineMetrics(registry)
    capture = LocalCapture(config, target, traces.append, target_fingerprint="f" * 64, metrics=metrics)
    request = GenerateRequest(
        request_id="r", prompt_token_ids=(1, 2), max_tokens=9, sampling=SamplingParams(temperature=0.0)
    )
    text: Any = None
    generation = ActiveRequest(request, text, lambda _: None, frozenset(), capture=True)
    generation.tokens += [10, 11, 12, 13, 14][: 1 + num_taken]

    def rows(round_: int, nodes: list[int]) -> BranchRows:
        return BranchRows(
            round=np.full(len(nodes), round_, np.int32),
            node=np.array(nodes, np.int8),
            topk_ids=np.ones((len(nodes), 4), np.int32),
            topk_logprobs=np.zeros((len(nodes), 4), np.float16),
            hidden=torch.ones(len(nodes), 6).bfloat16(),
        )

    first, second = DraftTree.chain([9, 8], [0.5, 0.5]), DraftTree.chain([12, 13, 7], [0.5] * 3)
    generation.rounds = [RoundRecord(2, first, 0, 1), RoundRecord(3, second, 2, 1)]
    generation.rejected = [rows(0, [0, 1]), rows(1, [2])]
    generation.topk = [TopK(1, np.ones((1, 4), np.int32), np.zeros((1, 4), np.float16))]
    capture.start()
    capture.hand_over(generation, lambda start, end: torch.ones(end - start, 6).bfloat16(), target_version=0)
    capture.close()
    (trace,) = traces
    check_trace(trace)
    assert trace.branches is not None
    assert trace.branches.round.tolist() == kept
    name = "slipstream_capture_branch_rows_total"
    assert registry.get_sample_value(name, {"outcome": "cut"}) == num_cut
    assert registry.get_sample_value(name, {"outcome": "kept"}) == len(kept)

"""Text in the place of the head's proposals: which rows get it, from which place on, and what that costs the host."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from serving.sglang.device import CpuDevice, Device
from serving.sglang.proposals.remembered_text import Continuations, RememberedText, ring_size
from serving.sglang.proposals.splice import CommittedTokens, TextSplice
from speculator.proposals.length_planner import LengthPlan
from tests.serving.sglang.harness import VOCAB, Request
from tests.serving.sglang.slow_device import NoWaiting, SlowDevice

DEPTH, WINDOW = 3, 7
NEWEST, HEADS = 9, [20, 21, 22]


class Mode:
    def is_idle(self) -> bool:
        return False


def text_of(*rows: list[int], first: list[int]) -> Continuations:
    tokens, probabilities = np.zeros((len(rows), WINDOW), np.int32), np.zeros((len(rows), WINDOW))
    for row, found in enumerate(rows):
        tokens[row, : len(found)], probabilities[row, : len(found)] = found, 0.5
    counts = np.array([len(row) for row in rows])
    return Continuations(tokens, probabilities, counts, np.array(first), np.zeros_like(counts), [])


def make_splice(*, overlaps: bool = False, device: Device | None = None) -> TextSplice:
    committed = CommittedTokens(4, ring_size(WINDOW), torch.device("cpu")) if overlaps else None
    return TextSplice(device or CpuDevice(), width=WINDOW, committed=committed)


def plan_of(*from_text: bool, num_proposals: int = DEPTH, uses_head: bool = True) -> LengthPlan:
    return LengthPlan(
        batch=len(from_text), num_proposals=num_proposals, uses_head=uses_head, from_text=tuple(from_text)
    )


def verification(num_requests: int, num_proposals: int = DEPTH, **changes: Any) -> Any:
    rows = [[NEWEST, *HEADS[:num_proposals]]] * num_requests
    values = {"draft_token": torch.tensor(rows).flatten(), "draft_token_num": 1 + num_proposals, "draft_probs": None}
    return SimpleNamespace(**values | changes)


def batch_of(seq_lens: list[int]) -> Any:
    slots = torch.arange(len(seq_lens))
    return SimpleNamespace(seq_lens=torch.tensor(seq_lens), req_pool_indices=slots, forward_mode=Mode())


def spliced(splice: TextSplice, seq_lens: list[int], num_proposals: int = DEPTH) -> list[list[int]]:
    """The proposals of each request."""
    asked = verification(len(seq_lens), num_proposals)
    splice.splice(asked, batch_of(seq_lens))
    rows: list[list[int]] = asked.draft_token.view(len(seq_lens), -1).tolist()
    assert [row[0] for row in rows] == [NEWEST] * len(seq_lens)
    return [row[1:] for row in rows]


def test_rows_that_were_chosen_get_their_text_and_the_others_keep_the_heads_chain() -> None:
    splice = make_splice()
    splice.stage(plan_of(True, False, True), text_of([1, 2, 3], [4, 5, 6], [7], first=[11, 12, 13]))
    assert spliced(splice, [10, 11, 12]) == [[1, 2, 3], HEADS, [7, *HEADS[1:]]]
    assert splice.rows is not None
    assert splice.rows.is_text.tolist() == [True, False, True]
    assert splice.rows.num_proposals().tolist() == [3, 3, 1]
    assert splice.rows.logprobs[0].exp().tolist() == pytest.approx([0.5] * 3)
    splice.stage(plan_of(False, False), None)
    assert spliced(splice, [13, 14]) == [HEADS, HEADS]
    assert splice.rows is None


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_heads_chains_may_be_longer_than_text(overlaps: bool) -> None:
    heads, prompt = list(range(30, 39)), list(range(100, 140))
    text = RememberedText(depth=2, width=len(heads), overlaps=False, captures_unmarked=True)
    committed = CommittedTokens(1, ring_size(text.width), torch.device("cpu")) if overlaps else None
    splice = TextSplice(CpuDevice(), width=text.width, committed=committed)
    request = Request([*prompt, 5], max_new_tokens=64)
    request.output_ids += prompt[:16]
    splice.committed(torch.tensor([0]), torch.tensor([41]), torch.tensor(prompt[:16]))
    splice.stage(plan_of(True, num_proposals=len(heads)), text.find([request]))
    asked = verification(1, len(heads), draft_token=torch.tensor([115, *heads]))
    splice.splice(asked, batch_of([41 + 15]))
    assert asked.draft_token.tolist() == [115, 116, 117, *heads[2:]]
    splice.committed(torch.tensor([0]), torch.tensor([56]), asked.draft_token, ahead=1)


def follow_an_answer(splice: TextSplice, answer: list[int], found: list[int], prompt: int, counts: list[int]) -> None:
    """A host that is one step behind finds `found`; a step commits so many tokens of the answer each."""
    splice.committed(torch.tensor([0]), torch.tensor([prompt]), torch.tensor(answer[:1]))
    known, length = 0, prompt  # tokens of the answer that the host knows, and those behind which the newest stands
    for count in counts:
        window = found[known : known + WINDOW]
        splice.stage(plan_of(True), text_of(window, first=[prompt + known]))
        newest = length - prompt
        expected = HEADS
        if found[known : newest + 1] == answer[known : newest + 1] and len(window) > newest + 1 - known:
            behind = window[newest + 1 - known :][:DEPTH]
            expected = [*behind, *HEADS[len(behind) :]]
        assert spliced(splice, [length]) == [expected]
        # SGLang's own rows: what was committed, and what was not.
        tokens = [*answer[newest + 1 : newest + 1 + count], *[VOCAB] * (1 + DEPTH - count)]
        splice.committed(torch.tensor([0]), torch.tensor([length]), torch.tensor(tokens), ahead=1)
        known, length = newest + 1, length + count


def test_a_host_that_is_a_step_behind_is_followed_where_its_text_comes_true() -> None:
    dice = random.Random(0)
    for _ in range(50):
        answer = [dice.randrange(5) for _ in range(80)]
        # Wrong here and there.
        found = [token if dice.random() < 0.9 else dice.randrange(5) for token in answer]
        splice = make_splice(overlaps=True)
        for slot_used_again in range(2):
            counts = [dice.randint(1, 1 + DEPTH) for _ in range(18)]
            follow_an_answer(splice, answer, found, prompt=5 + 31 * slot_used_again, counts=counts)


def test_nothing_waits_for_the_device_and_one_table_crosses_the_bus() -> None:
    watched = NoWaiting()
    uploads: list[np.ndarray] = []

    class Counting(SlowDevice):
        def upload_table(self, numbers: np.ndarray) -> torch.Tensor:
            uploads.append(numbers)
            table = torch.from_numpy(numbers)
            watched.place(table)
            return table

    splice = make_splice(overlaps=True, device=Counting(watched))
    asked, batch = verification(2, draft_probs=torch.full((2, DEPTH, VOCAB), 1 / VOCAB)), batch_of([10, 10])
    sampled = torch.tensor([[3, 0, 0, 0]] * 2)
    watched.place(asked, batch, sampled, vars(splice._committed))
    with watched:
        splice.committed(batch.req_pool_indices, batch.seq_lens, sampled[:, :1])
        splice.stage(plan_of(True, True), text_of([3, 1, 2], [4, 1, 2], first=[10, 10]))
        splice.splice(asked, batch)
        splice.committed(batch.req_pool_indices, batch.seq_lens, sampled.flatten(), ahead=1)
    assert watched.num_operators > 20
    assert len(uploads) == 1
    assert asked.draft_token.view(2, -1)[:, 1:3].tolist() == [[1, 2], HEADS[:2]]


def test_text_is_certain_where_proposals_are_drawn() -> None:
    splice = make_splice()
    drawn_from = torch.rand(2, DEPTH, VOCAB).softmax(-1)
    asked = verification(2, draft_probs=drawn_from.clone())
    splice.stage(plan_of(True, False), text_of([1, 2], [], first=[11, 12]))
    splice.splice(asked, batch_of([10, 11]))
    certain = torch.zeros(2, VOCAB)
    certain[0, 1] = certain[1, 2] = 1
    assert torch.equal(asked.draft_probs[0, :2], certain)
    assert torch.equal(asked.draft_probs[0, 2], drawn_from[0, 2])
    assert torch.equal(asked.draft_probs[1], drawn_from[1])


class Drafting:
    """SGLang's draft, as far as it is asked."""

    def __init__(self, *, reduced: bool) -> None:
        self.cuda_graph_runner: Any = "of SGLang"
        self.draft_attn_backend: Any = "of SGLang"
        self.speculative_num_steps = 5
        self.hot_token_id = torch.tensor([7, 8, 9]) if reduced else None

    def draft(self, passes: Callable[[], Any], splice: TextSplice, spec_info: Any) -> Any:
        assert self.cuda_graph_runner is None
        self.draft_attn_backend.init_forward_metadata(None)
        forward_batch = SimpleNamespace(
            spec_info=spec_info, forward_mode=Mode(), sampling_info=SimpleNamespace(is_all_greedy=False)
        )
        return splice.around_passes(passes, self, forward_batch)


@pytest.mark.parametrize("reduced", [False, True])
def test_passes_that_nobody_needs_are_left_out(reduced: bool) -> None:
    def passes() -> Any:
        raise AssertionError("the head was asked")

    splice, draft = make_splice(), Drafting(reduced=reduced)
    splice.leaves_out_passes = True
    spec_info = SimpleNamespace(topk_index=torch.tensor([[2], [0]]), draft_probs=torch.rand(2, VOCAB))
    parents, nodes, tokens, probs = splice.around_draft(lambda: draft.draft(passes, splice, spec_info), draft)
    assert draft.cuda_graph_runner == draft.draft_attn_backend == "of SGLang"
    assert (parents.tolist(), nodes.tolist()) == ([[-1, 0, 1, 2, 3]] * 2, [[0, 1, 2, 3, 4]] * 2)
    assert tokens[:, 0].tolist() == ([9, 7] if reduced else [2, 0])
    assert torch.equal(probs[:, 0], spec_info.draft_probs)
    assert not probs[:, 1:].any()


def test_what_fills_a_row_without_passes_is_nobodys() -> None:
    splice = make_splice()
    splice.leaves_out_passes = True
    splice.stage(plan_of(True, False, uses_head=False), text_of([1, 2], [], first=[11, 12]))
    spliced(splice, [10, 11])
    assert splice.rows is not None
    assert splice.rows.num_proposals().tolist() == [2, 1]


def test_what_fills_rows_without_passes_is_nobodys_where_no_row_has_text() -> None:
    splice = make_splice()
    splice.leaves_out_passes = True
    splice.stage(plan_of(False, False, uses_head=False), text_of([1], [2], first=[11, 12]))
    assert spliced(splice, [10, 11]) == [HEADS, HEADS]
    assert splice.rows is not None
    assert splice.rows.is_text.tolist() == [False, False]
    assert splice.rows.num_proposals().tolist() == [1, 1]

"""The draft's log-probabilities, caught pass by pass."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from serving.sglang.capture.device_reads import DraftLogprobRecorder


def output(*rows: list[float]) -> SimpleNamespace:
    return SimpleNamespace(next_token_logits=torch.tensor(rows))


def best(row: list[float]) -> float:
    return float(torch.tensor(row).log_softmax(-1).max())


def test_a_chain_of_three_for_two_requests_in_other_slots() -> None:
    probe = DraftLogprobRecorder(num_slots=8, max_batch=4, max_proposals=3, topk=1, device=torch.device("cpu"))
    slots = torch.tensor([5, 2])
    first = [[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    second = [[0.0, 3.0, 0.0], [0.5, 0.0, 0.0]]
    third = [[1.0, 1.0, 1.0], [0.0, 0.0, 4.0]]
    probe.on_forward(output(*first))  # the catch-up pass of the step before
    probe.on_extend(slots)

    def draft() -> str:
        probe.on_forward(output(*second))
        probe.on_forward(output(*third))
        return "drafted"

    assert probe.around_draft(draft) == "drafted"
    expected = [[best(rows[request]) for rows in (first, second, third)] for request in range(2)]
    assert probe.logprobs(slots, 3).tolist() == [pytest.approx(row, abs=1e-5) for row in expected]
    # In the next round the order of the batch may be another.
    assert probe.logprobs(slots.flip(0), 1).flatten().tolist() == pytest.approx(
        [expected[1][0], expected[0][0]], abs=1e-5
    )


def test_catch_up_logits_that_sglang_reduced_to_the_last_rows() -> None:
    probe = DraftLogprobRecorder(num_slots=4, max_batch=4, max_proposals=1, topk=1, device=torch.device("cpu"))
    seen = output([0.0, 0.0], [9.0, 0.0], [0.0, 1.0])
    probe.on_forward(seen)
    seen.next_token_logits = seen.next_token_logits[2:]  # what SGLang does with the object between the two calls
    probe.on_extend(torch.tensor([3]))
    assert probe.logprobs(torch.tensor([3]), 1).item() == pytest.approx(best([0.0, 1.0]), abs=1e-5)


def test_a_failed_drafting_does_not_confuse_the_next() -> None:
    probe = DraftLogprobRecorder(num_slots=4, max_batch=4, max_proposals=2, topk=1, device=torch.device("cpu"))

    def fail() -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        probe.around_draft(fail)
    probe.on_forward(output([1.0, 0.0]))
    probe.on_extend(torch.tensor([0]))
    probe.around_draft(lambda: probe.on_forward(output([3.0, 0.0])))
    assert probe.logprobs(torch.tensor([0]), 2).flatten().tolist() == pytest.approx(
        [best([1.0, 0.0]), best([3.0, 0.0])]
    )

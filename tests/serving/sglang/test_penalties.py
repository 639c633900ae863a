"""Which requests of a step commit one token alone, and that cutting the others' neighbours off waits for no device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from serving.sglang.penalties import commit_one, penalised
from tests.serving.sglang.harness import Request
from tests.serving.sglang.slow_device import NoWaiting, SlowDevice


def batch_of(*requests: Request, has_penalties: bool = True) -> Any:
    penalties = torch.zeros(len(requests), 8) if has_penalties else None
    return SimpleNamespace(reqs=list(requests), sampling_info=SimpleNamespace(acc_additive_penalties=penalties))


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, False),
        ({"logit_bias": {"1": 5.0}, "min_p": 0.1}, False),
        ({"frequency_penalty": 0.5}, True),
        ({"presence_penalty": -0.5}, True),
        ({"repetition_penalty": 1.1}, True),
    ],
)
def test_what_changes_with_every_token_takes_no_proposals(params: dict[str, Any], expected: bool) -> None:
    assert penalised(batch_of(Request([1]), Request([1], **params))) == (False, expected)
    assert penalised(batch_of(Request([1]), has_penalties=False)) == ()


def test_the_end_is_forbidden_until_sglang_has_counted_the_least_tokens() -> None:
    request, found = Request([1], min_new_tokens=3), []
    for request.decode_batch_idx in range(1, 6):
        found += penalised(batch_of(request))
    assert found == [True, True, False, False, False]


def test_these_commit_their_first_token_and_the_device_goes_on() -> None:
    lens = torch.tensor([3, 2, 1, 3], dtype=torch.int32)
    index = torch.tensor([[0, 1, 2], [3, 4, -1], [6, -1, -1], [9, 10, 11]], dtype=torch.int32)
    watched = NoWaiting()
    watched.place(lens, index)
    with watched:
        commit_one(SlowDevice(watched), (True, False, True, False), lens, index)
    assert watched.num_operators
    assert lens.tolist() == [1, 2, 1, 3]
    assert index.tolist() == [[0, -1, -1], [3, 4, -1], [6, -1, -1], [9, 10, 11]]

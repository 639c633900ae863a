"""Matrices are multiplied in bfloat16 where that is wanted and the CPU has it; drafts share their rotary tables."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from speculator.draft.eagle3 import RotaryEmbedding, autocast, is_fast
from tests.fixtures.drafts import CONFIG

CPU = torch.device("cpu")


@pytest.mark.parametrize("is_wanted", [True, False])
def test_matrices_are_multiplied_in_bfloat16_where_that_is_wanted_and_fast(is_wanted: bool) -> None:
    x = torch.eye(4)
    with autocast(CPU, is_wanted=is_wanted):
        product = x @ x
    assert product.dtype == (torch.bfloat16 if is_fast(CPU) and is_wanted else torch.float32)
    assert torch.equal(product.float(), x)
    assert is_fast(torch.device("cuda"))


def test_the_rotary_tables_of_a_process_are_made_once_and_can_be_trained_with() -> None:
    with torch.inference_mode():
        first = RotaryEmbedding(replace(CONFIG, rope_theta=77.0))
    second, other = (RotaryEmbedding(replace(CONFIG, rope_theta=theta)) for theta in (77.0, 78.0))
    assert second.cos.data_ptr() == first.cos.data_ptr()
    assert not torch.equal(other.cos, second.cos)
    x = torch.ones(1, 1, 1, CONFIG.head_dim, requires_grad=True)
    first(x, torch.tensor([[3]])).sum().backward()
    assert x.grad is not None
    # Another type is a copy, and leaves the shared tables as they are.
    assert first.double().cos.dtype == torch.float64
    assert second.cos.dtype == torch.float32

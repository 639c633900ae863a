"""Matrices are multiplied in bfloat16 where that is wanted and the CPU has it."""

from __future__ import annotations

import pytest
import torch

from speculator.draft.eagle3 import autocast, is_fast

CPU = torch.device("cpu")


@pytest.mark.parametrize("is_wanted", [True, False])
def test_matrices_are_multiplied_in_bfloat16_where_that_is_wanted_and_fast(is_wanted: bool) -> None:
    x = torch.eye(4)
    with autocast(CPU, is_wanted=is_wanted):
        product = x @ x
    assert product.dtype == (torch.bfloat16 if is_fast(CPU) and is_wanted else torch.float32)
    assert torch.equal(product.float(), x)
    assert is_fast(torch.device("cuda"))

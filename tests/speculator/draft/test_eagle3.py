"""Matrices are multiplied in bfloat16 where that is wanted and the CPU has it."""

from __future__ import annotations

import pytest
import torch

from speculator.draft.eagle3 import autocast, is_fast

CPU = torch.device("cpu")


@pytest.mark.parametrize(("has_it", "is_wanted"), [(True, True), (True, False), (False, True)])
def test_a_cpu_without_it_multiplies_in_float32(has_it: bool, is_wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.ops.mkldnn._is_mkldnn_bf16_supported", lambda: has_it)
    x = torch.eye(4)
    with autocast(CPU, is_wanted=is_wanted):
        product = x @ x
    assert product.dtype == (torch.bfloat16 if has_it and is_wanted else torch.float32)
    assert torch.equal(product.float(), x)


def test_a_pytorch_without_onednn_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.ops.mkldnn._is_mkldnn_bf16_supported", None)
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: False)
    assert not is_fast(CPU)
    assert is_fast(torch.device("cuda"))

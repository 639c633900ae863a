"""The likeliest tokens by the library are those by PyTorch, of any vocabulary, whatever is equal or no number."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from torch import Tensor

from serving.local.kernels.build import AVX2, AVX512, available, compile_library, find_compiler, kernel_folder
from serving.local.kernels.library import Kernels
from serving.local.target.model import Ranking

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++: make system-packages installs it"),
    pytest.mark.skipif(not available(), reason="a CPU without AVX2, or with AMX"),
]
needs_avx512 = pytest.mark.skipif(AVX512 not in available(), reason="a CPU without AVX-512")
PYTORCH = Ranking(None)


@pytest.fixture(scope="module", params=[pytest.param(AVX512, marks=needs_avx512), AVX2], ids=["avx512", "avx2"])
def ranking(request: pytest.FixtureRequest) -> Ranking:
    return Ranking(Kernels(compile_library(find_compiler(), kernel_folder(), request.param)))


def _logits(num_rows: int, vocab: int) -> Tensor:
    """Eight bits of precision: many are equal."""
    return (3 * torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(vocab))).bfloat16()


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 100, 1024, 4111, 49152])
def test_the_first_of_the_largest(ranking: Ranking, vocab: int) -> None:
    logits_MV = _logits(5, vocab)
    assert ranking.likeliest(logits_MV) == np.argmax(logits_MV.float().numpy(), 1).tolist()
    assert ranking.likeliest(torch.zeros(2, vocab).bfloat16()) == [0, 0]
    assert ranking.likeliest(-logits_MV.abs()) == np.argmax(-logits_MV.abs().float().numpy(), 1).tolist()


@pytest.mark.parametrize("vocab", [17, 100, 4111, 49152])
@pytest.mark.parametrize("num_kept", [1, 13, 64])
def test_the_distribution_as_far_as_it_is_kept(ranking: Ranking, vocab: int, num_kept: int) -> None:
    logits_MV, num_kept = _logits(3, vocab), min(num_kept, vocab)
    ids, logprobs = ranking.top(logits_MV, num_kept)
    assert (ids.dtype, logprobs.dtype, ids.shape) == (np.int32, np.float16, (3, num_kept))
    np.testing.assert_allclose(logprobs, PYTORCH.top(logits_MV, num_kept)[1], rtol=1e-3)
    # Of equal ones the first, in their order; which PyTorch takes is not told.
    expected = np.argsort(-logits_MV.float().numpy(), 1, kind="stable")[:, :num_kept]
    assert np.array_equal(ids, expected)


def test_all_are_kept_where_all_are_asked_for(ranking: Ranking) -> None:
    ids, logprobs = ranking.top(_logits(2, 33), 33)
    assert [sorted(row) for row in ids.tolist()] == [list(range(33))] * 2
    np.testing.assert_allclose(np.exp(logprobs.astype(float)).sum(1), 1, atol=1e-2)


def test_tokens_that_are_ruled_out_come_last(ranking: Ranking) -> None:
    logits_MV = torch.full((1, 5000), -torch.inf).bfloat16()
    logits_MV[0, 4999], logits_MV[0, 7] = 1.0, 1.0
    ids, logprobs = ranking.top(logits_MV, 3)
    assert ids.tolist() == [[7, 4999, 0]]
    assert logprobs.astype(float).tolist() == [[pytest.approx(-0.6931, abs=1e-3)] * 2 + [-np.inf]]


@pytest.mark.parametrize("nan", [torch.nan, -torch.nan])
def test_what_is_no_number_is_not_hidden(ranking: Ranking, nan: float) -> None:
    logits_MV = _logits(1, 300)
    logits_MV[0, 123] = nan
    assert np.isnan(ranking.top(logits_MV, 8)[1]).all()
    assert 0 <= ranking.likeliest(logits_MV.fill_(nan))[0] < 300


def test_equal_rows_have_equal_distributions_whatever_is_beside_them(ranking: Ranking) -> None:
    logits_MV = _logits(9, 4111)
    together, alone = ranking.top(logits_MV, 20), [ranking.top(row[None], 20) for row in logits_MV]
    for row, (ids, logprobs) in enumerate(alone):
        assert np.array_equal(together[0][row], ids[0])
        assert np.array_equal(together[1][row], logprobs[0])

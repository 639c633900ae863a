"""The served distribution is exact, and no draft can change what is emitted."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speculator.draft.sampling_params import SamplingParams, sample_seed
from speculator.draft.verification import draws, emit, gumbel, served_logits
from speculator.proposals.draft_tree import DraftTree
from tests.fixtures.decoding import emitted as reference

params_of = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.8]),
    top_p=st.sampled_from([0.2, 0.5, 0.9, 1.0]),
    top_k=st.integers(0, 6),
)


def gumbel_noise(seed: int, position: int, size: int) -> torch.Tensor:
    return torch.from_numpy(gumbel(draws(seed, position, size)))


def _reference(logits: list[float], params: SamplingParams) -> list[float]:
    """Temperature, then top-k, then top-p, one token at a time."""
    weights = np.exp(np.array(logits) / params.temperature)
    order = sorted(range(len(logits)), key=lambda token: (-weights[token], token))
    if params.top_k:
        order = order[: params.top_k]
    total, kept, mass = sum(weights[token] for token in order), [], 0.0
    for token in order:
        if mass >= params.top_p:
            break
        kept.append(token)
        mass += weights[token] / total
    total = sum(weights[token] for token in kept)
    return [float(weights[token] / total) if token in kept else 0.0 for token in range(len(logits))]


@given(st.lists(st.floats(-4, 4), min_size=2, max_size=6, unique_by=lambda value: round(value, 6)), params_of)
def test_served_distribution_matches_the_obvious_one(row: list[float], params: SamplingParams) -> None:
    served = served_logits(torch.tensor(row, dtype=torch.float64), params).softmax(-1)
    assert served.tolist() == pytest.approx(_reference(row, params), abs=1e-9)


@given(
    st.lists(
        st.tuples(st.integers(0, 40) | st.integers(0, 2**64 - 1), st.integers(0, 9), st.integers(0, 40)),
        min_size=2,
        max_size=20,
        unique=True,
    )
)
def test_no_two_positions_of_any_samples_of_any_seeds_share_their_noise(places: list[tuple[int, int, int]]) -> None:
    drawn = {draws(sample_seed(seed, number), position, 4).tobytes() for seed, number, position in places}
    assert len(drawn) == len(places)


def test_greedy_ignores_the_noise() -> None:
    logits = torch.tensor([0.1, 3.0, 0.2])
    assert reference(logits, SamplingParams(temperature=0), torch.tensor([100.0, 0.0, 0.0])) == 1


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(-2, 2), min_size=3, max_size=3), params_of)
def test_emitted_distribution_is_exact_by_quadrature(row: list[float], params: SamplingParams) -> None:
    """Integrate `emit` over the cube of its uniform noise: the share of each token is its served probability.

    The cube is cut into cells and `emit` evaluated at every cell's centre; the error is bounded by the cells that the
    boundaries between tokens cross, a share of order 1 / cells-per-side.
    """
    cells = 60
    centres = (np.arange(cells) + 0.5) / cells
    cube = np.array(list(itertools.product(centres, repeat=3)))
    noise = torch.from_numpy(-np.log(-np.log(cube)))
    logits = torch.tensor(row, dtype=torch.float64)
    emitted = reference(logits.expand(len(cube), 3), params, noise)
    share = torch.bincount(emitted, minlength=3) / len(cube)
    exact = served_logits(logits, params).softmax(-1)
    assert share.tolist() == pytest.approx(exact.tolist(), abs=2.5 / cells)
    assert (share[exact == 0] == 0).all()


def test_the_noise_that_positions_draw_is_standard_gumbel() -> None:
    """What the quadrature takes for granted: the noise of (seed, position) is independent and Gumbel distributed."""
    noise = torch.stack([gumbel_noise(seed, position, 50) for seed in range(20) for position in range(100)])
    uniform = torch.exp(-torch.exp(-noise)).flatten().sort().values
    expected = (torch.arange(len(uniform)) + 0.5) / len(uniform)
    # Kolmogorov–Smirnov: 1.95 / √n is exceeded with probability 0.001, and the seeds are fixed.
    assert (uniform - expected).abs().max() < 1.95 / len(uniform) ** 0.5
    neighbours = torch.corrcoef(torch.stack([noise[:-1].flatten(), noise[1:].flatten()]))[0, 1]
    assert abs(neighbours) < 4 / noise.numel() ** 0.5


@given(st.integers(0, 2**64 - 1), st.integers(0, 10_000))
def test_noise_is_a_function_of_seed_and_position(seed: int, position: int) -> None:
    noise = gumbel_noise(seed, position, 8)
    assert torch.equal(noise, gumbel_noise(seed, position, 8))
    assert not torch.equal(noise, gumbel_noise(seed, position + 1, 8))
    assert not torch.equal(noise, gumbel_noise(seed ^ 1, position, 8))
    assert noise.isfinite().all()


def test_seeds_of_different_length_do_not_meet() -> None:
    seeds = [5, 5 + (3 << 32), 3 << 32, 5 << 32, 3]
    found = [tuple(draws(seed, position, 4)) for seed in seeds for position in (0, 3, 5)]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@given(st.integers(0, 2**32), st.sampled_from([1, 7, 300, 5000]), st.sampled_from([0.0, 1.0, 4.0]), params_of)
def test_with_noise_for_candidates_alone_the_same_token_is_emitted(
    dtype: torch.dtype, seed: int, size: int, spread: float, params: SamplingParams
) -> None:
    logits = (spread * torch.randn(size, generator=torch.Generator().manual_seed(seed))).to(dtype)
    for position in range(5):
        uniform = draws(seed, position, size)
        assert emit(logits, params, uniform) == int(reference(logits, params, torch.from_numpy(gumbel(uniform))))
    greedy = SamplingParams(temperature=0.0)
    assert emit(logits, greedy, uniform) == int(logits.argmax())


def test_logits_that_are_no_numbers_emit_some_token() -> None:
    logits = torch.zeros(50)
    logits[20] = torch.nan
    assert emit(logits, SamplingParams(), draws(0, 0, 50)) == 20


@settings(deadline=None)
@given(st.integers(0, 2**32), st.lists(st.lists(st.integers(0, 4), max_size=5), max_size=12), params_of)
def test_any_chain_of_proposals_leaves_the_text_as_it_is(
    seed: int, rounds: list[list[int]], params: SamplingParams
) -> None:
    """A toy target over five tokens: verifying arbitrary proposals commits what plain sampling emits."""
    table = torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed % 1000)) * 2

    def sample(previous: int, position: int) -> int:
        return emit(table[previous], params, draws(seed, position, 5))

    plain = [0]
    while len(plain) < 80:
        plain.append(sample(plain[-1], len(plain)))
    text = [0]
    for proposals in rounds:
        fed, length = [text[-1], *proposals], len(text)
        tree = DraftTree.chain(proposals, [1.0] * len(proposals))
        emitted, _ = tree.walk(lambda row, depth, fed=fed, length=length: sample(fed[row], length + depth))
        text += emitted
    assert text == plain[: len(text)]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([0.0, 0.2, 0.6]))
def test_shared_noise_accepts_at_least_what_the_coupling_promises(seed: int, distance: float) -> None:
    """P(accept) ≥ (1 − TV) / (1 + TV); equal distributions always agree."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(6, generator=generator, dtype=torch.float64)
    draft = target + distance * torch.randn(6, generator=generator, dtype=torch.float64)
    total_variation = float((target.softmax(-1) - draft.softmax(-1)).abs().sum() / 2)
    noise = torch.stack([gumbel_noise(seed, position, 6) for position in range(3000)])
    params = SamplingParams()
    agree = float(
        (reference(target.expand_as(noise), params, noise) == reference(draft.expand_as(noise), params, noise))
        .double()
        .mean()
    )
    bound = (1 - total_variation) / (1 + total_variation)
    assert agree >= bound - 4 * (bound * (1 - bound) / 3000) ** 0.5
    if distance == 0:
        assert agree == 1

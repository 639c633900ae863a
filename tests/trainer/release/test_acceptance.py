"""Expected and recorded rounds against rounds that are played out, and shared noise against its formula."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speculator.draft.sampling_params import SamplingParams
from speculator.draft.verification import draws, gumbel, served_logits
from tests.fixtures.decoding import emitted as reference
from tests.trainer.learning.test_labels import round_trace
from trainer.learning.labels import draft_ids_by_target_id, make_labels
from trainer.release.acceptance import coupled_acceptance, expected_rounds, recorded_rounds
from trainer.statistics import Acceptance


def certain(accepted: list[int], depth: int) -> torch.Tensor:
    """[N, depth] probabilities of chains whose first `accepted` proposals are accepted for sure."""
    leading = torch.arange(depth) < torch.tensor(accepted, dtype=torch.int64)[:, None]
    return leading.double().reshape(len(accepted), depth)


def rounds_by_hand(accepted: list[int], labelled: list[bool], depth: int) -> tuple[int, int]:
    """Token by token: every round ends behind its accepted proposals and one token more, or at the end."""
    committed = rounds = 0
    left = 0
    for count, known in zip(accepted, labelled, strict=True):
        if left == 0 and known:
            rounds += 1
            left = min(count, depth) + 1
        if left:
            committed += 1
            left -= 1
    return committed, rounds


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=30), st.integers(1, 5))
def test_rounds_are_counted_as_they_are_decoded(positions: list[tuple[int, bool]], depth: int) -> None:
    accepted, labelled = [count for count, _ in positions], [known for _, known in positions]
    result = expected_rounds(certain(accepted, 6), torch.tensor(labelled, dtype=torch.bool), depth)
    assert (result.num_committed, result.num_rounds) == rounds_by_hand(accepted, labelled, depth)


def test_the_documented_example_of_rounds() -> None:
    result = expected_rounds(certain([1, 0, 2, 1, 0], 3), torch.ones(5, dtype=torch.bool), 3)
    assert result == Acceptance(num_committed=5, num_rounds=2, num_reaching=(2, 1, 0))
    assert result.length == 2.5
    assert result.rates == (1.0, 0.5, 0.0)


@given(st.integers(0, 10_000), st.integers(1, 4))
@settings(deadline=None, max_examples=20)
def test_expectations_are_the_mean_of_rounds_that_are_played(seed: int, depth: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    accept_NK = torch.rand(5, depth, generator=generator, dtype=torch.float64)
    # A chain ends with the span, as it does where `trainer/release/gate.py` fills the table.
    accept_NK = accept_NK.masked_fill(torch.arange(5)[:, None] + torch.arange(depth) >= 5, 0.0)
    labelled_N = torch.rand(5, generator=generator) < 0.8
    exact = expected_rounds(accept_NK, labelled_N, depth)
    num_plays = 3000
    coins = torch.rand(num_plays, 5, depth, generator=generator, dtype=torch.float64) < accept_NK
    played = Acceptance()
    for coin_NK in coins:
        accepted_N = coin_NK.long().cumprod(1).sum(1)
        played += expected_rounds(certain(accepted_N.tolist(), depth), labelled_N, depth)
    assert played.num_rounds / num_plays == pytest.approx(exact.num_rounds, abs=0.15)
    assert played.num_committed / num_plays == pytest.approx(exact.num_committed, abs=0.15)
    mean_reaching = [count / num_plays for count in played.num_reaching]
    assert mean_reaching == pytest.approx(list(exact.num_reaching), abs=0.15)


def test_acceptance_adds_up_and_is_one_without_rounds() -> None:
    total = Acceptance(num_committed=3, num_rounds=2, num_reaching=(1,)) + Acceptance(
        num_committed=6, num_rounds=1, num_reaching=(1, 1, 1)
    )
    assert total.length == 3.0
    assert total.num_reaching == (2, 1, 1)
    assert Acceptance().length == 1.0


def test_recorded_rounds_count_silent_ones_and_end_with_the_span() -> None:
    """Prompt of 4, tokens 0…11: the answer's first token comes with the prompt, so rounds commit tokens 5…11."""
    rounds = [
        {"position": 4, "tokens": [1, 2], "parents": [-1, 0]},  # commits 5, 6, 7
        {"position": 8, "tokens": [1], "parents": [-1]},  # position 7 was silent and committed 8; this commits 9
        {"position": 9, "tokens": [1, 2, 3], "parents": [-1, 0, 1]},  # accepts 3, of which only 10 and 11 are inside
    ]
    trace = round_trace(rounds, T=12)
    trace.rounds.num_accepted[:] = np.array([2, 0, 3], np.int8)
    result = recorded_rounds(trace)
    assert (result.num_committed, result.num_rounds) == (7, 4)
    assert result.num_reaching == (2, 2, 0)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_k=5),
        SamplingParams(temperature=1.0, top_p=0.7),
    ],
)
def test_acceptance_given_the_emitted_token_is_that_of_noise_that_is_drawn(sampling: SamplingParams) -> None:
    """Play target and draft with the same noise many times, and count by emitted token."""
    V, D = 8, 6
    generator = torch.Generator().manual_seed(3)
    target_logits = torch.randn(V, generator=generator, dtype=torch.float64) * 1.5
    draft_logits = target_logits[:D] + torch.randn(D, generator=generator, dtype=torch.float64)
    num_draws = 20_000
    noise = torch.from_numpy(gumbel(np.stack([draws(1, position, V) for position in range(num_draws)])))
    emitted = reference(target_logits.expand(num_draws, V), sampling, noise)
    tempered = SamplingParams(temperature=sampling.temperature)
    proposed = reference(draft_logits.expand(num_draws, D), tempered, noise[:, :D])
    top = target_logits.log_softmax(-1).topk(V)
    draft_ids_V = draft_ids_by_target_id(torch.zeros(D, dtype=torch.int64), V)
    labels = make_labels(
        top.indices[None].int(), top.values[None].half(), torch.zeros(1, dtype=torch.bool), sampling, draft_ids_V
    )
    served = served_logits(target_logits, sampling).softmax(-1)
    for token in range(V):
        share = emitted == token
        if served[token] < 0.02:
            continue
        frequency = float((proposed[share] == token).double().mean())
        exact = coupled_acceptance(
            labels.tempered(draft_logits[None]), labels, torch.tensor([token if token < D else -1])
        )
        assert float(exact) == pytest.approx(frequency, abs=4 * 0.5 / int(share.sum()) ** 0.5 + 2e-3)


def test_equal_distributions_always_agree_and_an_unknown_token_never_does() -> None:
    logits = torch.tensor([[1.0, 0.5, -1.0, -30.0]])
    top = logits.log_softmax(-1).topk(4)
    labels = make_labels(
        top.indices.int(), top.values.half(), torch.zeros(1, dtype=torch.bool), SamplingParams(), torch.arange(4)
    )
    assert float(coupled_acceptance(logits, labels, torch.tensor([0]))) == pytest.approx(1, abs=2e-3)
    assert float(coupled_acceptance(logits, labels, torch.tensor([-1]))) == 0
    far = torch.tensor([[-200.0, 0.5, 0.0, 0.0]])
    assert 0 <= float(coupled_acceptance(far, labels, torch.tensor([0]))) < 1e-6

"""Labels, divergence and acceptance against slow, obvious references."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from speculator.loss import Acceptance, count_rounds, draft_ids_by_target_id, forward_kl, make_labels
from speculator.sampling import SamplingParams

V = 12
TARGET_IDS = [0, 2, 3, 5, 8, 11]
DRAFT_IDS = draft_ids_by_target_id(torch.tensor(TARGET_IDS) - torch.arange(6), V)
GREEDY = SamplingParams(temperature=0.0)


def random_rows(num_rows: int, K: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of K different tokens and their log-probabilities, sorted, with a tail below them."""
    generator = torch.Generator().manual_seed(seed)
    top = (torch.randn(num_rows, V, generator=generator) * 2).log_softmax(-1).topk(K, -1)
    return top.indices.int(), top.values.half()


def served_by_hand(ids: list[int], logprobs: list[float], sampling: SamplingParams) -> dict[int, float]:
    """The served distribution over the kept tokens, written out."""
    temperature = sampling.temperature or 1.0
    weights = {token: math.exp(logprob / temperature) for token, logprob in zip(ids, logprobs, strict=True)}
    if sampling.temperature and sampling.top_k:
        kept = sorted(weights, key=lambda token: -weights[token])[: sampling.top_k]
        weights = {token: weights[token] for token in kept}
    total = sum(weights.values())
    served = {token: weight / total for token, weight in weights.items()}
    if sampling.temperature and sampling.top_p < 1:
        nucleus: dict[int, float] = {}
        for token in sorted(served, key=lambda token: -served[token]):
            if sum(nucleus.values()) < sampling.top_p:
                nucleus[token] = served[token]
        served = {token: probability / sum(nucleus.values()) for token, probability in nucleus.items()}
    return served


def test_the_inverse_of_d2t() -> None:
    assert DRAFT_IDS.tolist() == [0, -1, 1, 2, -1, 3, -1, -1, 4, -1, -1, 5]


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=1.5, top_k=3),
        SamplingParams(temperature=0.7, top_p=0.6),
        SamplingParams(temperature=1.2, top_p=0.8, top_k=4),
    ],
)
def test_labels_are_the_served_distribution_inside_the_draft_vocabulary(sampling: SamplingParams) -> None:
    ids_RK, logprobs_RK = random_rows(20, 6, seed=1)
    labels = make_labels(ids_RK, logprobs_RK, torch.zeros(20, dtype=torch.bool), sampling, DRAFT_IDS)
    assert labels.labelled.all()
    for row in range(20):
        served = served_by_hand(ids_RK[row].tolist(), logprobs_RK[row].tolist(), sampling)
        for column, token in enumerate(ids_RK[row].tolist()):
            expected = served.get(token, 0.0) if token in TARGET_IDS else 0.0
            assert labels.probs[row, column].item() == pytest.approx(expected, abs=1e-5)
            if token in TARGET_IDS:
                assert TARGET_IDS[labels.draft_ids[row, column]] == token


def test_a_greedy_request_is_distilled_at_temperature_one_whatever_its_other_parameters() -> None:
    rows = random_rows(5, 4, seed=2)
    free = torch.zeros(5, dtype=torch.bool)
    greedy = make_labels(*rows, free, SamplingParams(temperature=0.0, top_k=1, top_p=0.1), DRAFT_IDS)
    assert torch.equal(greedy.probs, make_labels(*rows, free, SamplingParams(), DRAFT_IDS).probs)


def test_rows_without_a_distribution_and_constrained_rows_have_no_label() -> None:
    ids_RK, logprobs_RK = random_rows(3, 4, seed=3)
    ids_RK[0], logprobs_RK[0] = -1, float("-inf")
    constrained_R = torch.tensor([False, True, False])
    labels = make_labels(ids_RK, logprobs_RK, constrained_R, SamplingParams(), DRAFT_IDS)
    assert labels.labelled.tolist() == [False, False, True]
    assert not labels.probs[:2].any()
    assert labels.probs[2].sum() > 0


def test_a_row_with_fewer_tokens_than_columns() -> None:
    ids_RK = torch.tensor([[3, 5, -1, -1]], dtype=torch.int32)
    logprobs_RK = torch.tensor([[0.25, 0.75, 0, 0]]).log().half()
    labels = make_labels(ids_RK, logprobs_RK, torch.zeros(1, dtype=torch.bool), SamplingParams(), DRAFT_IDS)
    assert labels.probs[0].tolist() == pytest.approx([0.25, 0.75, 0, 0], abs=1e-3)


def test_forward_kl_is_the_cross_entropy_over_the_draft_vocabulary() -> None:
    rows = random_rows(7, 5, seed=4)
    labels = make_labels(*rows, torch.zeros(7, dtype=torch.bool), SamplingParams(), DRAFT_IDS)
    logits_RD = torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    loss_R = forward_kl(logits_RD, labels.draft_ids, labels.probs)
    for row in range(7):
        q_D = [math.exp(z) for z in logits_RD[row].tolist()]
        expected = 0.0
        for column in range(5):
            q = q_D[labels.draft_ids[row, column]] / sum(q_D)
            expected -= labels.probs[row, column].item() * math.log(q)
        assert loss_R[row].item() == pytest.approx(expected, rel=1e-5)


def test_the_gradient_pulls_the_draft_to_the_target_and_ignores_what_it_cannot_propose() -> None:
    probs_RK = torch.tensor([[0.6, 0.3], [0.0, 0.0]])
    logits_RD = torch.zeros(2, 6, requires_grad=True)
    forward_kl(logits_RD, torch.tensor([[1, 4], [0, 0]]), probs_RK).sum().backward()
    assert logits_RD.grad is not None
    # m · softmax − p, with m = 0.9 and a uniform softmax.
    assert logits_RD.grad[0].tolist() == pytest.approx([0.15, -0.45, 0.15, 0.15, -0.15, 0.15])
    assert not logits_RD.grad[1].any()


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
    result = count_rounds(torch.tensor(accepted, dtype=torch.int64), torch.tensor(labelled, dtype=torch.bool), depth)
    assert (result.num_committed, result.num_rounds) == rounds_by_hand(accepted, labelled, depth)


def test_the_documented_example_of_rounds() -> None:
    result = count_rounds(torch.tensor([1, 0, 2, 1, 0]), torch.ones(5, dtype=torch.bool), 3)
    assert result == Acceptance(num_committed=5, num_rounds=2)
    assert result.length == 2.5


def test_acceptance_adds_up_and_is_one_without_rounds() -> None:
    total = Acceptance(num_committed=3, num_rounds=2) + Acceptance(num_committed=6, num_rounds=1)
    assert total.length == 3.0
    assert Acceptance().length == 1.0

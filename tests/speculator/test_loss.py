"""Every loss against its formula in Python floats, its gradient's direction, and the text that names a mix."""

from __future__ import annotations

import math

import pytest
import torch

from speculator.errors import ConfigError
from speculator.labels import Labels, Verdicts, make_labels
from speculator.loss import (
    LossMix,
    acceptance_rate,
    cross_entropy,
    discard,
    forward_kl,
    policy_gradient,
    reverse_kl,
)
from speculator.sampling import SamplingParams
from tests.speculator.test_labels import DRAFT_IDS, TARGET_IDS, random_rows

D = len(TARGET_IDS)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95)


def labels_of(num_rows: int, K: int = 5, *, sampling: SamplingParams | None = None, seed: int = 4) -> Labels:
    rows = random_rows(num_rows, K, seed)
    return make_labels(*rows, torch.zeros(num_rows, dtype=torch.bool), sampling or SamplingParams(), DRAFT_IDS)


def random_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 2


def q_of(logits_D: torch.Tensor) -> list[float]:
    weights = [math.exp(z) for z in logits_D.tolist()]
    return [weight / sum(weights) for weight in weights]


def p_of(labels: Labels, row: int) -> dict[int, float]:
    """Draft id to probability among the kept tokens."""
    pairs = zip(labels.draft_ids[row].tolist(), labels.probs[row].tolist(), strict=True)
    return {draft_id: probability for draft_id, probability in pairs if probability > 0}


def test_forward_kl_is_the_cross_entropy_over_the_draft_vocabulary() -> None:
    labels, logits_RD = labels_of(7), random_logits(7)
    loss_R = forward_kl(logits_RD, labels.draft_ids, labels.probs)
    for row in range(7):
        q_D = q_of(logits_RD[row])
        expected = -sum(probability * math.log(q_D[token]) for token, probability in p_of(labels, row).items())
        assert loss_R[row].item() == pytest.approx(expected, rel=1e-5)


def test_the_gradient_pulls_the_draft_to_the_target_and_ignores_what_it_cannot_propose() -> None:
    probs_RK = torch.tensor([[0.6, 0.3], [0.0, 0.0]])
    logits_RD = torch.zeros(2, 6, requires_grad=True)
    forward_kl(logits_RD, torch.tensor([[1, 4], [0, 0]]), probs_RK).sum().backward()
    assert logits_RD.grad is not None
    # m · softmax − p, with m = 0.9 and a uniform softmax.
    assert logits_RD.grad[0].tolist() == pytest.approx([0.15, -0.45, 0.15, 0.15, -0.15, 0.15])
    assert not logits_RD.grad[1].any()


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED])
def test_reverse_kl_prices_unknown_tokens_at_the_tail(sampling: SamplingParams) -> None:
    labels, logits_RD = labels_of(7, sampling=sampling), random_logits(7)
    loss_R = reverse_kl(logits_RD, labels.draft_ids, labels.probs, labels.tail)
    for row in range(7):
        p, tail = p_of(labels, row), labels.tail[row].item()
        expected = 0.0
        for token, q in enumerate(q_of(logits_RD[row])):
            price = (1 - tail) * p[token] if token in p else max(tail / D, 1e-6)
            expected += q * (math.log(q) - math.log(price))
        assert loss_R[row].item() == pytest.approx(sum(p.values()) * expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED])
def test_the_acceptance_rate_is_the_overlap_of_served_probabilities(sampling: SamplingParams) -> None:
    labels, logits_RD = labels_of(7, sampling=sampling), random_logits(7)
    rate_R = acceptance_rate(logits_RD, labels.draft_ids, labels.probs, labels.tail)
    for row in range(7):
        q_D, tail = q_of(logits_RD[row]), labels.tail[row].item()
        expected = sum(min((1 - tail) * probability, q_D[token]) for token, probability in p_of(labels, row).items())
        assert rate_R[row].item() == pytest.approx(expected, rel=1e-5)


def test_cross_entropy_of_a_greedy_request_is_about_the_likeliest_token_if_the_draft_has_it() -> None:
    labels, logits_RD = labels_of(20, sampling=SamplingParams(temperature=0.0)), random_logits(20)
    loss_R = cross_entropy(logits_RD, labels.draft_ids, labels.probs, labels.greedy)
    first = random_rows(20, 5, seed=4)[0][:, 0].tolist()
    assert any(token in TARGET_IDS for token in first)
    assert any(token not in TARGET_IDS for token in first)
    for row, token in enumerate(first):
        expected = -math.log(q_of(logits_RD[row])[TARGET_IDS.index(token)]) if token in TARGET_IDS else 0.0
        assert loss_R[row].item() == pytest.approx(expected, rel=1e-5)


def test_cross_entropy_of_a_sampled_request_is_about_its_whole_served_distribution() -> None:
    labels, logits_RD = labels_of(20, sampling=SAMPLED), random_logits(20)
    loss_R = cross_entropy(logits_RD, labels.draft_ids, labels.probs, labels.greedy)
    assert torch.equal(loss_R, forward_kl(logits_RD, labels.draft_ids, labels.probs))


def test_policy_gradient_raises_what_was_accepted_and_lowers_what_was_not() -> None:
    logits_JD = torch.zeros(2, D, requires_grad=True)
    log_q_J = logits_JD.log_softmax(-1)[:, 2]
    policy_gradient(log_q_J, torch.tensor([0.7, -0.3]), torch.tensor([1.0, 0.5])).sum().backward()
    assert logits_JD.grad is not None
    assert logits_JD.grad[0, 2] == pytest.approx(-0.7 * (1 - 1 / D))
    assert logits_JD.grad[1, 2] == pytest.approx(0.15 * (1 - 1 / D))


@pytest.mark.parametrize("top_k", [1, 2, 3, 10])
@pytest.mark.parametrize("rejected", range(D))
def test_discard_is_the_divergence_on_the_targets_likeliest_and_the_rejected_token(top_k: int, rejected: int) -> None:
    labels, logits_RD = labels_of(12, K=5, seed=8), random_logits(12, seed=1)
    loss_R = discard(
        logits_RD, labels.draft_ids, labels.probs, torch.full((12,), rejected, dtype=torch.int64), top_k=top_k
    )
    ids_RK, _ = random_rows(12, 5, seed=8)
    for row in range(12):
        p, q_D = p_of(labels, row), q_of(logits_RD[row])
        likeliest = [TARGET_IDS.index(token) for token in ids_RK[row, :top_k].tolist() if token in TARGET_IDS]
        kept = {*likeliest, rejected}
        p_total, q_total = sum(p.get(token, 0.0) for token in kept), sum(q_D[token] for token in kept)
        expected = 0.0
        for token in kept:
            if p_total and p.get(token, 0.0):
                expected += p[token] / p_total * math.log(p[token] / p_total / (q_D[token] / q_total))
        assert loss_R[row].item() == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_discard_moves_probability_from_the_rejected_token_to_what_the_target_wanted() -> None:
    logits_JD = torch.zeros(1, D, requires_grad=True)
    discard(logits_JD, torch.tensor([[1, 4]]), torch.tensor([[0.7, 0.3]]), torch.tensor([3]), top_k=10).sum().backward()
    assert logits_JD.grad is not None
    third = 1 / 3
    assert logits_JD.grad[0].tolist() == pytest.approx([0, third - 0.7, 0, third, third - 0.3, 0], abs=1e-6)


def test_every_loss_and_its_gradient_is_finite_where_the_draft_can_propose_nothing() -> None:
    labels = labels_of(2)
    empty = Labels(**{**vars(labels), "probs": torch.zeros_like(labels.probs)})
    verdicts = Verdicts(
        bases=torch.zeros(2, dtype=torch.int64),
        steps=torch.zeros(2, dtype=torch.int64),
        draft_ids=torch.tensor([0, 1]),
        logprobs=torch.tensor([-0.1, -9.0]),
        accepted=torch.tensor([True, False]),
        versions=torch.zeros(2, dtype=torch.int64),
    )
    mix = LossMix.parse(
        "forward_kl,reverse_kl,acceptance,log_acceptance,cross_entropy,policy_gradient,discard,correction=tis"
    )
    for each in (labels, empty):
        logits_RD = (random_logits(2) * 40).float().requires_grad_()
        terms = mix.on_proposals(logits_RD, each, verdicts, baseline=0.5)
        (mix.on_states(logits_RD, each).sum() + terms[0] + terms[1]).backward()
        assert logits_RD.grad is not None
        assert torch.isfinite(logits_RD.grad).all()


# -- mixes -------------------------------------------------------------------------------------------------------------


def test_a_mix_weighs_its_terms() -> None:
    labels, logits_RD = labels_of(7), random_logits(7)
    tables = (labels.draft_ids, labels.probs)
    rate_R = acceptance_rate(logits_RD, *tables, labels.tail)
    expected_R = 2 * forward_kl(logits_RD, *tables) + 0.5 * (1 - rate_R) - 0.25 * rate_R.log()
    mix = LossMix.parse("forward_kl=2, acceptance=0.5, log_acceptance=0.25")
    assert torch.allclose(mix.on_states(logits_RD, labels), expected_R.float(), rtol=1e-5)
    assert not mix.uses_verdicts


@pytest.mark.parametrize(
    "text",
    [
        "forward_kl",
        "forward_kl,chains=all",
        "forward_kl=1,discard=0.5,correction=topr",
        "reverse_kl=0.3,policy_gradient=0.1,correction=cispo,clip_low=0.5,clip_high=1.5,verdicts=fresh",
        "acceptance,discard,correction=weighted_topr,positive=2,negative=0.5,discard_top_k=3,step_discount=1",
    ],
)
def test_a_mix_is_written_as_it_is_read(text: str) -> None:
    mix = LossMix.parse(text)
    assert LossMix.parse(str(mix)) == LossMix.parse(str(LossMix.parse(str(mix))))
    assert str(LossMix.parse(str(mix))) == str(mix)


def test_settings_reach_the_mix() -> None:
    mix = LossMix.parse("forward_kl,discard=0.5,correction=cispo,clip_low=0.5,verdicts=fresh,discard_top_k=3")
    assert (mix.forward_kl, mix.discard, mix.discard_top_k, mix.verdicts) == (1.0, 0.5, 3, "fresh")
    assert mix.correction.name == "cispo"
    assert mix.correction.clip == (0.5, 1.2)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("forwardkl", "forward_kl, reverse_kl"),
        ("forward_kl=x", "forward_kl=x"),
        ("forward_kl=-1", "negative"),
        ("forward_kl=nan", "finite"),
        ("forward_kl=1,forward_kl=2", "twice"),
        ("", "give one of forward_kl"),
        ("forward_kl=0", "give one of forward_kl"),
        ("discard,correction=ppo", "none, tis, cispo, topr, weighted_topr"),
        ("discard,correction", "none, tis"),
        ("discard,correction=tis,clip_high=-1", "clip bounds"),
        ("discard,verdicts=old", "recorded or fresh"),
        ("forward_kl,chains=some", "own or all"),
        ("discard,discard_top_k=0", "discard_top_k"),
        ("discard,discard_top_k=1.5", "discard_top_k=1.5"),
        ("forward_kl,step_discount=0", "step_discount"),
    ],
)
def test_what_a_mix_cannot_be_is_refused_with_the_choices(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        LossMix.parse(text)

"""Every loss against its formula in Python floats, its gradient's direction, and the text that names a mix."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from speculator.draft.sampling_params import SamplingParams
from speculator.errors import ConfigError
from tests.trainer.learning.test_labels import DRAFT_IDS, TARGET_IDS, random_rows
from trainer.learning.labels import Labels, Verdicts, make_labels
from trainer.learning.losses.correction import Correction
from trainer.learning.losses.expected_length import ExpectedLength
from trainer.learning.losses.mix import LOSS_NAMES, LossMix
from trainer.learning.losses.proposals import discard, margin, policy_gradient
from trainer.learning.losses.text import acceptance_rate, coupled_rate, forward_kl, lk_hybrid, reverse_kl

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


def test_the_gradient_of_acceptance_is_the_policy_gradient_over_all_proposals() -> None:
    """With the reward that the draft proposes a token too rarely, and an exact baseline (docs: learning.md)."""
    labels, logits_RD = labels_of(20, sampling=SAMPLED), random_logits(20).requires_grad_()
    acceptance_rate(logits_RD, labels.draft_ids, labels.probs, labels.tail).sum().backward()
    assert logits_RD.grad is not None
    for row in range(20):
        q_D, p, tail = q_of(logits_RD[row]), p_of(labels, row), labels.tail[row].item()
        rewards = [float(q < (1 - tail) * p.get(token, 0.0)) for token, q in enumerate(q_D)]
        baseline = sum(q * reward for q, reward in zip(q_D, rewards, strict=True))
        expected = [q * (reward - baseline) for q, reward in zip(q_D, rewards, strict=True)]
        assert logits_RD.grad[row].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED, SamplingParams(temperature=0.0)])
def test_the_hybrid_blends_kl_and_what_is_not_accepted_by_the_overlap(sampling: SamplingParams) -> None:
    labels, logits_RD = labels_of(7, sampling=sampling), random_logits(7).requires_grad_()
    tables = (labels.draft_ids, labels.probs)
    rate_R = acceptance_rate(logits_RD, *tables, labels.tail)
    loss_R = lk_hybrid(logits_RD, *tables, rate_R)
    blends = []
    for row in range(7):
        q_D, p, rate = q_of(logits_RD[row]), p_of(labels, row), rate_R[row].item()
        kl, mass = -sum(probability * math.log(q_D[token]) for token, probability in p.items()), sum(p.values())
        blends.append(math.exp(-3 * rate / mass) if mass else 1.0)
        assert loss_R[row].item() == pytest.approx(blends[-1] * kl + (1 - blends[-1]) * (mass - rate), rel=1e-4)
    (found,) = torch.autograd.grad(loss_R.sum(), logits_RD, retain_graph=True)
    blend_R = torch.tensor(blends)
    parts_R = blend_R * forward_kl(logits_RD, *tables) - (1 - blend_R) * rate_R
    (expected,) = torch.autograd.grad(parts_R.sum(), logits_RD)
    assert torch.allclose(found, expected, atol=1e-5), "the blend has no gradient"


@pytest.mark.parametrize("drafted", ["alike", "apart"])
def test_the_coupled_rate_is_how_often_the_same_noise_draws_the_same_token(drafted: str) -> None:
    """Five tokens, of which the draft can propose four."""
    generator = torch.Generator().manual_seed(1)
    served = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.1], dtype=torch.float64)
    logits = served[:4].log() + (0.3 if drafted == "alike" else 3.0) * torch.randn(4, generator=generator)
    rate = coupled_rate(logits[None], torch.arange(4)[None], served[None, :4].float(), torch.zeros(1))
    noise_N5 = -torch.empty(200_000, 5, dtype=torch.float64).exponential_(generator=generator).log()
    same = (served.log() + noise_N5).argmax(-1) == (logits + noise_N5[:, :4]).argmax(-1)
    assert rate.item() == pytest.approx(same.double().mean().item(), abs=0.004)


def test_the_margin_bounds_the_rejection_of_a_greedy_request_and_cross_entropy_bounds_the_margin() -> None:
    logits_RD = random_logits(50)
    likeliest_R, committed_R = logits_RD.argmax(-1), torch.arange(50) % D
    wrong_R = likeliest_R != committed_R
    margin_R = margin(logits_RD, likeliest_R, committed_R)
    for row in range(50):
        lead = (logits_RD[row].max() - logits_RD[row, committed_R[row]]).item()
        assert margin_R[row].item() == pytest.approx(math.log(1 + math.exp(lead)), rel=1e-5)
    entropy_R = -logits_RD.log_softmax(-1).gather(1, committed_R[:, None])[:, 0]
    assert (wrong_R <= margin_R / math.log(2) + 1e-6).all()
    assert (margin_R <= entropy_R.float() + 1e-5)[wrong_R].all()
    assert not margin(logits_RD, likeliest_R, torch.full((50,), -1)).any(), "nothing that it could propose"


def test_the_expected_length_weighs_a_proposal_by_its_reach_and_what_hangs_on_it() -> None:
    """Three chains, of which one ends early and one late."""
    rates = [torch.tensor([0.9, 0.5, 0.3]), torch.tensor([0.8, 0.4]), torch.tensor([0.6])]
    chains = [torch.tensor([0, 1, 2]), torch.tensor([0, 2]), torch.tensor([2])]
    lengths = ExpectedLength(3, torch.device("cpu"))
    total = sum(lengths.add(at, rate.requires_grad_()) for at, rate in zip(chains, rates, strict=True))
    expected = 0.9 + 0.5 + 0.3 + 0.9 * 0.8 + 0.3 * 0.4 + 0.3 * 0.4 * 0.6
    assert isinstance(total, torch.Tensor)
    assert total.item() == pytest.approx(expected)
    total.backward()
    found = [rate.grad.tolist() for rate in rates if rate.grad is not None]
    weights = [[1 + 0.8, 1, 1 + 0.4 * (1 + 0.6)], [0.9, 0.3 * (1 + 0.6)], [0.3 * 0.4]]
    for row, wanted in zip(found, weights, strict=True):
        assert row == pytest.approx(wanted)


def test_cross_entropy_of_a_greedy_request_is_about_the_likeliest_token_if_the_draft_has_it() -> None:
    labels, logits_RD = labels_of(20, sampling=SamplingParams(temperature=0.0)), random_logits(20)
    loss_R = LossMix.parse("cross_entropy").on_states(logits_RD, labels)
    first = random_rows(20, 5, seed=4)[0][:, 0].tolist()
    assert any(token in TARGET_IDS for token in first)
    assert any(token not in TARGET_IDS for token in first)
    for row, token in enumerate(first):
        expected = -math.log(q_of(logits_RD[row])[TARGET_IDS.index(token)]) if token in TARGET_IDS else 0.0
        assert loss_R[row].item() == pytest.approx(expected, rel=1e-5)


def test_cross_entropy_of_a_sampled_request_is_about_its_whole_served_distribution() -> None:
    labels, logits_RD = labels_of(20, sampling=SAMPLED), random_logits(20)
    loss_R = LossMix.parse("cross_entropy").on_states(logits_RD, labels)
    assert torch.equal(loss_R, forward_kl(logits_RD, labels.draft_ids, labels.probs))


REJECTED, WANTED = 3, 1


def rejection(logits_D: torch.Tensor, sampling: SamplingParams, *, logprob: float = -0.7) -> tuple[Labels, Verdicts]:
    """One proposal that the target rejected: it has p = 0.40, and the token that was served in its place 0.45."""
    ids_1K = torch.tensor([[TARGET_IDS[token] for token in (WANTED, REJECTED, 0)]])
    labels = make_labels(
        ids_1K, torch.tensor([[0.45, 0.40, 0.1]]).log(), torch.zeros(1, dtype=torch.bool), sampling, DRAFT_IDS
    )
    one = torch.zeros(1, dtype=torch.int64)
    rejected = torch.tensor([False])
    logprobs = torch.tensor([logprob])
    return labels, Verdicts(
        bases=one,
        steps=one,
        draft_ids=one + REJECTED,
        logprobs=logprobs,
        accepted=rejected,
        versions=one,
        committed=one + WANTED,
    )


ONE_TOKEN = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, top_p=0.9, top_k=50),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=0.7, top_p=0.3),
]


@pytest.mark.parametrize("sampling", ONE_TOKEN)
@pytest.mark.parametrize("correction", ["none", "tis", "cispo", "topr", "weighted_topr"])
@pytest.mark.parametrize("term", ["discard", "policy_gradient", "margin"])
@pytest.mark.parametrize("lead", [0.01, 1.0, 6.0])
def test_a_rejection_where_one_token_is_served_lowers_the_rejected_one(
    term: str, correction: str, sampling: SamplingParams, lead: float
) -> None:
    """However much of the target's own distribution the rejected token has."""
    logits_1D = torch.zeros(1, D)
    logits_1D[0, REJECTED] = lead
    logits_1D.requires_grad_()
    labels, verdict = rejection(logits_1D[0], sampling)
    mix = LossMix.parse(f"{term},correction={correction}")
    sum(mix.on_proposals(logits_1D, labels, verdict, baseline=0.3)).backward()  # type: ignore[union-attr]
    assert logits_1D.grad is not None
    stepped_1D = logits_1D.detach() - 0.1 * logits_1D.grad
    assert stepped_1D.softmax(-1)[0, REJECTED] < logits_1D.detach().softmax(-1)[0, REJECTED]


@pytest.mark.parametrize("term", ["discard", "policy_gradient", "margin"])
@pytest.mark.parametrize("ratio", [0.25, 1.6])
def test_a_recorded_verdict_weighs_by_what_the_draft_says_now_over_what_it_said_then(term: str, ratio: float) -> None:
    logits_1D, said_then = torch.zeros(1, D), -math.log(D) - math.log(ratio)
    labels, verdict = rejection(logits_1D[0], SamplingParams(), logprob=said_then)

    def loss(mix: str) -> float:
        return float(sum(LossMix.parse(mix).on_proposals(logits_1D, labels, verdict, baseline=0.3)))

    assert loss(f"{term},correction=tis") == pytest.approx(ratio * loss(term), rel=1e-4)


@pytest.mark.parametrize("term", ["discard", "policy_gradient", "margin"])
def test_a_fresh_verdict_weighs_the_same_with_and_without_correction(term: str) -> None:
    """The draft in training has proposed the token itself."""
    logits_1D = random_logits(1).float()
    labels, verdict = rejection(logits_1D[0], SamplingParams(), logprob=0.0)
    corrected, plain = (
        float(sum(LossMix.parse(f"{term},verdicts=fresh{how}").on_proposals(logits_1D, labels, verdict, baseline=0.3)))
        for how in (",correction=tis", "")
    )
    assert corrected == plain != 0


def test_a_greedy_rejection_of_the_likeliest_token_teaches_nothing() -> None:
    """A tie: the target emitted the other of two tokens that weigh the same."""
    labels, verdict = rejection(torch.zeros(D), SamplingParams(temperature=0.0))
    tied = Verdicts(**{**vars(verdict), "draft_ids": torch.tensor([WANTED])})
    logits_1D = random_logits(1).float().requires_grad_()
    sum(LossMix.parse("discard").on_proposals(logits_1D, labels, tied, baseline=0.3)).backward()  # type: ignore[union-attr]
    assert logits_1D.grad is not None
    assert not logits_1D.grad.any()


def test_what_is_served_is_what_is_taught_but_for_greedy_requests() -> None:
    sampled = labels_of(20, sampling=SAMPLED)
    assert torch.equal(sampled.served, sampled.probs)
    greedy = labels_of(20, sampling=SamplingParams(temperature=0.0))
    has_likeliest = [token in TARGET_IDS for token in random_rows(20, 5, seed=4)[0][:, 0].tolist()]
    assert greedy.served[:, 0].tolist() == [float(has) for has in has_likeliest]
    assert not greedy.served[:, 1:].any()


@pytest.mark.parametrize("correction", ["none", "tis", "cispo", "topr", "weighted_topr"])
@pytest.mark.parametrize("logit", [-1e4, -80.0, -20.0, -9.0, 0.0, 9.0, 20.0, 80.0, 1e4])
@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), SamplingParams()])
def test_a_rejection_pushes_with_a_bounded_force_and_to_a_bound(
    logit: float, correction: str, sampling: SamplingParams
) -> None:
    """As the rejected token's q goes to 0 or 1, recorded when it was unlikely or nearly sure."""
    for logprob in (-60.0, -9.0, -0.001):
        for text in ("policy_gradient", "discard", "margin"):
            mix = LossMix.parse(f"{text},correction={correction}")
            logits_1D = torch.zeros(1, D)
            logits_1D[0, REJECTED] = logit
            logits_1D.requires_grad_()
            labels, verdict = rejection(logits_1D[0], sampling, logprob=logprob)
            loss = sum(mix.on_proposals(logits_1D, labels, verdict, baseline=0.3))
            loss.backward()  # type: ignore[union-attr]
            cap = 1.0 if correction == "none" else mix.correction.clip[1]
            assert logits_1D.grad is not None
            assert logits_1D.grad.norm() <= cap * math.sqrt(2) + 1e-6
            assert loss.detach() >= cap * 0.3 * math.log(1e-4) - 1e-6
            if text == "policy_gradient" and logit <= -20:
                assert not logits_1D.grad.any(), "the draft has dropped it"


@pytest.mark.parametrize(
    "name", ["forward_kl", "acceptance", "log_acceptance", "cross_entropy", "lk_hybrid", "coupled_acceptance"]
)
@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), SamplingParams(), SAMPLED])
def test_no_term_on_text_has_a_gradient_beyond_its_bound(name: str, sampling: SamplingParams) -> None:
    for scale in (0.1, 1.0, 10.0, 1000.0):
        labels = labels_of(50, sampling=sampling)
        logits_RD = (random_logits(50).float() * scale).requires_grad_()
        LossMix.parse(name).on_states(logits_RD, labels).sum().backward()
        assert logits_RD.grad is not None
        assert logits_RD.grad.norm(dim=1).max() <= math.sqrt(2) + 1e-5


def test_log_acceptance_pulls_as_much_as_the_draft_can_propose() -> None:
    """A token in a hundred is in the draft vocabulary: there is next to nothing to accept."""
    logits_1D = torch.tensor([[-10.0, *[0.0] * (D - 1)]], requires_grad=True)
    probs = torch.log(torch.tensor([[0.99, 0.01]]))
    outside = next(token for token in range(len(DRAFT_IDS)) if token not in TARGET_IDS)
    labels = make_labels(
        torch.tensor([[outside, TARGET_IDS[0]]]), probs, torch.zeros(1, dtype=torch.bool), SamplingParams(), DRAFT_IDS
    )
    LossMix.parse("log_acceptance").on_states(logits_1D, labels).sum().backward()
    assert logits_1D.grad is not None
    assert logits_1D.grad.norm() <= 0.01 * math.sqrt(2)


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
        committed=torch.tensor([0, -1]),
    )
    mix = LossMix.parse(",".join([*LOSS_NAMES, "correction=tis"]))
    for each in (labels, empty):
        logits_RD = (random_logits(2) * 40).float().requires_grad_()
        terms = mix.on_proposals(logits_RD, each, verdicts, baseline=0.5)
        (mix.on_states(logits_RD, each).sum() + terms[0] + terms[1]).backward()
        assert logits_RD.grad is not None
        assert torch.isfinite(logits_RD.grad).all()


def half_square(logits_SD: torch.Tensor, labels: Labels) -> torch.Tensor:
    return logits_SD.square().sum(-1) / 2


def one_for_all(logits_SD: torch.Tensor, labels: Labels) -> torch.Tensor:
    return logits_SD.sum()


def one_argument(logits_SD: torch.Tensor) -> torch.Tensor:
    return logits_SD.sum(-1)


def misspelt(logits_SD: torch.Tensor, labels: Any) -> Any:
    return logits_SD.sum(-1) * labels.prob


def forgotten(logits_SD: torch.Tensor, labels: Labels) -> None:
    logits_SD.sum(-1)


def detached(logits_SD: torch.Tensor, labels: Labels) -> torch.Tensor:
    return logits_SD.detach().sum(-1)


def test_an_operators_own_loss_is_a_term_like_the_others() -> None:
    labels, logits_RD = labels_of(5), random_logits(5)
    own = f"{__name__}:half_square"
    alone, both = LossMix.parse(own), LossMix.parse(f"forward_kl=0.5,{own}=3")
    theirs = LossMix.parse("forward_kl=1").on_states(logits_RD, labels)
    mine = half_square(logits_RD, labels)
    torch.testing.assert_close(alone.on_states(logits_RD, labels), mine)
    torch.testing.assert_close(both.on_states(logits_RD, labels), 0.5 * theirs + 3 * mine)
    assert LossMix.parse(str(both)) == both
    with pytest.raises(ConfigError, match="return a loss a state"):
        LossMix.parse(f"{__name__}:one_for_all").on_states(logits_RD, labels)
    learned_RD = logits_RD.clone().requires_grad_()
    for name, complaint in (
        ("one_argument", r"failed \(TypeError: .*takes 1 positional"),
        ("misspelt", r"failed \(AttributeError: 'Labels' object has no attribute 'prob'\): correct it"),
        ("forgotten", r"returned NoneType: return a loss a state, \(5,\)"),
        ("detached", "has no gradient"),
    ):
        with pytest.raises(ConfigError, match=f"the loss {__name__}:{name} {complaint}"):
            LossMix.parse(f"forward_kl,{__name__}:{name}").on_states(learned_RD, labels)
    for wrong in ("nowhere:loss", f"{__name__}:nothing", f"{own}=-1", f"{own}=much", f"{own},{own}"):
        with pytest.raises(ConfigError):
            LossMix.parse(wrong)


# -- mixes -------------------------------------------------------------------------------------------------------------


def test_a_mix_weighs_its_terms() -> None:
    labels, logits_RD = labels_of(7), random_logits(7)
    tables = (labels.draft_ids, labels.probs)
    rate_R = acceptance_rate(logits_RD, *tables, labels.tail)
    expected_R = 2 * forward_kl(logits_RD, *tables) + 0.5 * (1 - rate_R) - 0.25 * labels.probs.sum(-1) * rate_R.log()
    mix = LossMix.parse("forward_kl=2, acceptance=0.5, log_acceptance=0.25")
    assert torch.allclose(mix.on_states(logits_RD, labels), expected_R.float(), rtol=1e-5)
    assert not mix.uses_verdicts


@pytest.mark.parametrize(
    "text",
    [
        "forward_kl",
        "forward_kl,chains=all",
        "aurora",
        "cross_entropy,margin=0.2,verdicts=fresh",
        "lk_hybrid,coupled_acceptance=0.5,expected_length=0.25",
        "forward_kl=1,discard=0.5,correction=topr",
        "reverse_kl=0.3,policy_gradient=0.1,correction=cispo,clip_low=0.5,clip_high=1.5,verdicts=fresh",
        "acceptance,discard,correction=weighted_topr,positive=2,negative=0.5,discard_top_k=3,step_discount=1",
    ],
)
def test_a_mix_is_written_as_it_is_read(text: str) -> None:
    mix = LossMix.parse(text)
    assert LossMix.parse(str(mix)) == LossMix.parse(str(LossMix.parse(str(mix))))
    assert str(LossMix.parse(str(mix))) == str(mix)


def test_auroras_recipe_is_forward_kl_on_all_chains_and_on_what_was_discarded() -> None:
    mix = LossMix.parse("aurora")
    assert (mix.forward_kl, mix.discard, mix.discard_top_k, mix.chains) == (1.0, 1.0, 10, "all")
    assert (mix.verdicts, mix.step_discount, mix.correction.name) == ("recorded", 1.0, "none")


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


RATIOS = [0.01, 0.5, 0.9, 1.0, 1.1, 3.0, 50.0]


def by_hand(name: str, ratio: float, positive: bool, low: float, high: float) -> float:
    if name == "none":
        return 1.0
    if name == "tis":
        return max(min(ratio, high), low)  # no lower bound unless one is set, as for cispo
    if name == "cispo":
        return max(min(ratio, high), low)
    weight = 1.0 if positive else max(min(ratio, high), low)
    if name == "weighted_topr":
        weight *= 1.5 if positive else 0.25
    return weight


@pytest.mark.parametrize("name", ["none", "tis", "cispo", "topr", "weighted_topr"])
@pytest.mark.parametrize("clips", [(None, None), (0.25, 4.0)])
def test_weights_are_the_formulas_ones(name: str, clips: tuple[float | None, float | None]) -> None:
    correction = Correction(name=name, low=clips[0], high=clips[1], positive=1.5, negative=0.25)
    low, high = correction.clip
    for positive in (True, False):
        log_ratio = torch.tensor(RATIOS).log().requires_grad_()
        weights = correction.weights(log_ratio, torch.full((len(RATIOS),), positive))
        assert not weights.requires_grad
        for ratio, weight in zip(RATIOS, weights.tolist(), strict=True):
            assert weight == pytest.approx(by_hand(name, ratio, positive, low, high), rel=1e-5)


@pytest.mark.parametrize("name", ["tis", "cispo", "topr", "weighted_topr"])
def test_no_weight_is_above_its_cap_or_above_the_ratio_of_what_the_draft_dropped(name: str) -> None:
    log_ratio = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 20
    correction = Correction(name=name)
    for positive in (True, False):
        weights = correction.weights(log_ratio, torch.full((1000,), positive))
        assert weights.max() <= max(correction.clip[1], 1.0)
        if not positive or name in ("tis", "cispo"):
            assert bool((weights <= log_ratio.exp() * (1 + 1e-5)).all())


def test_extreme_ratios_stay_finite_where_a_bound_holds() -> None:
    log_ratio = torch.tensor([-math.inf, -1e4, 1e4])
    for name in ("none", "tis", "cispo", "topr", "weighted_topr"):
        assert torch.isfinite(Correction(name=name).weights(log_ratio, torch.zeros(3, dtype=torch.bool))).all()


def test_values_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="none, tis, cispo, topr, weighted_topr"):
        Correction(name="ppo")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="low"):
        Correction(name="cispo", low=2.0, high=1.0)
    with pytest.raises(ConfigError, match="low"):
        Correction(name="tis", high=math.nan)

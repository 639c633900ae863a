"""Acceptance counted from rounds, coupled by shared noise, and predicted against the rounds of the engine itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from serving.engine import CapturePolicy, GenerateRequest
from speculator.draft.eagle3 import Eagle3Draft
from speculator.draft.sampling_params import SamplingParams
from speculator.draft.verification import draws, gumbel, served_logits
from speculator.trace import Trace, Verification
from tests.fixtures.decoding import emitted as reference
from tests.fixtures.toy import random_draft
from tests.serving.local.harness import fixed_engine
from tests.trainer.answers import answer_traces, by_text
from tests.trainer.examples import batch_of, config_for
from tests.trainer.learning.test_batch import part_of
from tests.trainer.learning.test_labels import round_trace
from trainer.learning.batch import make_example
from trainer.learning.labels import Labels, draft_ids_by_target_id, make_labels
from trainer.learning.optimizer_step import Learner
from trainer.release.gate import (
    coupled_acceptance,
    expected_rounds,
    predict_acceptance,
    recorded_rounds,
    rejection_acceptance,
)
from trainer.statistics import AcceptanceCounts


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


def test_where_text_was_right_a_round_commits_what_it_proposed_whatever_the_draft() -> None:
    ahead_N = torch.tensor([0, 0, 3, 2, 1, 0, 0])
    labelled_N = torch.ones(7, dtype=torch.bool)
    for accepted in ([0, 0, 4, 4, 4, 4, 4], [0, 0, 0, 0, 0, 0, 4]):
        found = expected_rounds(certain(accepted, 4), labelled_N, 4, text_ahead_N=ahead_N)
        # One token each at bases 0 and 1, three of text and one more at base 2, and the last one by itself.
        assert (found.num_committed, found.num_rounds) == (7, 4)
    better = expected_rounds(certain([1, 0, 0, 0, 0, 0, 0], 4), labelled_N, 4, text_ahead_N=ahead_N)
    assert (better.num_committed, better.num_rounds) == (7, 3), "a draft earns where text fails"


def test_the_documented_example_of_rounds() -> None:
    result = expected_rounds(certain([1, 0, 2, 1, 0], 3), torch.ones(5, dtype=torch.bool), 3)
    assert result == AcceptanceCounts(num_committed=5, num_rounds=2, num_reaching=(2, 1, 0))
    assert result.length == 2.5
    assert result.rates == (1.0, 0.5, 0.0)


@given(st.integers(0, 10_000), st.integers(1, 4))
@settings(deadline=None, max_examples=20)
def test_expectations_are_the_mean_of_rounds_that_are_played(seed: int, depth: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    accept_NK = torch.rand(5, depth, generator=generator, dtype=torch.float64)
    # A chain ends with the span, as it does where `accept_probabilities` fills the table.
    accept_NK = accept_NK.masked_fill(torch.arange(5)[:, None] + torch.arange(depth) >= 5, 0.0)
    labelled_N = torch.rand(5, generator=generator) < 0.8
    exact = expected_rounds(accept_NK, labelled_N, depth)
    num_plays = 3000
    coins = torch.rand(num_plays, 5, depth, generator=generator, dtype=torch.float64) < accept_NK
    played = AcceptanceCounts()
    for coin_NK in coins:
        accepted_N = coin_NK.long().cumprod(1).sum(1)
        played += expected_rounds(certain(accepted_N.tolist(), depth), labelled_N, depth)
    assert played.num_rounds / num_plays == pytest.approx(exact.num_rounds, abs=0.15)
    assert played.num_committed / num_plays == pytest.approx(exact.num_committed, abs=0.15)
    mean_reaching = [count / num_plays for count in played.num_reaching]
    assert mean_reaching == pytest.approx(list(exact.num_reaching), abs=0.15)


def test_acceptance_adds_up_and_is_one_without_rounds() -> None:
    total = AcceptanceCounts(num_committed=3, num_rounds=2, num_reaching=(1,)) + AcceptanceCounts(
        num_committed=6, num_rounds=1, num_reaching=(1, 1, 1)
    )
    assert total.length == 3.0
    assert total.num_reaching == (2, 1, 1)
    assert AcceptanceCounts().length == 1.0


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
    target_logits, draft_logits = toy_logits()
    (V,), (D,), num_draws = target_logits.shape, draft_logits.shape, 20_000
    noise = torch.from_numpy(gumbel(np.stack([draws(1, position, V) for position in range(num_draws)])))
    emitted = reference(target_logits.expand(num_draws, V), sampling, noise)
    tempered = SamplingParams(temperature=sampling.temperature)
    proposed = reference(draft_logits.expand(num_draws, D), tempered, noise[:, :D])
    check_by_token(coupled_acceptance, target_logits, draft_logits, sampling, emitted, accepted=proposed == emitted)


def toy_logits() -> tuple[Tensor, Tensor]:
    """Of a target with 8 tokens, and of a draft that knows the first 6 of them."""
    generator = torch.Generator().manual_seed(3)
    target_V = torch.randn(8, generator=generator, dtype=torch.float64) * 1.5
    return target_V, target_V[:6] + torch.randn(6, generator=generator, dtype=torch.float64)


def check_by_token(
    acceptance: Callable[[Tensor, Labels, Tensor], Tensor],
    target_V: Tensor,
    draft_D: Tensor,
    sampling: SamplingParams,
    emitted: Tensor,
    *,
    accepted: Tensor,
) -> None:
    """The predicted acceptance of each token that is likely enough, against that of rounds that were played."""
    (V,), (D,) = target_V.shape, draft_D.shape
    top = target_V.log_softmax(-1).topk(V)
    draft_ids_V = draft_ids_by_target_id(torch.zeros(D, dtype=torch.int64), V)
    labels = make_labels(
        top.indices[None].int(), top.values[None].half(), torch.zeros(1, dtype=torch.bool), sampling, draft_ids_V
    )
    served = served_logits(target_V, sampling).softmax(-1)
    for token in range(V):
        share = emitted == token
        if served[token] < 0.02:
            continue
        frequency = float(accepted[share].double().mean())
        exact = acceptance(labels.tempered(draft_D[None]), labels, torch.tensor([token if token < D else -1]))
        assert float(exact) == pytest.approx(frequency, abs=4 * 0.5 / int(share.sum()) ** 0.5 + 2e-3)


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.7), SamplingParams(temperature=1.3, top_k=5)])
def test_acceptance_given_the_emitted_token_is_that_of_rejection_sampling(sampling: SamplingParams) -> None:
    target_V, draft_D = toy_logits()
    p_V = served_logits(target_V, sampling).softmax(-1)
    q_V = torch.zeros_like(p_V)
    q_V[: len(draft_D)] = (draft_D / sampling.temperature).softmax(-1)
    generator = torch.Generator().manual_seed(4)
    num_draws = 20_000
    proposed = q_V.multinomial(num_draws, replacement=True, generator=generator)
    coins = torch.rand(num_draws, generator=generator, dtype=torch.float64)
    accepted = coins * q_V[proposed] < p_V[proposed]
    instead = (p_V - q_V).clamp_min(0).multinomial(num_draws, replacement=True, generator=generator)
    emitted = torch.where(accepted, proposed, instead)
    check_by_token(rejection_acceptance, target_V, draft_D, sampling, emitted, accepted=accepted)


@pytest.mark.parametrize("acceptance", [coupled_acceptance, rejection_acceptance])
def test_equal_distributions_always_agree_and_an_unknown_token_never_does(
    acceptance: Callable[[Tensor, Labels, Tensor], Tensor],
) -> None:
    logits = torch.tensor([[1.0, 0.5, -1.0, -30.0]])
    top = logits.log_softmax(-1).topk(4)
    labels = make_labels(
        top.indices.int(), top.values.half(), torch.zeros(1, dtype=torch.bool), SamplingParams(), torch.arange(4)
    )
    assert float(acceptance(logits, labels, torch.tensor([0]))) == pytest.approx(1, abs=2e-3)
    assert float(acceptance(logits, labels, torch.tensor([-1]))) == 0
    far = torch.tensor([[-200.0, 0.5, 0.0, 0.0]])
    assert 0 <= float(acceptance(far, labels, torch.tensor([0]))) < 1e-6


@pytest.mark.parametrize("token", [0, 1])
def test_under_shared_noise_tokens_below_the_kept_ones_count_as_if_p_were_proportional_to_q(token: int) -> None:
    p, q = torch.tensor([0.5, 0.3, 0.12, 0.08]), torch.tensor([0.2, 0.3, 0.3, 0.2])
    logprobs = p[None, :2].log().half()
    is_constrained = torch.zeros(1, dtype=torch.bool)
    labels = make_labels(torch.tensor([[0, 1]]), logprobs, is_constrained, SamplingParams(), torch.arange(4))
    by_hand = 1 / torch.maximum(p, q * p[token] / q[token]).sum()
    acceptance = coupled_acceptance(q.log()[None], labels, torch.tensor([token]))
    assert float(acceptance) == pytest.approx(float(by_hand), rel=2e-3)


def test_the_drafts_first_token_is_not_taken_for_one_that_it_cannot_propose() -> None:
    """Kept are a token that it cannot propose, whose draft id stands as 0, and its token 1; its token 0 was emitted."""
    p, q = torch.tensor([0.15, 0.2, 0.075, 0.075, 0.5]), torch.tensor([0.1, 0.8, 0.05, 0.05, 0.0])
    logprobs = p[None, [4, 1]].log().half()
    is_constrained = torch.zeros(1, dtype=torch.bool)
    draft_ids_V = torch.tensor([0, 1, 2, 3, -1])
    labels = make_labels(torch.tensor([[4, 1]]), logprobs, is_constrained, SamplingParams(), draft_ids_V)
    tables = (q[None, :4].log(), labels, torch.tensor([0]))
    by_hand = 1 / torch.maximum(p, q * p[0] / q[0]).sum()
    assert float(coupled_acceptance(*tables)) == pytest.approx(float(by_hand), rel=5e-3)
    assert float(rejection_acceptance(*tables)) == pytest.approx(float(q[0] / p[0]), rel=5e-3)


DEPTH = 4


@pytest.fixture(scope="module")
def draft(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Eagle3Draft:
    """A draft that has learnt from other answers of the toy target."""
    torch.set_num_threads(1)
    learner = Learner(
        random_draft(model_dir, seed=1, draft_vocab_size=40, scale=0.2),
        config_for(model_dir, tmp_path_factory.mktemp("learnt"), autocast=False),
    )
    batch = batch_of(answer_traces(model_dir, num_traces=8), learner.draft)
    for _ in range(120):
        learner.step(batch)
    return learner.draft


def served(model_dir: Path, draft: Eagle3Draft, sampling: SamplingParams, *, num_requests: int) -> list[Trace]:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(6, 47, (num_requests, 6), generator=generator).tolist()
    with fixed_engine(model_dir, draft=draft, depth=DEPTH) as harness:
        for index, prompt in enumerate(prompts):
            harness.ask(
                GenerateRequest(
                    request_id=str(index),
                    prompt_token_ids=tuple(prompt),
                    max_tokens=40,
                    sampling=sampling,
                    seed=index,
                    ignore_eos=True,
                    policy=CapturePolicy(),
                )
            )
        return harness.traces


def predicted(
    draft: Eagle3Draft, traces: list[Trace], depths: list[int], **changes: int
) -> dict[int, AcceptanceCounts]:
    draft_ids_V = draft_ids_by_target_id(draft.d2t, draft.config.vocab_size)
    examples = [make_example(trace, draft_ids_V, feature_width=draft.fc.in_features) for trace in traces]
    return predict_acceptance(draft, examples, depths=depths, **changes)


def float32_copy(draft: Eagle3Draft, model_dir: Path) -> Eagle3Draft:
    """The engine takes a draft over and changes its type."""
    copy = random_draft(model_dir, seed=1, draft_vocab_size=40)
    copy.load_state_dict(draft.state_dict())
    return copy


def test_greedy_rounds_are_predicted_one_by_one(model_dir: Path, draft: Eagle3Draft) -> None:
    traces = served(model_dir, float32_copy(draft, model_dir), SamplingParams(temperature=0), num_requests=8)
    live = sum((recorded_rounds(trace) for trace in traces), AcceptanceCounts())
    found = predicted(draft, traces, [DEPTH])[DEPTH]
    assert live.length > 1.1, "the case must have accepted proposals"
    # Features travel as bfloat16, so a proposal near a tie may differ.
    assert found.num_committed == live.num_committed
    assert found.length == pytest.approx(live.length, rel=0.02)
    assert found.rates[:2] == pytest.approx(live.rates[:2], abs=0.05)


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.9, top_k=6), SamplingParams(temperature=0.5)])
def test_sampled_rounds_are_predicted_in_expectation(
    model_dir: Path, draft: Eagle3Draft, sampling: SamplingParams
) -> None:
    traces = served(model_dir, float32_copy(draft, model_dir), sampling, num_requests=30)
    live = sum((recorded_rounds(trace) for trace in traces), AcceptanceCounts())
    found = predicted(draft, traces, [DEPTH])[DEPTH]
    assert live.length > 1.1, "the case must have accepted proposals"
    assert found.length == pytest.approx(live.length, rel=0.05)
    assert found.rates[0] == pytest.approx(live.rates[0], abs=0.04)


def test_where_the_target_draws_by_itself_only_the_likeliest_token_is_proposed(
    draft: Eagle3Draft, traces: list[Trace]
) -> None:
    """So a sampled text is decoded again as a greedy one is, and a draft that hedges earns less than by rejection."""

    def length(temperature: float, verification: Verification) -> float:
        told = {"sampling": SamplingParams(temperature=temperature), "verification": verification}
        changed = [dataclasses.replace(trace, header=msgspec.structs.replace(trace.header, **told)) for trace in traces]
        return predicted(draft, changed, [DEPTH])[DEPTH].length

    assert length(0.8, "target_only") == length(0.0, "coupled") == length(0.0, "rejection")
    assert len({length(0.8, verification) for verification in ("target_only", "coupled", "rejection")}) == 3
    assert length(0.8, "block") == length(0.8, "rejection") > length(0.8, "coupled")


def test_shallower_chains_commit_less_and_each_depth_is_what_it_would_be_alone(
    model_dir: Path, draft: Eagle3Draft, traces: list[Trace]
) -> None:
    together = predicted(draft, traces, [1, 2, 3, 4])
    assert together[1].length < together[2].length < together[4].length
    for depth, found in together.items():
        assert found == predicted(draft, traces, [depth])[depth]
        assert found.length <= depth + 1
        assert len(found.rates) == depth


def test_windows_of_a_long_answer_add_up_to_the_whole(draft: Eagle3Draft, traces: list[Trace]) -> None:
    assert predicted(draft, traces, [3], max_bases=7) == predicted(draft, traces, [3])


def test_beside_text_a_draft_that_is_never_right_commits_what_text_did(
    model_dir: Path, draft: Eagle3Draft, traces: list[Trace]
) -> None:
    useless = float32_copy(draft, model_dir)
    useless.fc.weight.data.fill_(3e38)
    trace = by_text(part_of(traces[0], 0, 43))  # nothing behind the last round
    served, found = recorded_rounds(trace), predicted(useless, [trace], [DEPTH], beside_text=True)[DEPTH]
    assert served.length == 4
    assert (found.num_committed, found.num_rounds) == (served.num_committed, served.num_rounds)
    assert predicted(useless, [trace], [DEPTH])[DEPTH].length == 1.0


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("where", ["weights", "features"])
def test_what_overflows_accepts_nothing(
    model_dir: Path, draft: Eagle3Draft, traces: list[Trace], temperature: float, where: str
) -> None:
    """Every number is finite; what the draft makes of them is not."""
    header = msgspec.structs.replace(traces[0].header, sampling=SamplingParams(temperature=temperature))
    trace = dataclasses.replace(traces[0], header=header)
    if where == "weights":
        draft = float32_copy(draft, model_dir)
        draft.fc.weight.data.fill_(3e38)
    else:
        trace = dataclasses.replace(trace, aux_hidden=torch.full_like(trace.aux_hidden, 3e38))
    found = predicted(draft, [trace], [DEPTH])[DEPTH]
    assert (found.length, set(found.rates)) == (1.0, {0.0})
    assert found.num_rounds > 0
    assert msgspec.json.decode(msgspec.json.encode(found), type=AcceptanceCounts) == found

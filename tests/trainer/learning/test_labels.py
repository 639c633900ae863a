"""Labels and verdicts against slow, obvious references."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from speculator.draft.sampling_params import SamplingParams
from speculator.trace import NO_DRAFT, Trace, check_trace
from tests.fixtures.traces import make_trace, with_rounds
from trainer.learning.labels import draft_ids_by_target_id, make_labels, make_text_ahead, make_verdicts

V = 12
TARGET_IDS = [0, 2, 3, 5, 8, 11]
DRAFT_IDS = draft_ids_by_target_id(torch.tensor(TARGET_IDS) - torch.arange(6), V)
GREEDY = SamplingParams(temperature=0.0)
SAMPLINGS = [
    GREEDY,
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=1.5, top_k=3),
    SamplingParams(temperature=0.7, top_p=0.6),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=1.2, top_p=0.8, top_k=4),
    SamplingParams(temperature=1.0, top_k=9),
]


def random_logprobs(num_rows: int, seed: int) -> torch.Tensor:
    """Whole distributions [num_rows, V], as float16 holds them."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, V, generator=generator) * 2).log_softmax(-1).half()


def random_rows(num_rows: int, K: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of K different tokens and their log-probabilities, sorted, with a tail below them."""
    top = random_logprobs(num_rows, seed).float().topk(K, -1)
    return top.indices.int(), top.values.half()


def served_by_hand(logprobs: list[float], sampling: SamplingParams) -> dict[int, float]:
    """The served distribution over the whole vocabulary, written out."""
    temperature = sampling.temperature or 1.0
    weights = {token: math.exp(logprob / temperature) for token, logprob in enumerate(logprobs)}
    ordered = sorted(weights, key=lambda token: -weights[token])
    if sampling.temperature and sampling.top_k:
        ordered = ordered[: sampling.top_k]
    total = sum(weights[token] for token in ordered)
    served = {token: weights[token] / total for token in ordered}
    if sampling.temperature and sampling.top_p < 1:
        nucleus: dict[int, float] = {}
        for token in ordered:
            if sum(nucleus.values()) < sampling.top_p:
                nucleus[token] = served[token]
        served = {token: probability / sum(nucleus.values()) for token, probability in nucleus.items()}
    return served


def labels_of(K: int, sampling: SamplingParams, *, num_rows: int = 20, seed: int = 1) -> Any:
    return make_labels(*random_rows(num_rows, K, seed), torch.zeros(num_rows, dtype=torch.bool), sampling, DRAFT_IDS)


def test_the_inverse_of_d2t() -> None:
    assert DRAFT_IDS.tolist() == [0, -1, 1, 2, -1, 3, -1, -1, 4, -1, -1, 5]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_labels_are_the_served_distribution_inside_the_draft_vocabulary(sampling: SamplingParams) -> None:
    labels = labels_of(V, sampling)
    assert labels.labelled.all()
    assert labels.tail.max() < 2e-3, "the whole vocabulary was kept"
    assert (labels.temperature == (sampling.temperature or 1.0)).all()
    ids_RK, _ = random_rows(20, V, seed=1)
    for row, logprobs in enumerate(random_logprobs(20, seed=1).tolist()):
        served = served_by_hand(logprobs, sampling)
        for column, token in enumerate(ids_RK[row].tolist()):
            expected = served.get(token, 0.0) if token in TARGET_IDS else 0.0
            assert labels.probs[row, column].item() == pytest.approx(expected, abs=2e-3)
            if token in TARGET_IDS:
                assert TARGET_IDS[labels.draft_ids[row, column]] == token


@pytest.mark.parametrize("sampling", [sampling for sampling in SAMPLINGS if sampling.temperature in (0, 1)])
@pytest.mark.parametrize("K", [2, 4, 6])
def test_at_temperature_one_the_tail_below_the_kept_tokens_is_exact(sampling: SamplingParams, K: int) -> None:
    """(1 − tail) · probs is the served probability itself, also where the nucleus ends below the kept tokens."""
    labels, (ids_RK, _) = labels_of(K, sampling), random_rows(20, K, seed=1)
    for row, logprobs in enumerate(random_logprobs(20, seed=1).tolist()):
        served = served_by_hand(logprobs, sampling)
        kept = ids_RK[row].tolist()
        tail = sum(probability for token, probability in served.items() if token not in kept)
        # A nucleus that ends below the kept tokens overshoots top_p by less than its last token.
        slack = min((served[token] for token in kept if token in served), default=0.0) if sampling.top_p < 1 else 0.0
        loose = tail > 0 and sampling.top_p < 1
        top_k_below = K < sampling.top_k < V
        assert labels.tail[row].item() == pytest.approx(tail, abs=0.2 if top_k_below else 3e-3 + slack * loose)
        if not loose and not top_k_below:
            for column, token in enumerate(kept):
                expected = served.get(token, 0.0) if token in TARGET_IDS else 0.0
                assert ((1 - labels.tail) * labels.probs[:, column])[row].item() == pytest.approx(expected, abs=3e-3)


@pytest.mark.parametrize("top_k", [1, 3, 4])
def test_top_k_within_the_kept_tokens_leaves_no_tail_at_any_temperature(top_k: int) -> None:
    for temperature in (0.5, 1.0, 2.0):
        sampling = SamplingParams(temperature=temperature, top_k=top_k)
        few, all_of_them = labels_of(4, sampling), labels_of(V, sampling)
        assert not few.tail.any()
        assert torch.allclose(few.probs, all_of_them.probs[:, :4], atol=1e-4)


def test_the_tail_at_other_temperatures_errs_to_the_side_that_the_docstring_says() -> None:
    for temperature, sign in ((0.5, 1), (2.0, -1)):
        labels, (ids_RK, _) = labels_of(5, SamplingParams(temperature=temperature)), random_rows(20, 5, seed=1)
        for row, logprobs in enumerate(random_logprobs(20, seed=1).tolist()):
            served = served_by_hand(logprobs, SamplingParams(temperature=temperature))
            tail = sum(probability for token, probability in served.items() if token not in ids_RK[row].tolist())
            assert sign * (labels.tail[row].item() - tail) > -3e-3
            assert abs(labels.tail[row].item() - tail) < 0.25


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_low_temperature_leaves_the_likeliest_token(top_p: float) -> None:
    """There the served weight of every token is 0 in float32, unless the likeliest is less than about 1/e."""
    ids_RK, logprobs_RK = torch.tensor([[0, 2, 3]], dtype=torch.int32), torch.tensor([[-1.6, -1.7, -2.5]]).half()
    sampling = SamplingParams(temperature=0.01, top_p=top_p)
    labels = make_labels(ids_RK, logprobs_RK, torch.zeros(1, dtype=torch.bool), sampling, DRAFT_IDS)
    assert labels.probs[0].tolist() == pytest.approx([1, 0, 0], abs=1e-3)
    assert labels.tail.item() == pytest.approx(0, abs=1e-6)


def test_the_tail_is_that_of_no_more_tokens_than_there_are() -> None:
    """Rounding of the kept log-probabilities leaves a mass that is far above the least kept token's."""
    ids_RK, logprobs_RK = torch.tensor([[0, 2, 3]], dtype=torch.int32), torch.tensor([[-0.1055, -2.305, -25.0]]).half()
    sampling = SamplingParams(temperature=2.0)
    labels = make_labels(ids_RK, logprobs_RK, torch.zeros(1, dtype=torch.bool), sampling, DRAFT_IDS)
    assert 0 < labels.tail.item() < (V - 3) * math.exp(-25 / 2)


def test_a_greedy_request_is_distilled_at_temperature_one_whatever_its_other_parameters() -> None:
    odd = labels_of(4, SamplingParams(temperature=0.0, top_k=1, top_p=0.1))
    plain = labels_of(4, SamplingParams())
    assert torch.equal(odd.probs, plain.probs)
    assert torch.equal(odd.tail, plain.tail)


def test_rows_without_a_distribution_and_constrained_rows_have_no_label() -> None:
    for sampling in SAMPLINGS:
        ids_RK, logprobs_RK = random_rows(3, 4, seed=3)
        ids_RK[0], logprobs_RK[0] = -1, float("-inf")
        constrained_R = torch.tensor([False, True, False])
        labels = make_labels(ids_RK, logprobs_RK, constrained_R, sampling, DRAFT_IDS)
        assert labels.labelled.tolist() == [False, False, True]
        assert not labels.probs[:2].any()
        assert not labels.tail[:2].any()
        assert torch.isfinite(labels.tail).all()
        assert labels.probs[2].sum() > 0 or sampling.top_p < 1 or sampling.top_k


def test_a_row_with_fewer_tokens_than_columns() -> None:
    ids_RK = torch.tensor([[3, 5, -1, -1]], dtype=torch.int32)
    logprobs_RK = torch.tensor([[0.75, 0.25, 0, 0]]).log().half()
    labels = make_labels(ids_RK, logprobs_RK, torch.zeros(1, dtype=torch.bool), SamplingParams(), DRAFT_IDS)
    assert labels.probs[0].tolist() == pytest.approx([0.75, 0.25, 0, 0], abs=1e-3)
    assert labels.tail.item() == pytest.approx(0, abs=1e-3)


def test_the_draft_is_compared_at_the_temperature_at_which_it_proposes() -> None:
    labels = labels_of(4, SamplingParams(temperature=0.5), num_rows=2)
    logits_RD = torch.randn(2, 6)
    assert torch.equal(labels.tempered(logits_RD), logits_RD / 0.5)
    assert torch.equal(labels_of(4, GREEDY, num_rows=2).tempered(logits_RD), logits_RD)


# -- verdicts ----------------------------------------------------------------------------------------------------------


def round_trace(rounds: list[dict[str, Any]], *, T: int = 12, first_position: int = 0, seed: int = 0) -> Trace:
    """A trace over tokens 0…5 with these rounds: position, tokens, parents."""
    P = max((len(each["tokens"]) for each in rounds), default=0)
    trace = make_trace(seed, T=T, R=0, P=P, K=4, labelled_from=0, first_position=first_position)
    trace = dataclasses.replace(trace, token_ids=np.random.default_rng(seed).integers(0, 6, T).astype(np.int32))
    tokens = np.full((len(rounds), P), -1, np.int32)
    parents = np.tile(np.arange(-1, P - 1, dtype=np.int8), (len(rounds), 1))
    for row, each in enumerate(rounds):
        tokens[row, : len(each["tokens"])] = each["tokens"]
        parents[row, : len(each["tokens"])] = each["parents"]
    return with_rounds(
        trace,
        position=np.array([each["position"] for each in rounds], np.int32),
        draft_tokens=tokens,
        draft_parents=parents,
        draft_logprobs=-np.abs(np.random.default_rng(seed).normal(size=tokens.shape)).astype(np.float16),
        num_accepted=np.zeros(len(rounds), np.int8),
        draft_version=np.arange(1, len(rounds) + 1, dtype=np.int32),
    )


def verdicts_by_hand(trace: Trace, *, first_base: int) -> set[tuple[int, int, int, bool, int, float]]:
    """Walk each node's path from the root; judged when all tokens before it on the path were committed."""
    found = set()
    text, start = trace.token_ids.tolist(), trace.header.first_position
    rounds = trace.rounds
    for row in range(len(rounds.position)):
        for node, token in enumerate(rounds.draft_tokens[row].tolist()):
            if token < 0:
                continue
            path, parent = [token], int(rounds.draft_parents[row, node])
            while parent >= 0:
                path.insert(0, int(rounds.draft_tokens[row, parent]))
                parent = int(rounds.draft_parents[row, parent])
            at = int(rounds.position[row]) - start + 1
            committed = text[at : at + len(path)]
            if len(committed) < len(path) or path[:-1] != committed[:-1]:
                continue
            base = at - 2
            if base >= first_base and token in TARGET_IDS:
                logprob = float(rounds.draft_logprobs[row, node])
                found.add((base - first_base, len(path) - 1, token, token == committed[-1], row + 1, logprob))
    return found


def as_set(trace: Trace, *, first_base: int) -> set[tuple[int, int, int, bool, int, float]]:
    verdicts = make_verdicts(trace, DRAFT_IDS, first_base=first_base)
    columns = (
        verdicts.bases,
        verdicts.steps,
        verdicts.draft_ids,
        verdicts.accepted,
        verdicts.versions,
        verdicts.logprobs,
    )
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    assert len(set(rows)) == len(rows)
    return {(base, step, TARGET_IDS[draft_id], *rest) for base, step, draft_id, *rest in rows}


@st.composite
def traces_with_trees(draw: st.DrawFn) -> Trace:
    T, first = 12, draw(st.integers(0, 5))
    positions = draw(st.lists(st.integers(0, T - 1), min_size=1, max_size=5, unique=True))
    rounds = []
    for position in sorted(positions):
        size = draw(st.integers(0, 6))
        tokens = draw(st.lists(st.integers(0, 5), min_size=size, max_size=size))
        parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
        rounds.append({"position": first + position, "tokens": tokens, "parents": parents})
    trace = round_trace(rounds, T=T, first_position=first, seed=draw(st.integers(0, 9)))
    check_trace(trace)
    return trace


@given(traces_with_trees(), st.integers(0, 4))
def test_verdicts_of_trees_are_those_of_every_path_walked_from_its_root(trace: Trace, first_base: int) -> None:
    expected = verdicts_by_hand(trace, first_base=first_base)
    duplicates = len(make_verdicts(trace, DRAFT_IDS, first_base=first_base)) != len(expected)
    if not duplicates:  # a tree that proposes one token twice under one parent has the same verdict twice
        assert as_set(trace, first_base=first_base) == expected


def test_what_no_draft_proposed_is_no_verdict_on_one() -> None:
    rounds = [{"position": position, "tokens": [0, 1], "parents": [-1, 0]} for position in (4, 7)]
    trace = round_trace(rounds)
    both = make_verdicts(trace, DRAFT_IDS, first_base=0)
    second = make_verdicts(with_rounds(trace, draft_version=np.array([NO_DRAFT, 2], np.int32)), DRAFT_IDS, first_base=0)
    assert set(both.versions.tolist()) == {1, 2}
    assert second.versions.tolist() == [version for version in both.versions.tolist() if version == 2]


def test_text_that_was_right_in_service_covers_the_bases_of_its_tokens() -> None:
    rounds = [{"position": position, "tokens": [0, 1, 2], "parents": [-1, 0, 1]} for position in (3, 7, 9)]
    served = with_rounds(
        round_trace(rounds, T=12),
        draft_version=np.array([NO_DRAFT, 2, NO_DRAFT], np.int32),
        num_accepted=np.array([3, 3, 2], np.int8),
    )
    # Position 3 is drafted by the chain of base 2; the draft's own round covers nothing.
    assert make_text_ahead(served, first_base=0, num_bases=10).tolist() == [0, 0, 3, 2, 1, 0, 0, 0, 2, 1]
    assert make_text_ahead(served, first_base=4, num_bases=5).tolist() == [1, 0, 0, 0, 2], "it may begin in the run"


def test_a_chain_is_judged_up_to_its_first_rejection() -> None:
    trace = round_trace([], T=10, seed=3)
    text = trace.token_ids.tolist()
    wrong = (text[6] + 1) % 6
    chain = {"position": 4, "tokens": [text[5], wrong, text[7]], "parents": [-1, 0, 1]}
    verdicts = make_verdicts(
        round_trace([chain], T=10, seed=3), draft_ids_by_target_id(torch.zeros(6).long(), V), first_base=2
    )
    assert verdicts.bases.tolist() == [1, 1], "the chain of position 4 starts at base 3"
    assert verdicts.steps.tolist() == [0, 1]
    assert verdicts.draft_ids.tolist() == [text[5], wrong]
    assert verdicts.accepted.tolist() == [True, False]


def test_proposals_beyond_the_span_or_the_draft_vocabulary_have_no_verdict() -> None:
    trace = round_trace([{"position": 10, "tokens": [0, 0, 0], "parents": [-1, -1, 0]}], T=12)
    trace = dataclasses.replace(trace, token_ids=np.zeros(12, np.int32))
    assert make_verdicts(trace, DRAFT_IDS, first_base=0).steps.tolist() == [0, 0]
    assert (
        len(make_verdicts(with_rounds(trace, draft_tokens=np.full((1, 3), 4, np.int32)), DRAFT_IDS, first_base=0)) == 0
    )
    assert (
        len(make_verdicts(with_rounds(trace, draft_tokens=np.full((1, 3), 999, np.int32)), DRAFT_IDS, first_base=0))
        == 0
    )
    assert len(make_verdicts(trace, DRAFT_IDS, first_base=10)) == 0
    assert len(make_verdicts(round_trace([]), DRAFT_IDS, first_base=0)) == 0

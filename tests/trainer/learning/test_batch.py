"""Labels of every step of every chain, and of tree proposals, against the target itself, run on the text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from speculator.draft.eagle3 import Eagle3Draft
from speculator.draft.sampling_params import SamplingParams
from speculator.draft.verification import served_logits
from speculator.errors import TraceError
from speculator.trace import Trace
from tests.fixtures.traces import with_rounds
from tests.trainer.answers import PROMPT_TOKENS
from tests.trainer.examples import batch_of, example_of
from trainer.learning.batch import Batch, Window, make_example, pack
from trainer.learning.labels import draft_ids_by_target_id
from trainer.learning.ttt import unroll

DEPTH = 3
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6, top_k=8),
    SamplingParams(temperature=1.0, top_p=0.5),
]


def served_as(trace: Trace, sampling: SamplingParams) -> Trace:
    return dataclasses.replace(trace, header=msgspec.structs.replace(trace.header, sampling=sampling))


def part_of(trace: Trace, start: int, end: int) -> Trace:
    """The positions start … end − 1 of a trace without rounds."""
    return dataclasses.replace(
        trace,
        header=msgspec.structs.replace(trace.header, first_position=trace.header.first_position + start),
        token_ids=trace.token_ids[start:end],
        aux_hidden=trace.aux_hidden[start:end],
        target_topk_ids=trace.target_topk_ids[start:end],
        target_topk_logprobs=trace.target_topk_logprobs[start:end],
        constrained=trace.constrained[start:end],
    )


def served_after(target: LlamaForCausalLM, text: Sequence[int], sampling: SamplingParams) -> Tensor:
    """[V]: the distribution that the target serves after `text`, by running it on all of it."""
    if sampling.temperature == 0:
        sampling = SamplingParams(temperature=1.0)
    with torch.no_grad():
        logits = target(torch.tensor([list(text)])).logits[0, -1]
    return served_logits(logits, sampling).softmax(-1)


def label_of(batch: Batch, draft: Eagle3Draft, row: int) -> Tensor:
    """[V]: the label of a row, spread out over the target's vocabulary, at the size of served probabilities."""
    spread = torch.zeros(draft.config.vocab_size)
    labels = batch.labels[torch.tensor([row])]
    spread.index_add_(0, draft.target_ids[labels.draft_ids[0]], labels.probs[0] * (1 - labels.tail[0]))
    return spread


def assert_label_is(spread: Tensor, served: Tensor, draft: Eagle3Draft, *, num_kept: int) -> None:
    """Equal on the kept tokens of the draft vocabulary, zero on all others."""
    kept = torch.zeros_like(served, dtype=torch.bool)
    kept[served.topk(num_kept).indices] = True
    kept &= torch.isin(torch.arange(len(served)), draft.target_ids)
    torch.testing.assert_close(spread[kept], served[kept], rtol=0.02, atol=2e-3)
    assert not spread[~kept & (served < served.topk(num_kept).values[-1])].any()


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_step_of_every_chain_is_labelled_with_what_the_target_serves_there(
    target: LlamaForCausalLM, draft: Eagle3Draft, traces: list[Trace], sampling: SamplingParams
) -> None:
    """Two answers of different length in one batch, all states of all chains: no padding, no shift, none left out."""
    num_kept = traces[0].target_topk_ids.shape[1]
    answers = [served_as(traces[0], sampling), served_as(part_of(traces[1], 0, 20), sampling)]
    batch = batch_of(answers, draft)
    everything = torch.ones(len(batch.rows), DEPTH, dtype=torch.bool)
    places = [(trace, base) for trace in answers for base in range(PROMPT_TOKENS - 2, len(trace.token_ids) - 2)]
    expected = {
        (chain, step)
        for chain, (trace, base) in enumerate(places)
        for step in range(DEPTH)
        if base + 2 + step < len(trace.token_ids)
    }
    assert places[0][1] + 1 == PROMPT_TOKENS - 1, (
        "the chain of the answer's second token starts at the prompt's last one"
    )
    seen = set()
    with torch.no_grad():
        for proposals in unroll(draft, batch, num_steps=DEPTH, wanted_NK=everything):
            for chain, row in zip(proposals.chains.tolist(), proposals.label_rows.tolist(), strict=True):
                seen.add((chain, proposals.step))
                if chain % 5 and chain < len(places) - 3:
                    continue  # running the target on every prefix takes long; the last chains matter most
                trace, base = places[chain]
                served = served_after(target, trace.token_ids[: base + 2 + proposals.step].tolist(), sampling)
                assert_label_is(label_of(batch, draft, row), served, draft, num_kept=num_kept)
    assert seen == expected


def with_trees(trace: Trace, seed: int) -> Trace:
    """The same text, with rounds that proposed random trees around it."""
    rng = np.random.default_rng(seed)
    P, text, last = 7, trace.token_ids.tolist(), len(trace.token_ids) - 1
    position, tokens, parents = [], [], []
    at = PROMPT_TOKENS
    while at < last:
        tree_tokens, tree_parents, depths = [], [], []
        for node in range(P):
            parent = int(rng.integers(-1, node)) if node else -1
            depth = depths[parent] + 1 if parent >= 0 else 0
            right = text[at + 1 + depth] if at + 1 + depth <= last else 0
            taken = [t for t, p in zip(tree_tokens, tree_parents, strict=True) if p == parent]
            token = right if rng.random() < 0.5 and right not in taken else int(rng.integers(0, 47))
            while token in taken:
                token = int(rng.integers(0, 47))
            tree_tokens.append(token)
            tree_parents.append(parent)
            depths.append(depth)
        position.append(at)
        tokens.append(tree_tokens)
        parents.append(tree_parents)
        at += int(rng.integers(1, 4))
    R = len(position)
    return with_rounds(
        trace,
        position=np.array(position, np.int32),
        draft_tokens=np.array(tokens, np.int32),
        draft_parents=np.array(parents, np.int8),
        draft_logprobs=-rng.exponential(1.0, (R, P)).astype(np.float16),
        num_accepted=np.zeros(R, np.int8),
        draft_version=np.ones(R, np.int32),
    )


def test_tree_proposals_are_labelled_with_what_the_target_serves_behind_their_own_path(
    target: LlamaForCausalLM, draft: Eagle3Draft, traces: list[Trace]
) -> None:
    """Each node's path is read by the target as it was proposed; a verdict's state must have that very distribution."""
    trace = with_trees(traces[2], seed=5)
    sampling = trace.header.sampling
    batch = batch_of([trace], draft)
    first_base = PROMPT_TOKENS - 2
    draft_ids = {int(target_id): draft_id for draft_id, target_id in enumerate(draft.target_ids)}
    expected = []
    text, rounds = trace.token_ids.tolist(), trace.rounds
    for row in range(len(rounds.position)):
        at = int(rounds.position[row])
        for node in range(rounds.draft_tokens.shape[1]):
            path: list[int] = []
            parent = int(rounds.draft_parents[row, node])
            while parent >= 0:
                path.insert(0, int(rounds.draft_tokens[row, parent]))
                parent = int(rounds.draft_parents[row, parent])
            if path != text[at + 1 : at + 1 + len(path)] or at + 1 + len(path) >= len(text):
                continue  # proposed behind a rejected token: the trace does not have the target's verdict
            token = int(rounds.draft_tokens[row, node])
            if token in draft_ids:
                accepted = token == text[at + 1 + len(path)]
                expected.append((at - 1 - first_base, len(path), draft_ids[token], accepted, text[: at + 1] + path))
    verdicts = batch.verdicts
    actual = zip(
        *(c.tolist() for c in (verdicts.bases, verdicts.steps, verdicts.draft_ids, verdicts.accepted)), strict=True
    )
    assert sorted(actual) == sorted(row[:4] for row in expected)
    assert {step for _, step, *_ in expected} >= {0, 1, 2}
    assert sum(not accepted for *_, accepted, _ in expected) > 20
    num_kept = trace.target_topk_ids.shape[1]
    for base, step, _, _, read in expected[::3]:
        row = int(batch.rows[base]) + 1 + step
        served = served_after(target, read, sampling)
        assert_label_is(label_of(batch, draft, row), served, draft, num_kept=num_kept)


def test_a_window_has_the_verdicts_of_its_own_chains(draft: Eagle3Draft, traces: list[Trace]) -> None:
    examples = [example_of(with_trees(trace, seed=1), draft) for trace in traces[:2]]
    windows = [Window(example=examples[0], start=5, num_bases=12), Window(example=examples[1], start=0, num_bases=9)]
    batch = pack(windows, max_context=64)
    for window, first in zip(windows, (0, 12), strict=True):
        whole = window.example.verdicts
        inside = (whole.bases >= window.start) & (whole.bases < window.start + window.num_bases)
        here = (batch.verdicts.bases >= first) & (batch.verdicts.bases < first + window.num_bases)
        assert torch.equal(batch.verdicts[here].bases - first + window.start, whole[inside].bases)
        assert torch.equal(batch.verdicts[here].draft_ids, whole[inside].draft_ids)
    assert len(batch.verdicts) < sum(len(example.verdicts) for example in examples)


def test_the_answer_begins_at_the_prompts_last_position(draft: Eagle3Draft, traces: list[Trace]) -> None:
    example = example_of(traces[0], draft)
    assert example.first_base + example.answer_base == PROMPT_TOKENS - 1
    later = example_of(part_of(traces[0], 3, 40), draft)
    assert later.first_position + later.first_base + later.answer_base == PROMPT_TOKENS - 1


def test_a_nearly_greedy_trace_is_learned_from_as_a_greedy_one(traces: list[Trace], draft: Eagle3Draft) -> None:
    """Divided by its temperature of 0.01 its loss would be a hundred times that of other traces."""
    cold, greedy = (example_of(served_as(traces[0], SamplingParams(temperature=t)), draft) for t in (0.01, 0.0))
    assert cold.sampling.temperature == 0
    assert cold.labels.greedy.all()
    assert torch.equal(cold.labels.probs, greedy.labels.probs)
    assert (cold.labels.temperature == 1).all()


def test_a_trace_may_fill_the_drafts_window_and_not_exceed_it(traces: list[Trace], draft: Eagle3Draft) -> None:
    """Its end counts, and not its length: the span of a long answer begins late."""
    trace = part_of(traces[0], 3, 40)
    fits = {
        "draft_ids_V": draft_ids_by_target_id(draft.d2t, draft.config.vocab_size),
        "feature_width": draft.fc.in_features,
    }
    assert make_example(trace, **fits, window=40).first_position == 3
    with pytest.raises(TraceError, match="ends at position 40, beyond the draft's window of 39"):
        make_example(trace, **fits, window=39)


def test_a_distribution_without_a_finite_probability_is_refused(traces: list[Trace], draft: Eagle3Draft) -> None:
    """Its label would not be a number."""
    logprobs = traces[0].target_topk_logprobs.copy()
    logprobs[20] = -np.inf
    with pytest.raises(TraceError, match="no finite probability"):
        example_of(dataclasses.replace(traces[0], target_topk_logprobs=logprobs), draft)

"""What is learned behind rejections, against the same text read one row at a time, by the target and by the draft."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from speculator.draft.eagle3 import Eagle3Draft, aux_layer_ids
from speculator.draft.sampling_params import SamplingParams
from speculator.errors import TraceError
from speculator.trace import BranchRows, Trace
from tests.fixtures.toy import random_draft
from tests.fixtures.traces import with_branches, with_rounds
from tests.trainer.answers import PROMPT_TOKENS, TOP_K
from tests.trainer.examples import batch_of, config_for, example_of
from tests.trainer.learning.test_batch import served_after, served_as, with_trees
from tests.trainer.learning.test_ttt_unroll import attend_causally
from trainer.learning.batch import Window, pack
from trainer.learning.losses.mix import DEFAULT_LOSS, PRESETS, LossMix
from trainer.learning.optimizer_step import Learner
from trainer.learning.ttt import ChainAttention, branch_logits, ttt_loss, unroll

SAMPLED = SamplingParams(temperature=0.7, top_k=8)
BOTH = "branch_forward_kl=0.5,branch_reverse_kl=2"


def path_of(trace: Trace, row: int) -> list[int]:
    """The proposals from the root to this row's, as nodes of its round."""
    assert trace.branches is not None
    round_, node = int(trace.branches.round[row]), int(trace.branches.node[row])
    path = []
    while node >= 0:
        path.insert(0, node)
        node = int(trace.rounds.draft_parents[round_, node])
    return path


def text_of(trace: Trace, row: int) -> list[int]:
    """All tokens up to this row's, which is the last."""
    assert trace.branches is not None
    round_ = int(trace.branches.round[row])
    proposed = trace.rounds.draft_tokens[round_, path_of(trace, row)]
    return [*trace.token_ids[: trace.rounds.position[round_] + 1].tolist(), *proposed.tolist()]


@torch.no_grad()
def verified(target: LlamaForCausalLM, trace: Trace, rounds: set[int] | None = None) -> Trace:
    """With rows of its rejected proposals as the target computes them."""
    trace = with_branches(trace, rounds=rounds, vocab_size=47)
    assert trace.branches is not None
    hidden, ids, logprobs = [], [], []
    for row in range(trace.num_branches):
        output = target(torch.tensor([text_of(trace, row)]), output_hidden_states=True)
        hidden.append(torch.cat([output.hidden_states[layer][0, -1] for layer in aux_layer_ids(8)]))
        top = output.logits[0, -1].log_softmax(-1).topk(TOP_K)
        ids.append(top.indices.int().numpy())
        logprobs.append(top.values.half().numpy())
    rows = dataclasses.replace(
        trace.branches, hidden=torch.stack(hidden).bfloat16(), topk_ids=np.stack(ids), topk_logprobs=np.stack(logprobs)
    )
    return dataclasses.replace(trace, branches=rows)


@pytest.fixture(scope="module")
def branched(target: LlamaForCausalLM, traces: list[Trace]) -> list[Trace]:
    found = [verified(target, with_trees(traces[0], 5)), verified(target, with_trees(traces[1], 6), rounds={1, 2, 4})]
    rows = found[0].branches
    assert rows is not None
    deep = [len(path_of(found[0], row)) for row in range(len(rows))]
    assert max(deep) >= 3, "the case must have rejected proposals behind rejected ones"
    return [*found, traces[2]]


def last_row_of(trace: Trace) -> int:
    """Rows up to this one stand in the place of a base."""
    return len(trace.token_ids) - 3


def base_of(trace: Trace, row: int) -> int:
    """The position of the last committed token before it."""
    text = text_of(trace, row)
    assert trace.branches is not None
    position = int(trace.rounds.position[trace.branches.round[row]])
    same = [
        at
        for at in range(position, len(text))
        if text[position : at + 1] == trace.token_ids[position : at + 1].tolist()
    ]
    return same[-1]


def used_rows(trace: Trace) -> list[int]:
    return [row for row in range(trace.num_branches) if base_of(trace, row) <= last_row_of(trace)]


def logits_one_by_one(draft: Eagle3Draft, trace: Trace, row: int) -> Tensor:
    """The draft's logits behind one rejected proposal: all pairs of the text before it, then those of its path."""
    text, base = text_of(trace, row), base_of(trace, row)
    rows = trace.branches
    assert rows is not None
    features = [*trace.aux_hidden[: base + 1]]
    known = {(int(r), int(n)): at for at, (r, n) in enumerate(zip(rows.round, rows.node, strict=True))}
    round_ = int(rows.round[row])
    for node in path_of(trace, row)[:-1]:
        if (round_, node) in known:
            features.append(rows.hidden[known[round_, node]])
    assert len(features) == len(text) - 1
    positions = torch.arange(len(features))
    fused = draft.fuse(torch.stack(features))
    out = draft(torch.tensor([text[1:]]), fused[None], positions[None], attend_causally)[0]
    return draft.logits(out[-1])


def logits_of(draft: Eagle3Draft, traces: list[Trace]) -> Tensor:
    batch = batch_of(traces, draft)
    assert batch.branches is not None
    attention = ChainAttention.of(draft, batch)
    next(unroll(draft, batch, num_steps=1, attention=attention))
    return branch_logits(draft, batch.branches, attention)


def test_behind_a_rejection_the_draft_reads_what_it_would_in_service(draft: Eagle3Draft, branched: list[Trace]) -> None:
    """Trees, two answers with rows beside one without: no row sees another span, or what was committed in its place."""
    with torch.no_grad():
        expected = [logits_one_by_one(draft, trace, row) for trace in branched for row in used_rows(trace)]
        actual = logits_of(draft, branched)
    assert len(expected) > 60
    torch.testing.assert_close(actual, torch.stack(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), SAMPLED])
def test_its_label_is_what_the_target_serves_behind_the_proposal(
    target: LlamaForCausalLM, draft: Eagle3Draft, branched: list[Trace], sampling: SamplingParams
) -> None:
    trace = served_as(branched[1], sampling)
    pairs = batch_of([trace], draft).branches
    assert pairs is not None
    for at, row in enumerate(used_rows(trace)):
        served = served_after(target, text_of(trace, row), sampling)[draft.target_ids]
        spread = torch.zeros(len(draft.target_ids))
        spread.index_add_(0, pairs.labels.draft_ids[at], pairs.labels.probs[at] * (1 - pairs.labels.tail[at]))
        kept = spread > 0
        assert kept.any()
        torch.testing.assert_close(spread[kept], served[kept], rtol=0.02, atol=2e-3)
        assert (served[~kept] <= spread[kept].min() + 2e-3).all()


def kl_of(logits_D: Tensor, ids: list[int], probs: list[float], tail: float) -> tuple[float, float]:
    """Forward KL without its constant, and reverse KL, over the draft vocabulary in Python floats."""
    q = logits_D.double().softmax(-1).tolist()
    p = {token: probability for token, probability in zip(ids, probs, strict=True) if probability > 0}
    forward = -sum(probability * math.log(q[token]) for token, probability in p.items())
    rest = max(tail / len(q), 1e-6)
    priced = [max((1 - tail) * p[token], 1e-6) if token in p else rest for token in range(len(q))]
    reverse = sum(p.values()) * sum(
        of_q * (math.log(of_q) - math.log(of_p)) for of_q, of_p in zip(q, priced, strict=True)
    )
    return forward, reverse


def test_its_loss_is_both_divergences_over_the_labelled_positions(draft: Eagle3Draft, branched: list[Trace]) -> None:
    answers = [served_as(trace, SAMPLED) for trace in branched]
    batch, mix = batch_of(answers, draft), LossMix.parse(BOTH)
    with torch.no_grad():
        found = ttt_loss(draft, batch, mix, num_steps=2, baseline=0.0)
        logits_BD = logits_of(draft, answers) / SAMPLED.temperature
    pairs = batch.branches
    assert pairs is not None
    labels = zip(pairs.labels.draft_ids.tolist(), pairs.labels.probs.tolist(), pairs.labels.tail.tolist(), strict=True)
    divergences = [kl_of(logits_D, *of_row) for logits_D, of_row in zip(logits_BD, labels, strict=True)]
    expected = sum(0.5 * forward + 2 * reverse for forward, reverse in divergences) / found.num_labels
    assert found.loss.item() == pytest.approx(expected, rel=1e-4)
    assert found.num_branches == len(pairs) == sum(len(used_rows(trace)) for trace in answers)


def test_its_gradient_is_that_of_the_same_loss_one_row_at_a_time(draft: Eagle3Draft, branched: list[Trace]) -> None:
    """Through the rows' own pairs, through those before them on their path, and through the keys of the text."""
    mix, trace = LossMix.parse("branch_forward_kl=1"), branched[1]
    batch = batch_of([trace], draft)
    pairs = batch.branches
    assert pairs is not None
    found = ttt_loss(draft, batch, mix, num_steps=1, baseline=0.0)
    weights = [draft.fc.weight, draft.midlayer.self_attn.k_proj.weight, draft.midlayer.mlp.down_proj.weight]
    actual = torch.autograd.grad(found.loss, weights)
    slow = torch.zeros(())
    for at, row in enumerate(used_rows(trace)):
        log_q_D = logits_one_by_one(draft, trace, row).log_softmax(-1)
        slow = slow - (pairs.labels.probs[at] * log_q_D[pairs.labels.draft_ids[at]]).sum() / found.num_labels
    for of_batch, one_by_one in zip(actual, torch.autograd.grad(slow, weights), strict=True):
        assert one_by_one.abs().max() > 0
        torch.testing.assert_close(of_batch, one_by_one, rtol=1e-3, atol=1e-5)


def test_without_such_a_term_the_rows_change_nothing(draft: Eagle3Draft, branched: list[Trace]) -> None:
    bare = [dataclasses.replace(trace, branches=None) for trace in branched]
    for text in (DEFAULT_LOSS, f"{DEFAULT_LOSS},discard=1"):
        mix = LossMix.parse(text)
        losses = [
            ttt_loss(draft, batch_of(traces, draft), mix, num_steps=3, baseline=0.0) for traces in (branched, bare)
        ]
        assert losses[0].loss.item() == losses[1].loss.item()
        assert losses[0].num_branches == 0
    with_term = LossMix.parse(PRESETS["branches"])
    more = [
        ttt_loss(draft, batch_of(traces, draft), with_term, num_steps=3, baseline=0.0) for traces in (branched, bare)
    ]
    assert more[0].loss.item() > more[1].loss.item() + 0.1


@pytest.mark.parametrize("term", ["branch_forward_kl", "branch_reverse_kl"])
def test_a_draft_learns_what_the_target_says_behind_rejections(
    model_dir: Path, branched: list[Trace], tmp_path: Path, term: str
) -> None:
    config = config_for(model_dir, tmp_path, autocast=False, loss=f"{DEFAULT_LOSS},{term}=1")
    learner = Learner(random_draft(model_dir, seed=3, draft_vocab_size=30), config)
    mix, batch = LossMix.parse(f"{term}=1"), batch_of(branched[:2], learner.draft)

    def loss() -> float:
        with torch.no_grad():
            return float(ttt_loss(learner.draft, batch, mix, num_steps=1, baseline=0.0).loss)

    before = loss()
    reports = [learner.step(batch) for _ in range(30)]
    assert all(report.applied and report.num_branches > 0 for report in reports)
    assert loss() < 0.9 * before


def test_a_window_takes_the_rows_of_its_own_bases(draft: Eagle3Draft, branched: list[Trace]) -> None:
    trace, example = branched[0], example_of(branched[0], draft)
    first = example.first_base
    start, num_bases = 8, 10
    batch = pack([Window(example=example, start=start, num_bases=num_bases)], max_context=512)
    attention = ChainAttention.of(draft, batch)
    rows = [row for row in used_rows(trace) if start <= base_of(trace, row) - first < start + num_bases]
    assert 0 < len(rows) < len(used_rows(trace))
    assert batch.branches is not None
    assert batch.branches.token_ids.tolist() == [text_of(trace, row)[-1] for row in rows]
    with torch.no_grad():
        next(unroll(draft, batch, num_steps=1, attention=attention))
        actual = branch_logits(draft, batch.branches, attention)
        expected = torch.stack([logits_one_by_one(draft, trace, row) for row in rows])
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_where_the_answer_is_constrained_they_have_no_label(draft: Eagle3Draft, branched: list[Trace]) -> None:
    trace = branched[0]
    constrained = np.arange(len(trace.token_ids)) >= PROMPT_TOKENS + 10
    pairs = batch_of([dataclasses.replace(trace, constrained=constrained)], draft).branches
    assert pairs is not None
    expected = [base_of(trace, row) < PROMPT_TOKENS + 10 for row in used_rows(trace)]
    assert True in expected
    assert False in expected
    assert pairs.labels.labelled.tolist() == expected
    assert not pairs.labels.probs[~pairs.labels.labelled].any()


def test_their_memory_counts(draft: Eagle3Draft, branched: list[Trace]) -> None:
    trace = branched[0]
    bare = example_of(dataclasses.replace(trace, branches=None), draft)
    more = example_of(trace, draft).num_bytes - bare.num_bytes
    assert more > trace.num_branches * (2 * trace.aux_hidden.shape[1] + TOP_K * (8 + 4))


@pytest.mark.parametrize("what", ["topk_ids", "draft_tokens", "topk_logprobs"])
def test_rows_that_the_draft_cannot_learn_from_cost_the_trace(
    draft: Eagle3Draft, branched: list[Trace], what: str
) -> None:
    trace = branched[1]
    rows = trace.branches
    assert rows is not None
    if what == "draft_tokens":
        tokens = trace.rounds.draft_tokens.copy()
        tokens[rows.round[0], rows.node[0]] = 47
        bad = with_rounds(trace, draft_tokens=tokens)
    else:
        array = getattr(rows, what).copy()
        array[0] = 47 if what == "topk_ids" else -np.inf
        changed: BranchRows = dataclasses.replace(rows, **{what: array})
        bad = dataclasses.replace(trace, branches=changed)
    with pytest.raises(TraceError, match="behind a rejection"):
        example_of(bad, draft)

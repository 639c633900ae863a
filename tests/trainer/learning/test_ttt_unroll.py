"""Chains over a packed batch against chains that are drafted one by one, as in service."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from speculator.draft.eagle3 import Eagle3Draft
from speculator.errors import TraceError
from speculator.trace import Trace
from tests.fixtures.drafts import CONFIG, TARGET_IDS, make_draft
from tests.fixtures.traces import make_trace
from tests.trainer.examples import batch_of, example_of
from trainer.learning.batch import Batch, cut, pack
from trainer.learning.ttt import unroll
from trainer.release.gate import accept_probabilities

DEPTH = 4
Steps = dict[tuple[int, int], Tensor]


def draftable_trace(seed: int, *, T: int = 24, num_prompt_tokens: int = 5, first_position: int = 0) -> Trace:
    """Only tokens that the draft could propose, so that some chains survive; no constrained rows."""
    rng = np.random.default_rng(seed)
    labelled_from = max(num_prompt_tokens - 1 - first_position, 0)
    trace = make_trace(
        seed, T=T, R=1, labelled_from=labelled_from, num_prompt_tokens=num_prompt_tokens, first_position=first_position
    )
    ids = np.stack([rng.permutation(CONFIG.vocab_size)[:4] for _ in range(T)]).astype(np.int32)
    ids[:labelled_from] = -1
    return dataclasses.replace(
        trace,
        token_ids=rng.choice(TARGET_IDS[:3].numpy(), T).astype(np.int32),
        target_topk_ids=ids,
        constrained=np.zeros(T, np.bool_),
    )


def first_base_of(trace: Trace) -> int:
    """The base before the first row with a distribution, by the row's own index in the span."""
    rows = [row for row in range(len(trace.token_ids)) if trace.target_topk_ids[row, 0] >= 0]
    return max(rows[0] - 1, 0)


def attend_causally(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def draft_one_by_one(draft: Eagle3Draft, trace: Trace) -> Steps:
    """Logits of every step of every chain, by (base index in the span, step), the chain's whole history recomputed."""
    first, tokens = trace.header.first_position, torch.from_numpy(trace.token_ids).long()
    target_ids = draft.target_ids.tolist()
    steps: Steps = {}
    for base in range(first_base_of(trace), len(tokens) - 2):
        fused = draft.fuse(trace.aux_hidden[: base + 1])
        for step in range(DEPTH):
            if base + 2 + step >= len(tokens) or trace.constrained[base + 1 + step]:
                break
            positions = torch.arange(len(fused)) + first
            out = draft(tokens[1 : 1 + len(fused)][None], fused[None], positions[None], attend_causally)[0]
            logits = draft.logits(out[-1])
            steps[base, step] = logits
            if target_ids[int(logits.argmax())] != tokens[base + 2 + step]:
                break
            # Its own output takes the place of the feature that nobody has computed yet.
            fused = torch.cat([fused, out[-1:]])
    return steps


def steps_of(draft: Eagle3Draft, batch: Batch, first_base: int) -> Steps:
    return {
        (first_base + int(chain), proposals.step): logits
        for proposals in unroll(draft, batch, num_steps=DEPTH)
        for chain, logits in zip(proposals.chains, proposals.logits, strict=True)
    }


def assert_same(actual: Steps, expected: Steps) -> None:
    assert actual.keys() == expected.keys()
    for key, logits in expected.items():
        torch.testing.assert_close(actual[key], logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("first_position", "switches"),
    [
        *((0, ()), (3, ()), (9, ()), (3, ("norm_before_fc", "norm_output")), (3, ("fc_norm",))),
        (3, ("norm_before_residual",)),
    ],
)
def test_chains_are_those_of_service(first_position: int, switches: tuple[str, ...]) -> None:
    draft = make_draft(1, **dict.fromkeys(switches, True))
    trace = draftable_trace(1, T=30, first_position=first_position)
    first_base = first_base_of(trace)
    with torch.no_grad():
        expected = draft_one_by_one(draft, trace)
        actual = steps_of(draft, batch_of([trace], draft), first_base)
    assert max(step for _, step in expected) >= 2, "the case must exercise deeper steps"
    assert (first_base, 0) in expected
    assert_same(actual, expected)


def test_spans_of_a_batch_do_not_see_each_other() -> None:
    draft = make_draft(1)
    traces = [draftable_trace(1), draftable_trace(2, T=11), draftable_trace(3, first_position=2)]
    with torch.no_grad():
        together = list(unroll(draft, batch_of(traces, draft), num_steps=DEPTH))
        alone = [list(unroll(draft, batch_of([trace], draft), num_steps=DEPTH)) for trace in traces]
    first = torch.cat([steps[0].logits for steps in alone])
    torch.testing.assert_close(together[0].logits, first, rtol=1e-4, atol=1e-4)
    assert len(together[1].chains) == sum(len(steps[1].chains) for steps in alone if len(steps) > 1)


def test_a_window_of_a_long_answer_is_that_part_of_the_whole() -> None:
    draft, trace = make_draft(1), draftable_trace(1, T=40)
    example = example_of(trace, draft)
    window = cut(example, max_bases=10, rng=random.Random(3))
    assert window.num_bases == 10
    assert window.start > 0
    with torch.no_grad():
        whole = steps_of(draft, batch_of([trace], draft), 0)
        part = steps_of(draft, pack([window], max_context=512), window.start)
    assert {base for base, _ in part} == set(range(window.start, window.start + 10))
    assert_same(part, {key: logits for key, logits in whole.items() if key in part})


def test_a_constrained_position_ends_chains_and_is_counted_nowhere() -> None:
    draft, trace = make_draft(1), draftable_trace(1, T=30)
    constrained = np.zeros(30, np.bool_)
    constrained[[8, 15]] = True
    trace = dataclasses.replace(trace, constrained=constrained)
    batch = batch_of([trace], draft)
    with torch.no_grad():
        first_base = first_base_of(trace)
        assert_same(steps_of(draft, batch, first_base), draft_one_by_one(draft, trace))
    _, labelled_N = accept_probabilities(draft, batch, depth=DEPTH, verification="target_only")
    assert (labelled_N.logical_not().nonzero()[:, 0] + first_base).tolist() == [7, 14]


def test_accepted_lengths_count_leading_hits() -> None:
    draft, trace = make_draft(1), draftable_trace(1, T=30)
    with torch.no_grad():
        expected = draft_one_by_one(draft, trace)
    batch = batch_of([trace], draft)
    accept_NK, _ = accept_probabilities(draft, batch, depth=DEPTH, verification="target_only")
    accepted_N = accept_NK.sum(1).long()
    tokens, target_ids = trace.token_ids, draft.target_ids.tolist()
    for chain, accepted in enumerate(accepted_N.tolist()):
        base = chain + first_base_of(trace)
        hits = [target_ids[int(z.argmax())] == tokens[b + 2 + k] for (b, k), z in expected.items() if b == base]
        assert accepted == sum(hits)


def test_traces_that_teach_nothing_are_refused() -> None:
    draft = make_draft()
    trace = draftable_trace(1)
    with pytest.raises(TraceError, match="no position"):
        example_of(draftable_trace(1, T=5), draft)
    with pytest.raises(TraceError, match="wide"):
        example_of(make_trace(d=4), draft)
    with pytest.raises(TraceError, match="vocabulary"):
        example_of(dataclasses.replace(trace, token_ids=trace.token_ids + 20), draft)
    with pytest.raises(TraceError, match="no position"):
        example_of(dataclasses.replace(trace, constrained=np.ones(24, np.bool_)), draft)


class Products(TorchDispatchMode):
    """The shapes of the matrix products that are computed within it."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[object, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            self.shapes.add((func, *(argument.shape for argument in args)))
        return func(*args, **kwargs or {})


def test_batches_of_other_sizes_multiply_matrices_of_the_same_shapes() -> None:
    """Each new shape would be a kernel to compile."""
    draft = make_draft()
    found = []
    for lengths in ((24, 30), (19, 22, 27), (40,)):
        traces = [draftable_trace(seed, T=T, num_prompt_tokens=3 + seed) for seed, T in enumerate(lengths)]
        batch = batch_of(traces, draft)
        wanted_NK = torch.ones(len(batch.rows), DEPTH, dtype=torch.bool)
        with Products() as products:
            chains = list(unroll(draft, batch, num_steps=DEPTH, wanted_NK=wanted_NK))
            sum(proposals.logits.sum() for proposals in chains).backward()
        found.append((len(batch.rows), products.shapes))
    assert len({num_bases for num_bases, _ in found}) == len(found)
    assert found[0][1] == found[1][1] == found[2][1] != set()

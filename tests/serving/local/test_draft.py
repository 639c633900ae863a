"""The draft in service computes what the reference network computes, over slots, for several requests together."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from serving.local.draft import FusedDraft, KernelDraft, Pairs, PairSpan, ServingDraft, StagedWeights
from serving.local.kernels.build import found_kernels
from serving.local.request import DraftSource, shared_draws
from speculator.draft.checkpoint import SWITCHES, apply_state, draft_state
from speculator.draft.eagle3 import Eagle3Draft
from speculator.draft.sampling_params import SamplingParams
from speculator.draft.verification import draws, gumbel
from speculator.proposals.planner import ChainRule, DraftStep
from tests.fixtures.decoding import emitted
from tests.fixtures.toy import make_toy_model, random_draft

SLOTS, LENGTH = 8, 64
# First slot, and by request how many pairs each reading has.
BATCHES = [
    (0, [[1, 1]]),
    (3, [[5, 1, 3]]),
    (0, [[4, 2], [4, 2]]),
    (0, [[9, 1], [2, 4], [30, 3]]),
    (2, [[1], [7], [3], [2]]),
    (0, [[12, 1], [3, 5], [1, 1], [7, 2], [7, 4], [2, 1], [11, 3], [2, 2]]),
]
CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Log-probabilities, whose logits are in the tens."""
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
SAMPLINGS = [SamplingParams(temperature=0), SamplingParams(temperature=0.7), SamplingParams(temperature=1.3, top_p=0.5)]


@pytest.fixture(
    scope="module",
    params=[
        *((32, ()), (256, ()), (32, ("norm_before_fc", "norm_output")), (256, SWITCHES)),
        *((32, ("norm_before_residual",)), (256, ("norm_before_residual",))),
    ],
    ids=lambda param: "-".join([str(param[0]), *param[1]]),
)
def draft(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Eagle3Draft:
    """In float32, with weights that bfloat16 can hold; its vocabulary is half the target's, out of order nowhere. Where
    there are kernels, they compute the wider one in bfloat16.
    """
    width, switches = request.param
    model_dir = make_toy_model(tmp_path_factory.mktemp("toy"), hidden_size=width)
    draft = random_draft(model_dir, seed=3, scale=0.4 * (32 / width) ** 0.5, switches=switches)
    for parameter in draft.parameters():
        parameter.data += 1.0 if parameter.ndim == 1 else 0.0
    apply_state(draft, draft_state(draft))
    assert not torch.equal(draft.target_ids, torch.arange(len(draft.target_ids)))
    return draft


def _serving(draft: Eagle3Draft, dtype: torch.dtype) -> ServingDraft:
    return ServingDraft(copy.deepcopy(draft).to(dtype), 1, num_slots=SLOTS, length=LENGTH)


class Reference:
    """One request over the plain network, which computes everything anew from all its pairs."""

    def __init__(self, draft: Eagle3Draft, seed: int, num_pairs: int) -> None:
        config, generator = draft.config, torch.Generator().manual_seed(seed)
        self._draft = draft
        self.tokens = torch.randint(config.vocab_size, (num_pairs,), generator=generator)
        aux = torch.randn(num_pairs, 3 * config.hidden_size, generator=generator)
        self.aux = aux.bfloat16().to(draft.norm.weight)  # the same numbers in every dtype
        self._pairs = [(self.tokens[None], draft.fuse(self.aux[None]))]

    def output(self) -> Tensor:
        """The output [1, d] at the newest pair."""
        tokens, features = (torch.cat(parts, 1) for parts in zip(*self._pairs, strict=True))
        positions = torch.arange(tokens.shape[1])[None]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        out: Tensor = self._draft(tokens, features, positions, attend)[:, -1]
        return out

    def draw(self, output: Tensor, position: int, source: DraftSource) -> tuple[int, float]:
        """The proposal at a position and its log-probability under the request's temperature."""
        tempered = SamplingParams(temperature=source.sampling.temperature)
        logits, ids = self._draft.logits(output)[0], self._draft.target_ids
        noise = torch.from_numpy(gumbel(draws(source.seed, position, self._draft.config.vocab_size)))[ids]
        chosen = int(emitted(logits, tempered, noise))
        scores = (logits.double() / (source.sampling.temperature or 1.0)).log_softmax(-1)
        return int(ids[chosen]), float(scores[chosen])

    def feed(self, token: int, output: Tensor) -> None:
        self._pairs.append((torch.tensor([[token]]), output[:, None]))


def _read(serving: ServingDraft, references: Sequence[Reference], first: int, counts: Sequence[Sequence[int]]) -> Pairs:
    """All readings but the last, one after the other; leftovers of rejected proposals lie behind what was read before,
    and where the pairs go that are returned.
    """
    features = torch.zeros(SLOTS, LENGTH + 3, references[0].aux.shape[1]).to(references[0].aux)
    for slot, reference in enumerate(references, first):
        features[slot, : len(reference.aux)] = reference.aux
    starts = [0] * len(counts)
    *readings, last = zip(*counts, strict=True)
    for reading in readings:
        serving.read(_pairs(references, starts, reading, first, features))
        starts = [start + count for start, count in zip(starts, reading, strict=True)]
        spans = [PairSpan(slot, start, 3) for slot, start in enumerate(starts, first)]
        serving.read(Pairs([1, 2, 3] * len(counts), spans, torch.randn_like(features)))
    return _pairs(references, starts, last, first, features)


def _pairs(
    references: Sequence[Reference], starts: Sequence[int], reading: Sequence[int], first: int, features: Tensor
) -> Pairs:
    spans = [PairSpan(*row) for row in zip(range(first, SLOTS), starts, reading, strict=False)]
    tokens = [token for one, span in zip(references, spans, strict=True) for token in one.tokens[span.start : span.end]]
    return Pairs([int(token) for token in tokens], spans, features)


def _propose(serving: ServingDraft, pairs: Pairs, sources: Sequence[DraftSource], num_steps: int) -> list[DraftStep]:
    """So many steps, whatever their probability."""
    return serving.propose(pairs, [1.0] * len(sources), sources, ChainRule([1.0] * num_steps, [-1.0] * num_steps))


def _output(serving: ServingDraft, pairs: Pairs, num_steps: int = 1) -> tuple[list[DraftStep], Tensor]:
    """Of a greedy chain, and the layer's output [B, d] for its last step."""
    batch = len(pairs.spans)
    steps: list[DraftStep] = []
    rule = ChainRule([1.0] * num_steps, [-1.0] * num_steps)
    while len(steps) < num_steps:
        found, output = serving.network.propose(pairs, rule.after(len(steps)), [1.0] * batch, None)
        pairs = pairs.followed_by(found, output)
        steps += found
    return steps, output[:batch].clone()


def _error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).double().norm() / theirs.double().norm())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@torch.inference_mode()
def test_what_was_read_gives_the_reference_networks_output(draft: Eagle3Draft, dtype: torch.dtype) -> None:
    serving, plain = _serving(draft, dtype), copy.deepcopy(draft).to(dtype)
    for first, counts in BATCHES:
        references = [Reference(plain, seed, sum(row)) for seed, row in enumerate(counts)]
        _, output = _output(serving, _read(serving, references, first, counts))
        assert output.dtype == dtype
        assert _error(output, torch.cat([one.output() for one in references])) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_samplings", [1, 3], ids=["greedy", "mixed"])
@torch.inference_mode()
def test_chains_are_the_references_with_its_log_probabilities(
    draft: Eagle3Draft, dtype: torch.dtype, num_samplings: int
) -> None:
    serving, plain = _serving(draft, dtype), copy.deepcopy(draft).to(dtype)
    for first, counts in BATCHES:
        references = [Reference(plain, seed, sum(row)) for seed, row in enumerate(counts)]
        sources = [DraftSource(SAMPLINGS[row % num_samplings], seed=row) for row in range(len(counts))]
        steps = _propose(serving, _read(serving, references, first, counts), sources, 5)
        assert len(steps) == 5
        for step, (ids, scores) in enumerate(steps):
            for row, reference in enumerate(references):
                output = reference.output()
                token, score = reference.draw(output, sum(counts[row]) + 1 + step, sources[row])
                assert ids[row] == token
                assert scores[row] == pytest.approx(score, abs=CLOSE[dtype])
                reference.feed(token, output)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("num_samplings", [1, 3], ids=["greedy", "mixed"])
@torch.inference_mode()
def test_a_chain_ends_where_its_rule_says(draft: Eagle3Draft, dtype: torch.dtype, num_samplings: int) -> None:
    """The same tokens as of a longer one, up to the first step whose reaches are too small together."""
    serving = _serving(draft, dtype)
    references = [Reference(copy.deepcopy(draft).to(dtype), seed, 5) for seed in range(3)]
    sources = [DraftSource(SAMPLINGS[row % num_samplings], seed=row) for row in range(3)]
    pairs = _read(serving, references, 2, [[3, 2]] * 3)
    whole = _propose(serving, pairs, sources, 5)
    factors, sums, reaches = [0.9, 1.5, 0.7, 1.0, 1.0], [], [1.0, 0.0, 0.5]
    for step in range(5):
        reaches = ChainRule(factors, [0.0] * 5).reached(step, reaches, whole[step].logprobs)
        sums.append(sum(reaches))
    for end in range(5):
        rule = ChainRule(factors, [0.99 * reach if step < end else 1.01 * reach for step, reach in enumerate(sums)])
        assert serving.propose(pairs, [1.0, 0.0, 0.5], sources, rule) == whole[: end + 1]
    assert serving.propose(pairs, [1.0, 0.0, 0.5], sources, ChainRule(factors[:2], [-1.0] * 2)) == whole[:2]


@torch.inference_mode()
def test_in_bfloat16_it_is_as_near_to_the_exact_result_as_the_reference(draft: Eagle3Draft) -> None:
    """Both round at every step, in different places."""
    rounded, serving = copy.deepcopy(draft).to(torch.bfloat16), _serving(draft, torch.bfloat16)
    has_kernels = draft.config.hidden_size == 256 and found_kernels() is not None
    assert isinstance(serving.network, KernelDraft if has_kernels else FusedDraft)
    outputs, scores = [], []
    for first, counts in BATCHES:
        exact, theirs = (
            [Reference(one, seed, sum(row)) for seed, row in enumerate(counts)] for one in (draft, rounded)
        )
        (step,), ours = _output(serving, _read(serving, theirs, first, counts))
        outputs.append([torch.cat([one.output() for one in exact]), ours, torch.cat([one.output() for one in theirs])])
        drawn = torch.searchsorted(draft.target_ids, torch.tensor(step.ids))[:, None]
        logits = draft.logits(ours.float()), rounded.logits(ours).float()
        scores += [[*logits[0].log_softmax(-1).gather(-1, drawn), *logits[1].log_softmax(-1).gather(-1, drawn)]]
        scores[-1] = [
            torch.cat(scores[-1][: len(drawn)]),
            torch.tensor(step.logprobs),
            torch.cat(scores[-1][len(drawn) :]),
        ]
    for wanted, ours, of_reference in (
        map(torch.cat, zip(*outputs, strict=True)),
        map(torch.cat, zip(*scores, strict=True)),
    ):
        assert 0 < _error(of_reference, wanted) < 0.1
        assert _error(ours, wanted) < 1.3 * _error(of_reference, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@torch.inference_mode()
def test_an_installed_version_computes_what_a_draft_that_started_with_it_does(
    draft: Eagle3Draft, dtype: torch.dtype
) -> None:
    other = copy.deepcopy(draft)
    for parameter in other.parameters():
        parameter.mul_(torch.linspace(0.5, 1.5, parameter.numel()).view_as(parameter))
    first, counts = BATCHES[-1]
    references = [Reference(copy.deepcopy(draft).to(dtype), seed, sum(row)) for seed, row in enumerate(counts)]
    swapped, fresh = _serving(draft, dtype), _serving(other, dtype)
    before, output = _output(swapped, _read(swapped, references, first, counts), 3)
    for serving in (swapped, fresh):
        serving.install(serving.stage(2, draft_state(other)))
    after = [_output(serving, _read(serving, references, first, counts), 3) for serving in (swapped, fresh)]
    assert after[0][0] != before
    assert not torch.equal(after[0][1], output)
    assert after[0][0] == after[1][0]
    assert torch.equal(after[0][1], after[1][1])


@torch.inference_mode()
def test_a_swap_that_fails_half_way_puts_the_previous_weights_back(draft: Eagle3Draft) -> None:
    serving, other = _serving(draft, torch.float32), copy.deepcopy(draft)
    for parameter in other.parameters():
        parameter.mul_(2)
    before = {name: (place.data_ptr(), place.clone()) for name, place in serving.storage.items()}
    staged = serving.stage(2, draft_state(other))
    *_, last = before
    broken = StagedWeights(2, {**staged.tensors, last: torch.zeros(3, 5, 7)})
    with pytest.raises(RuntimeError):
        serving.install(broken)
    assert serving.version == 1
    assert all(torch.equal(place, before[name][1]) for name, place in serving.storage.items())
    serving.install(staged)
    assert serving.version == 2
    assert not any(torch.equal(place, before[name][1]) for name, place in serving.storage.items())
    assert all(place.data_ptr() == before[name][0] for name, place in serving.storage.items()), "in place"


@torch.inference_mode()
def test_with_kernels_a_request_gets_the_same_bits_whatever_is_beside_it(draft: Eagle3Draft) -> None:
    serving = _serving(draft, torch.bfloat16)
    if not isinstance(serving.network, KernelDraft):
        pytest.skip("no kernels for this draft on this machine")
    references = [Reference(copy.deepcopy(draft).bfloat16(), seed, 30) for seed in range(3)]
    for num_steps in (1, 4):
        together, outputs = _output(serving, _read(serving, references, 0, [[29, 1], [26, 4], [27, 3]]), num_steps)
        for row, counts in enumerate(([30], [3, 27], [1, 28, 1])):
            alone, output = _output(serving, _read(serving, [references[row]], 4, [counts]), num_steps)
            assert torch.equal(output[0], outputs[row])
            assert alone == [DraftStep([ids[row]], [scores[row]]) for ids, scores in together]


def test_noise_is_drawn_once_for_draft_and_verification_and_is_the_positions_own() -> None:
    assert shared_draws(5, 7, 50) is shared_draws(5, 7, 50)
    for seed, position, size in ((5, 7, 50), (5, 8, 50), (6, 7, 50), (5, 7, 51)):
        assert np.array_equal(shared_draws(seed, position, size), draws(seed, position, size))
    with pytest.raises(ValueError, match="read-only"):
        shared_draws(5, 7, 50)[0] = 0.5

"""Text never changes: not with speculation, not with any draft, not with a swap in the middle of an answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from serving.engine import Chunk
from speculator.draft.eagle3 import Eagle3Draft
from speculator.draft.sampling_params import SamplingParams
from speculator.proposals.suffix_drafter import SuffixConfig, SuffixDrafter
from speculator.trace import Trace, check_trace
from tests.fixtures.decoding import WholeTrees
from tests.fixtures.toy import make_toy_model, random_draft
from tests.fixtures.waiting import wait_until
from tests.serving.local.harness import GREEDY, Harness, WatchedTarget, fixed_engine, takes_branches, toy_engine

PROMPTS = ["hello there", "a", "what is 2 and 2?", "the quick brown fox jumps over the lazy dog, twice."]
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, top_k=20)


def _constant(model_dir: Path) -> Eagle3Draft:
    """Always proposes the same token: nearly always rejected."""
    draft = random_draft(model_dir, seed=5, scale=0.0)
    draft.lm_head.weight.data[3] = 1.0
    return draft


def _texts(model_dir: Path, sampling: SamplingParams, **engine: object) -> list[list[int]]:
    with fixed_engine(model_dir, **engine) as harness:  # type: ignore[arg-type]
        requests = [harness.request(prompt, sampling=sampling, seed=7) for prompt in PROMPTS]
        return [answer.token_ids for answer in harness.ask(*requests)]


@pytest.fixture(scope="module", params=[GREEDY, SAMPLED], ids=["greedy", "sampled"])
def sampling(request: pytest.FixtureRequest) -> SamplingParams:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def plain(model_dir: Path, sampling: SamplingParams) -> list[list[int]]:
    return _texts(model_dir, sampling, depth=0)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_greedy_text_is_the_models_own(tmp_path: Path, family: str) -> None:
    model_dir = make_toy_model(tmp_path, family=family)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
    with fixed_engine(model_dir, depth=3) as harness:
        for prompt in PROMPTS:
            request = harness.request(prompt)
            tokens = list(request.prompt_token_ids)
            for _ in range(request.max_tokens):
                with torch.no_grad():
                    tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
            assert harness.ask(request)[0].token_ids == tokens[len(request.prompt_token_ids) :]


@pytest.mark.parametrize("depth", [1, 3, 5])
@pytest.mark.parametrize("kind", ["random", "constant"])
def test_no_draft_changes_the_text(
    model_dir: Path, plain: list[list[int]], sampling: SamplingParams, depth: int, kind: str
) -> None:
    draft = _constant(model_dir) if kind == "constant" else random_draft(model_dir, seed=11)
    assert _texts(model_dir, sampling, depth=depth, draft=draft, control_share=0.2) == plain


@pytest.mark.parametrize("min_confidence", [0.05, 0.2, 1.0])
def test_chains_that_end_early_change_no_text(
    model_dir: Path, plain: list[list[int]], sampling: SamplingParams, min_confidence: float
) -> None:
    assert _texts(model_dir, sampling, depth=5, min_confidence=min_confidence) == plain


@pytest.mark.parametrize("ends", [False, True], ids=["to the limit", "to an end"])
@pytest.mark.parametrize("slots", [1, 4])
def test_trees_change_no_text_and_their_branches_are_taken(
    model_dir: Path, sampling: SamplingParams, slots: int, ends: bool
) -> None:
    """Every tree is verified whole, whatever it takes; what is captured of a branch is what plain decoding computes,
    also where an answer ends inside of it.
    """
    seeds = range(6 if ends else 3)  # other answers to the same prompts leave texts that fork

    def ask(harness: Harness) -> list[list[int]]:
        harness.engine.tokenizer.end_token_ids = frozenset(range(0, 60, 9) if ends else ())
        answers = [
            harness.ask(*(harness.request(one, sampling=sampling, seed=seed, ignore_eos=not ends) for one in PROMPTS))
            for seed in seeds
        ]
        texts = [answer.token_ids for together in answers for answer in together]
        wait_until(lambda: len(harness.traces) == sum(len(text) > 1 for text in texts))
        return texts

    with fixed_engine(model_dir, planner=WholeTrees(), suffix_depth=8, slots=slots) as harness:
        # The gate soon leaves out the branches of texts as regular as a toy's.
        harness.engine.texts.drafter = SuffixDrafter(SuffixConfig(learns=False))
        texts = ask(harness)
        traces = {tuple(trace.token_ids): trace for trace in harness.traces}
        assert takes_branches(harness.traces)
    assert any((trace.rounds.draft_parents != _chain(trace)).any() for trace in harness.traces)
    with fixed_engine(model_dir, depth=0, slots=slots) as harness:
        assert ask(harness) == texts
        for trace in harness.traces:
            other = traces[tuple(trace.token_ids)]
            np.testing.assert_array_equal(trace.target_topk_ids, other.target_topk_ids)
            torch.testing.assert_close(trace.aux_hidden, other.aux_hidden)
            check_trace(other)


def _chain(trace: Trace) -> np.ndarray:
    return np.arange(-1, trace.rounds.draft_parents.shape[1] - 1)


def test_planned_rounds_and_suffix_trees_change_no_text(
    model_dir: Path, plain: list[list[int]], sampling: SamplingParams
) -> None:
    with toy_engine(model_dir, dtype="float64", control_share=0.1) as harness:
        for _ in range(3):
            requests = [harness.request(prompt, sampling=sampling, seed=7) for prompt in PROMPTS]
            assert [answer.token_ids for answer in harness.ask(*requests)] == plain
        assert harness.metric("slipstream_accepted_total", source="suffix", position="4") > 0


def test_one_at_a_time_is_the_same_as_together(
    model_dir: Path, plain: list[list[int]], sampling: SamplingParams
) -> None:
    with toy_engine(model_dir, dtype="float64", slots=1) as harness:
        requests = [harness.request(prompt, sampling=sampling, seed=7) for prompt in PROMPTS]
        assert [answer.token_ids for answer in harness.ask(*requests)] == plain


@pytest.mark.parametrize("without", [{1, 2}, {0, 1, 2, 3}], ids=["beside others", "alone"])
def test_a_request_that_declines_drafts_has_the_same_text_and_no_proposals(
    model_dir: Path, plain: list[list[int]], sampling: SamplingParams, without: set[int]
) -> None:
    heads = fixed_engine(model_dir)
    trees = toy_engine(model_dir, dtype="float64")
    for engine in (heads, trees):
        with engine as harness:
            for _ in range(2):  # text that could be proposed
                requests = [
                    harness.request(prompt, sampling=sampling, seed=7, drafts=number not in without)
                    for number, prompt in enumerate(PROMPTS)
                ]
                answers = harness.ask(*requests)
                assert [answer.token_ids for answer in answers] == plain
            proposed = {
                number for number, answer in enumerate(answers) if any(chunk.num_proposed for chunk in answer.chunks)
            }
            assert proposed == set(range(len(PROMPTS))) - without


def test_swaps_in_the_middle_change_no_text_and_are_stamped_on_the_rounds(
    model_dir: Path, plain: list[list[int]], sampling: SamplingParams
) -> None:
    with fixed_engine(model_dir) as harness:
        harness.drafts.update({version: random_draft(model_dir, seed=version) for version in (2, 3, 4)})
        left = [4, 3, 2]

        def swap(index: int, chunk: Chunk) -> None:
            # The event loop is blocked while this runs, so the swap lands between two chunks of open streams.
            if left and index == 0:
                version = left.pop()
                report = harness.engine.install_draft(version)
                assert (report.version, report.previous) == (version, version - 1)

        requests = [harness.request(prompt, sampling=sampling, seed=7) for prompt in PROMPTS]
        assert [answer.token_ids for answer in harness.ask(*requests, on_chunk=swap)] == plain
        wait_until(lambda: len(harness.traces) == len(requests))
        versions = {int(v) for trace in harness.traces for v in trace.rounds.draft_version}
        assert len(versions) > 1
        assert harness.metric("slipstream_draft_version") == 4
        assert harness.metric("slipstream_swaps_total", outcome="installed") == 3


def test_a_seed_gives_the_same_text_again_and_another_seed_another(model_dir: Path) -> None:
    with toy_engine(model_dir, dtype="float64") as harness:
        one, again, other = (
            harness.ask(harness.request("hello", sampling=SAMPLED, seed=seed))[0].token_ids for seed in (1, 1, 2)
        )
    assert one == again
    assert one != other


def test_the_target_is_never_touched(model_dir: Path) -> None:
    target = WatchedTarget(model_dir)
    weights = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    with toy_engine(model_dir, target=target) as harness:
        harness.drafts[2] = random_draft(model_dir, seed=2)
        harness.ask(harness.request("hello"))
        harness.engine.install_draft(2)
        harness.ask(harness.request("hello"))
    assert all(torch.equal(target.model.state_dict()[name], tensor) for name, tensor in weights.items())

"""Predicted acceptance against the rounds of the engine itself, with the same draft on the same requests."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest
import torch

from serving.engine import CapturePolicy, GenerateRequest
from speculator.draft.eagle3 import Eagle3Draft
from speculator.draft.sampling_params import SamplingParams
from speculator.trace import Trace
from tests.fixtures.toy import random_draft
from tests.serving.local.harness import fixed_engine
from tests.trainer.answers import answer_traces
from tests.trainer.examples import batch_of, config_for
from trainer.learning.batch import make_example
from trainer.learning.labels import draft_ids_by_target_id
from trainer.learning.optimizer_step import Learner
from trainer.release.acceptance import predict_acceptance, recorded_rounds
from trainer.statistics import Acceptance

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


def predicted(draft: Eagle3Draft, traces: list[Trace], depths: list[int], **changes: int) -> dict[int, Acceptance]:
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
    live = sum((recorded_rounds(trace) for trace in traces), Acceptance())
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
    live = sum((recorded_rounds(trace) for trace in traces), Acceptance())
    found = predicted(draft, traces, [DEPTH])[DEPTH]
    assert live.length > 1.1, "the case must have accepted proposals"
    assert found.length == pytest.approx(live.length, rel=0.05)
    assert found.rates[0] == pytest.approx(live.rates[0], abs=0.04)


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
    assert msgspec.json.decode(msgspec.json.encode(found), type=Acceptance) == found

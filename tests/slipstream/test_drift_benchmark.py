"""The drift benchmark's measure is the trace's own, and its trials count what they say."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import pytest
import torch

from benchmarks.drift import LEAD, WITHIN, Delays, Shift, acceptance, answers_of, false_alarms, mixture, shift_trial
from serving.engine import CapturePolicy, GenerateRequest
from speculator.sampling import SamplingParams
from tests.serving.local.harness import toy_engine
from tests.toy import random_draft
from tests.trainer.answers import answer_traces
from tests.trainer.examples import batch_of, config_for, example_of
from trainer.drift import SHORT, DriftMonitor
from trainer.provenance import provenance_of
from trainer.step import Learner

DEPTH, MIN_CONFIDENCE = 4, 0.15
HIGH, LOW = [(40, 100), (50, 100)], [(10, 100), (20, 100)]


def test_an_answer_decoded_again_has_the_acceptance_of_its_trace(toy_model: Path, tmp_path: Path) -> None:
    learner = Learner(
        random_draft(toy_model, seed=1, draft_vocab_size=40, scale=0.2),
        config_for(toy_model, tmp_path, autocast=False),
    )
    batch = batch_of(answer_traces(toy_model, num_traces=8), learner.draft)
    for _ in range(200):
        learner.step(batch)
    prompts = torch.randint(6, 47, (6, 6), generator=torch.Generator().manual_seed(0)).tolist()
    served = random_draft(toy_model, seed=1, draft_vocab_size=40)
    served.load_state_dict(learner.draft.state_dict())
    with toy_engine(toy_model, draft=served, depth=DEPTH, min_confidence=MIN_CONFIDENCE) as harness:
        for index, prompt in enumerate(prompts):
            harness.ask(
                GenerateRequest(
                    request_id=str(index),
                    prompt_token_ids=tuple(prompt),
                    max_tokens=40,
                    sampling=SamplingParams(temperature=0.0),
                    ignore_eos=True,
                    policy=CapturePolicy(),
                )
            )
        traces = harness.traces
    recorded = [provenance_of(trace) for trace in traces]
    examples = [example_of(trace, learner.draft) for trace in traces]
    found = answers_of(learner.draft, examples, depth=DEPTH, min_confidence=MIN_CONFIDENCE)
    assert sum(accepted for accepted, _ in found) > 10
    assert [tokens for _, tokens in found] == [one.num_completion_tokens for one in recorded]
    for (accepted, _), one in zip(found, recorded, strict=True):
        assert accepted == pytest.approx(one.num_accepted, abs=DEPTH), "but for the last round, which the end may cut"


def test_a_mixture_has_its_share() -> None:
    drawn = itertools.islice(mixture(random.Random(0), HIGH, LOW, 0.25), 1000)
    assert sum(answer in LOW for answer in drawn) == pytest.approx(250, abs=50)
    assert acceptance(HIGH) == pytest.approx(0.45)


@pytest.mark.parametrize("new_label", [False, True])
def test_requests_are_counted_from_the_shift(new_label: bool) -> None:
    early, requests = shift_trial(random.Random(0), HIGH, LOW, Shift(share=1.0, new_label=new_label))
    assert early == 0
    assert 1 < requests < SHORT


def test_what_never_moves_is_never_noticed() -> None:
    assert shift_trial(random.Random(0), HIGH, HIGH, Shift(share=1.0, new_label=True)) == (0, math.inf)


def test_alarms_without_a_shift_are_false_ones() -> None:
    falls = itertools.chain(itertools.repeat((50, 100), LEAD), itertools.repeat((10, 100)))
    assert false_alarms(falls, 2 * LEAD) == 2, "the label's series and that of all traffic"
    assert false_alarms(itertools.repeat((50, 100)), LEAD, DriftMonitor()) == 0


def test_a_shift_without_a_fall_has_no_target() -> None:
    def delays(share: float, fall: float) -> Delays:
        shift = Shift(share=share, new_label=False)
        requests = (50.0, WITHIN, WITHIN + 1, math.inf)
        return Delays(home="a", away="b", shift=shift, fall=fall, requests=requests, early_alarms=0)

    assert delays(1.0, 0.1).has_target
    assert not delays(1.0, 0.01).has_target
    assert not delays(0.5, 0.1).has_target
    document = delays(1.0, 0.1).to_dict()
    assert document["share_within"] == 0.5
    assert (document["never"], document["median"], document["max"]) == (1, 200.5, None)

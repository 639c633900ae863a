"""The ordinary trainer beside the project's own on the same states, and the reading of a script's lines."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.padded import Answer, PaddedTrainer, pad
from benchmarks.trainer import Chunk, Method, ratios, timed_lines
from speculator.errors import ConfigError
from speculator.model import Eagle3Draft
from speculator.sampling import SamplingParams
from tests.drafts import CONFIG, TARGET_IDS, make_draft
from tests.traces import make_trace
from tests.trainer.examples import config_for, example_of
from trainer.batch import pack
from trainer.step import Learner

NUM_STEPS = 3


def answer_of(draft: Eagle3Draft, head_Dd: torch.Tensor, seed: int, T: int) -> Answer:
    """A greedy answer with a prompt of five tokens, whose kept tokens are the whole draft vocabulary."""
    rng = np.random.default_rng(seed)
    trace = make_trace(seed, T=T, R=1, num_prompt_tokens=5, sampling=SamplingParams(temperature=0.0))
    last_hidden = torch.from_numpy(rng.normal(size=(T, CONFIG.hidden_size))).float()
    logprobs, order = (last_hidden @ head_Dd.T).log_softmax(-1).sort(-1, descending=True)
    ids = TARGET_IDS[order].int().numpy()
    ids[:2] = -1
    trace = dataclasses.replace(
        trace,
        token_ids=rng.choice(CONFIG.vocab_size, T).astype(np.int32),
        target_topk_ids=ids,
        target_topk_logprobs=logprobs.half().numpy(),
        constrained=np.zeros(T, np.bool_),
    )
    return Answer(example=example_of(trace, draft), last_hidden=last_hidden, first_base=4)


def own_loss(draft: Eagle3Draft, method: Method, answers: Sequence[Answer], num_steps: int, folder: Path) -> float:
    config = config_for(folder, folder, loss="forward_kl,chains=all", ttt_steps=num_steps, autocast=False)
    batch = pack([method.window(answer) for answer in answers], max_context=512)
    return Learner(copy.deepcopy(draft), config).step(batch).loss


@pytest.mark.parametrize("with_prompts", [False, True])
def test_the_padded_step_learns_the_same_from_the_same_states(with_prompts: bool, tmp_path: Path) -> None:
    draft, head_Dd = make_draft(), torch.randn(len(TARGET_IDS), CONFIG.hidden_size)
    answers = [answer_of(draft, head_Dd, seed, T) for seed, T in ((1, 16), (2, 11))]
    method = Method(name="", loss=None, with_prompts=with_prompts)
    batch = pad(answers, with_prompts=with_prompts)
    num_bases = int(batch.states(0).sum())
    assert num_bases == sum(method.window(answer).num_bases for answer in answers)
    assert num_bases == (14 - 1 + 9 - 1 if with_prompts else 14 - 4 + 9 - 4)
    own = padded = 0.0
    for step in range(NUM_STEPS):
        own_total = own_loss(draft, method, answers, step + 1, tmp_path)
        padded_total = float(PaddedTrainer(draft, head_Dd, num_steps=step + 1, learning_rate=1e-3).loss(batch).detach())
        # Of this step alone. The trainer's means are over the first step's states, the padded ones over each step's.
        share = int(batch.states(step).sum()) / num_bases
        assert (own_total - own) == pytest.approx((padded_total - padded) * share, rel=5e-3)
        own, padded = own_total, padded_total


def test_a_padded_step_lowers_its_loss() -> None:
    draft, head_Dd = make_draft(), torch.randn(len(TARGET_IDS), CONFIG.hidden_size)
    batch = pad([answer_of(draft, head_Dd, seed, 16) for seed in (1, 2)], with_prompts=False)
    padded = PaddedTrainer(draft, head_Dd, num_steps=NUM_STEPS, learning_rate=1e-2)
    losses = [padded.step(batch) for _ in range(20)]
    assert losses[-1] < losses[0]


def test_a_script_is_timed_from_the_line_before_its_first_step_line() -> None:
    lines = [
        "params 7.1\n",
        "step0 (1.0, [0.1])\n",
        "180 41 tok 9720 loss 5.1 AL(g=5) (1.2, [])\n",
        "360 80 tok 1 loss\n",
    ]
    times = iter([0.0, 3.0, 5.0, 45.0])
    chunk = timed_lines(lines, answers_per_step=2, clock=lambda: next(times))
    assert chunk == Chunk(seconds=40.0, num_tokens=9720 - 720)
    assert chunk.tokens_per_s == 225
    with pytest.raises(ConfigError, match=r"after 'params 7\.1'.*--reference"):
        timed_lines(lines[:1], answers_per_step=2)


def test_ratios_compare_chunks_of_the_same_repeat() -> None:
    fast, slow = [Chunk(seconds=1, num_tokens=n) for n in (30, 50, 10)], [Chunk(seconds=2, num_tokens=20)] * 2
    found = ratios(fast, slow)
    assert (found.low, found.median, found.high) == (3, 4, 5)

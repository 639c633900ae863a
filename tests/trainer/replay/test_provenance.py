"""Which traces answer one prompt."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from speculator.trace import Trace
from tests.fixtures.traces import make_trace
from trainer.replay.memory import provenance_of


def answer(seed: int, prompt: tuple[int, ...] = (1, 2, 3, 4), **header: Any) -> Trace:
    trace = make_trace(seed, T=12, **header)
    return dataclasses.replace(trace, token_ids=np.array([*prompt, *trace.token_ids[4:]], np.int32))


def num_prompts(*traces: Trace) -> int:
    found = [provenance_of(trace) for trace in traces]
    assert len({provenance.text_hash for provenance in found}) == len(traces)
    return len({provenance.prompt_hash for provenance in found})


def test_answers_to_one_prompt_have_its_hash_whoever_asked() -> None:
    assert num_prompts(answer(1), answer(2), answer(3, tenant="anna")) == 1
    assert num_prompts(answer(1), answer(2, (1, 2, 3, 5))) == 2


def test_a_group_has_one_hash_also_where_a_sample_went_on_elsewhere() -> None:
    first, moved = answer(1, group_id="g"), answer(2, (1, 2, 3, 4), group_id="g", num_prompt_tokens=9)
    assert num_prompts(first, moved) == 1
    assert num_prompts(first, answer(2, group_id="h"), answer(3, group_id="g", tenant="anna")) == 3


def test_prompts_of_which_only_the_tail_is_known() -> None:
    def of_length(seed: int, length: int) -> Trace:
        return answer(seed, num_prompt_tokens=length, first_position=length - 4)

    assert num_prompts(of_length(1, 40), of_length(2, 40), of_length(3, 41)) == 2
    # Nothing of it: every answer is one of its own.
    assert num_prompts(*(answer(seed, num_prompt_tokens=40, first_position=40) for seed in (1, 2))) == 2

"""Answers that follow a grammar: valid, the same with any draft, and marked where a draft would learn from them."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from serving.grammar import json_grammar
from speculator.draft.sampling_params import SamplingParams
from speculator.errors import RequestError
from tests.fixtures.decoding import FixedPlanner, WholeTrees
from tests.fixtures.schemas import DIGITS, SCHEMAS, WORD, entity
from tests.fixtures.toy import byte_tokenizer, make_toy_model
from tests.serving.local.harness import GREEDY, Answer, fixed_engine, toy_engine

TOO_COMPLEX = "\n".join(
    ["start: " + " | ".join(f"a{n}" for n in range(3000)), *(f"a{n}: /[a-z]/ /[a-z]*{n}/" for n in range(3000))]
)
"""Every letter is the beginning of 3,000 alternatives."""
TOO_LARGE = "\n".join(
    ["start: " + " ".join(f"a{n}" for n in range(33_000)), *(f'a{n}: "a" | a{n} "b"' for n in range(33_000))]
)
"""As that of many functions with many arguments."""
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, top_k=40)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_model(tmp_path_factory.mktemp("toy"), tokenizer=byte_tokenizer())


def _answers(model_dir: Path, sampling: SamplingParams, planner: FixedPlanner, suffix_depth: int) -> list[Answer]:
    with fixed_engine(model_dir, planner=planner, suffix_depth=suffix_depth) as harness:
        requests = [
            harness.request("write:", grammar=json_grammar(schema), sampling=sampling, seed=5, max_tokens=240)
            for schema in SCHEMAS
        ]
        # By tens: they wait for four slots, and the queue is short.
        return [answer for start in range(0, 50, 10) for answer in harness.ask(*requests[start : start + 10])]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_fifty_schemas_are_followed_and_drafts_change_no_text(model_dir: Path, sampling: SamplingParams) -> None:
    plain, head, text = (
        _answers(model_dir, sampling, planner, suffix_depth)
        for planner, suffix_depth in ((FixedPlanner(min_confidence=2.0), 0), (FixedPlanner(), 0), (WholeTrees(), 8))
    )
    for schema, answer in zip(SCHEMAS, plain, strict=True):
        assert answer.finish_reason == "stop", (schema, answer.text)
        jsonschema.validate(json.loads(answer.text), schema)
    for drafted in (head, text):
        assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in plain]
        assert [answer.text for answer in drafted] == [answer.text for answer in plain]
    assert sum(answer.num_accepted for answer in plain) == 0
    assert sum(answer.num_accepted for answer in head) > 0
    assert sum(answer.num_accepted for answer in text) > 50
    assert len({answer.text for answer in plain}) > 30


def test_an_answer_ends_with_its_grammar_whatever_else_is_asked_for(model_dir: Path) -> None:
    with toy_engine(model_dir) as harness:
        whole, cut = harness.ask(
            harness.request("a", grammar=json_grammar(entity(a=DIGITS)), ignore_eos=True),
            harness.request("a", grammar=json_grammar(entity(a=DIGITS)), max_tokens=4),
        )
    assert (whole.finish_reason, cut.finish_reason) == ("stop", "length")
    assert json.loads(whole.text).keys() == {"a"}
    assert whole.text.startswith(cut.text)


def test_a_trace_says_which_tokens_the_model_was_not_free_in(model_dir: Path) -> None:
    with toy_engine(model_dir, branch_share=1.0) as harness:
        harness.ask(harness.request("abc", grammar=json_grammar(entity(name=WORD))))
        harness.ask(harness.request("abc"))
    bound, free = harness.traces
    first = bound.header.num_prompt_tokens - 1
    assert bound.constrained.tolist() == [position >= first for position in range(len(bound.constrained))]
    assert not free.constrained.any()
    assert bound.branches is None


def test_a_grammar_beyond_the_librarys_limits_ends_its_own_request_alone(model_dir: Path) -> None:
    with toy_engine(model_dir) as harness:
        for grammar in ("start: nothing", json_grammar({"type": "nothing"})):
            with pytest.raises(RequestError, match="no grammar"):
                harness.ask(harness.request("a", grammar=grammar))
        with pytest.raises(RequestError, match="no grammar") as refused:
            harness.ask(harness.request("a", grammar=TOO_LARGE))
        assert "backtrace" not in str(refused.value)
        with pytest.raises(RequestError, match="too complex"):
            harness.ask(harness.request("a", grammar=TOO_COMPLEX))
        assert harness.ask(harness.request("a"))[0].finish_reason == "length"


def test_a_tokenizer_that_the_library_cannot_read_refuses_grammars_and_serves_the_rest(tmp_path: Path) -> None:
    with toy_engine(make_toy_model(tmp_path)) as harness:
        with pytest.raises(RequestError, match="this model's tokenizer"):
            harness.ask(harness.request("a", grammar=json_grammar(DIGITS)))
        assert harness.ask(harness.request("a"))[0].finish_reason == "length"

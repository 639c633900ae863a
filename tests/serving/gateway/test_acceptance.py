"""In front of SGLang: what it says of an answer's proposals comes in the form that clients read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serving.gateway.passage import chat
from tests.serving.sglang.outside.fake_sglang import DONE, EVENTS, MODEL, WHOLE, FakeSglang, chunk

NOTE = {
    "spec_accept_rate": 0.1,
    "spec_accept_length": 2.5,
    "spec_cap_length": 2.25,
    "spec_num_correct_drafts": 6,
    "spec_num_proposed_drafts": 60,
    "spec_verify_ct": 4,
    "spec_correct_drafts_histogram": [1, 1, 1, 1],
    "spec_cap_lens_histogram": [],
}
SHOWN = {
    "mean_acceptance_length": 2.5,
    "draft_acceptance_rate": 6 / 9,
    "acceptance_histogram": [1, 1, 1, 1],
    "num_spec_steps": 4,
    "num_accepted_draft_tokens": 6,
    "num_draft_tokens": 9,
}
USED = {"reasoning_tokens": 0, "accepted_prediction_tokens": 6, "rejected_prediction_tokens": 3}


def noted(note: Any, **more: Any) -> bytes:
    """SGLang's whole answer, with what it says of proposals."""
    return json.dumps(
        {**json.loads(WHOLE), "sglext": {"cached_tokens_details": None, "spec_tokens_details": note, **more}}
    ).encode()


def event(**fields: Any) -> bytes:
    data = {"id": "abc", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [], **fields}
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


NOTED = event(sglext={"spec_tokens_details": NOTE})
USAGE = event(usage={"prompt_tokens": 3, "total_tokens": 8, "completion_tokens": 5, "completion_tokens_details": None})
WITH_USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


def data_of(stream: bytes) -> list[Any]:
    *events, done, rest = stream.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [json.loads(each.removeprefix(b"data: ")) for each in events]


def test_a_whole_answer_says_what_became_of_its_proposals() -> None:
    fake = FakeSglang(whole=noted(NOTE))
    answer = chat(fake).json()
    assert fake.bodies[0]["return_spec_tokens_details"] is True
    assert answer.pop("metrics") == {"speculative_decoding": SHOWN}
    assert answer["usage"].pop("completion_tokens_details") == USED
    assert answer == json.loads(WHOLE)


def test_sglangs_own_details_stay() -> None:
    whole = json.loads(noted(NOTE))
    whole["usage"]["completion_tokens_details"] = {"reasoning_tokens": 4}
    answer = chat(FakeSglang(whole=json.dumps(whole).encode())).json()
    assert answer["usage"]["completion_tokens_details"] == {**USED, "reasoning_tokens": 4}


def test_samples_are_counted_together() -> None:
    answer = chat(FakeSglang(whole=noted([NOTE, {**NOTE, "spec_correct_drafts_histogram": [0, 4]}])), n=2).json()
    assert answer["metrics"]["speculative_decoding"]["acceptance_histogram"] == [1, 5, 1, 1]
    assert answer["metrics"]["speculative_decoding"]["num_draft_tokens"] == 18


def test_who_asks_for_sglangs_own_field_has_both() -> None:
    answer = chat(FakeSglang(whole=noted(NOTE)), return_spec_tokens_details=True).json()
    assert answer["sglext"]["spec_tokens_details"] == NOTE
    assert answer["metrics"]["speculative_decoding"] == SHOWN
    kept = chat(FakeSglang(whole=noted(NOTE, routed_experts="abc"))).json()
    assert kept["sglext"] == {"routed_experts": "abc"}, "what is not ours stays"


def test_a_stream_says_so_beside_its_usage() -> None:
    fake = FakeSglang(events=[*EVENTS[:-1], NOTED, USAGE, DONE])
    *chunks, last = data_of(chat(fake, **WITH_USAGE).content)
    assert fake.bodies[0]["return_spec_tokens_details"] is True
    assert b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in chunks) == b"".join(EVENTS[:-1])
    assert last["metrics"] == {"speculative_decoding": SHOWN}
    assert last["usage"]["completion_tokens_details"] == USED
    assert last["usage"]["completion_tokens"] == 5
    assert last["choices"] == []


@pytest.mark.parametrize("size", [1, 50, 10_000])
def test_however_the_stream_is_cut(size: int) -> None:
    raw = b"".join([*EVENTS[:-1], NOTED, USAGE, DONE])
    pieces = [raw[at : at + size] for at in range(0, len(raw), size)]
    last = data_of(chat(FakeSglang(events=pieces), **WITH_USAGE).content)[-1]
    assert last["metrics"] == {"speculative_decoding": SHOWN}


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": False}}])
def test_who_does_not_ask_for_usage_gets_no_event_of_it(options: dict[str, Any]) -> None:
    """Its client may take every event to have a choice."""
    fake = FakeSglang(events=[*EVENTS[:-1], USAGE, DONE])
    assert chat(fake, stream=True, **options).content == b"".join(EVENTS)
    assert fake.bodies[0]["stream_options"] == {"include_usage": True}
    assert "return_spec_tokens_details" not in fake.bodies[0]
    continuous = event(choices=[{"index": 0}], usage={"prompt_tokens": 3, "completion_tokens": 1})
    assert chat(FakeSglang(events=[continuous, DONE]), stream=True).content == continuous + DONE


@pytest.mark.parametrize("note", [None, "x", {"spec_verify_ct": "many"}, [{"spec_correct_drafts_histogram": 1}]])
def test_a_note_that_is_none_passes_as_it_is(note: Any) -> None:
    whole, said = noted(note), event(sglext={"spec_tokens_details": note})
    assert "metrics" not in chat(FakeSglang(whole=whole)).json()
    assert "metrics" not in data_of(chat(FakeSglang(events=[chunk("a"), said, USAGE, DONE]), **WITH_USAGE).content)[-1]


def test_a_text_that_looks_like_it_is_text() -> None:
    text = json.dumps({"sglext": {"spec_tokens_details": NOTE}}, separators=(",", ":"))
    events = [chunk(text), chunk("", "stop"), USAGE, DONE]
    assert chat(FakeSglang(events=events), **WITH_USAGE).content == b"".join(events)

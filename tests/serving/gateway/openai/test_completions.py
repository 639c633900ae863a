from __future__ import annotations

import pytest

from speculator.draft.sampling_params import sample_seed
from tests.fixtures.doubles import DoubleEngine, says, words_for
from tests.serving.gateway.client import COMPLETIONS, complete, error_of, events, post


def test_whole_text() -> None:
    response = complete(DoubleEngine(answer=says("world")))
    body = response.json()
    assert body["id"] == f"cmpl-{response.headers['x-request-id']}"
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "world", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"]["prompt_tokens"] == 5
    assert body["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", [b"hi"]),
        (["hi", "yo"], [b"hi", b"yo"]),
        ([104, 105], [b"hi"]),
        ([[104, 105], [121, 111]], [b"hi", b"yo"]),
        (["hi", [121, 111]], [b"hi", b"yo"]),
    ],
)
def test_shapes_of_prompts(prompt: object, expected: list[bytes]) -> None:
    engine = DoubleEngine()
    response = complete(engine, prompt=prompt)
    assert response.status_code == 200, response.text
    assert [bytes(request.prompt_token_ids) for request in engine.requests] == expected
    assert response.json()["usage"]["prompt_tokens"] == sum(map(len, expected))


def test_batch_times_samples_is_prompt_major_and_seeded_per_prompt() -> None:
    engine = DoubleEngine()
    choices = complete(engine, prompt=["aa", "bb"], n=2, best_of=2, seed=5, max_tokens=8).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    asked = [(bytes(request.prompt_token_ids), request.seed) for request in engine.requests]
    assert asked == [(b"aa", 5), (b"aa", sample_seed(5, 1)), (b"bb", 5), (b"bb", sample_seed(5, 1))]
    for choice, request in zip(choices, engine.requests, strict=True):
        assert choice["text"] == words_for(request).encode()[:8].decode(errors="ignore")


def test_too_many_samples_name_the_limit() -> None:
    engine = DoubleEngine()
    response = post(engine, COMPLETIONS, {"prompt": ["a", "b", "c"], "n": 3}, max_samples=8)
    error = error_of(response)
    assert response.status_code == 400
    assert error["param"] == "n"
    assert error["message"].startswith("9 samples")
    assert "at most 8" in error["message"]
    assert engine.requests == []
    assert post(engine, COMPLETIONS, {"prompt": ["a", "b"], "n": 4}, max_samples=8).status_code == 200


@pytest.mark.parametrize("prompt", ["", [], [[]], ["ok", ""]])
def test_empty_prompts(prompt: object) -> None:
    engine = DoubleEngine()
    response = complete(engine, prompt=prompt)
    assert response.status_code == 400
    assert error_of(response)["param"] == "prompt"
    assert engine.requests == []


def test_streamed_text() -> None:
    response = complete(DoubleEngine(answer=says("hello world")), stream=True)
    *chunks, done = events(response)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello world"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert {chunk["id"] for chunk in chunks} == {f"cmpl-{response.headers['x-request-id']}"}

"""Chat and plain completions that are not streamed: what the engine is asked for, and what comes back."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest

from serving.engine import CapturePolicy
from speculator.draft.sampling_params import SamplingParams, sample_seed
from tests.fixtures.doubles import DoubleEngine, says, words_for
from tests.serving.gateway.client import CHAT, COMPLETIONS, HELLO, ask, chat, complete, error_of, events, gateway, post


def test_whole_answer() -> None:
    engine = DoubleEngine(answer=says("Hi there, 日本."))
    response = chat(engine)
    assert response.status_code == 200
    body = response.json()
    assert body["id"] == f"chatcmpl-{response.headers['x-request-id']}"
    assert body["object"] == "chat.completion"
    assert body["model"] == "double"
    assert body["created"] > 1_700_000_000
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hi there, 日本.", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    # 17 bytes in steps of four: the target's own token each, the others accepted proposals, of four each.
    assert body["usage"] == {
        "prompt_tokens": len("<user>hello\n<assistant>"),
        "completion_tokens": 17,
        "total_tokens": len("<user>hello\n<assistant>") + 17,
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 12,
            "rejected_prediction_tokens": 8,
        },
    }
    assert body["metrics"] == {
        "speculative_decoding": {
            "mean_acceptance_length": 17 / 5,
            "draft_acceptance_rate": 12 / 20,
            "acceptance_histogram": [1, 0, 0, 4],
            "num_spec_steps": 5,
            "num_accepted_draft_tokens": 12,
            "num_draft_tokens": 20,
        }
    }
    assert engine.finished == [f"{response.headers['x-request-id']}-0"]


def test_engine_gets_what_the_client_asked_for() -> None:
    engine = DoubleEngine()
    chat(
        engine,
        messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hello", "name": "ada"}],
        max_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=20,
        seed=3,
        ignore_eos=True,
        stop="\n",
        user="someone",
        slipstream={"capture": False, "group_id": "g7", "domain": "math"},
    )
    [request] = engine.requests
    assert bytes(request.prompt_token_ids).decode() == "<system>be brief\n<user>hello\n<assistant>"
    assert request.max_tokens == 7
    assert request.sampling == SamplingParams(temperature=0.0, top_p=0.5, top_k=20)
    assert request.seed == 3
    assert request.ignore_eos
    assert request.stop == ("\n",)
    assert request.policy == CapturePolicy(capture=False, tenant="default", group_id="g7", domain="math")


def test_defaults() -> None:
    engine = DoubleEngine(context_length=4096)
    post(engine, CHAT, {"messages": HELLO}, default_max_tokens=33)
    [request] = engine.requests
    assert request.max_tokens == 33
    assert request.sampling == SamplingParams(temperature=1.0, top_p=1.0, top_k=0)
    assert request.seed is None
    assert not request.ignore_eos
    assert request.stop == ()
    assert request.policy == CapturePolicy()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "served"),
    [
        (1e-40, 0, 1, 0.0),
        (9e-7, 0, 1, 0.0),
        (1e-6, 0, 1, 1e-6),
        (0.7, 2, 1, 0.7),
        (0.7, 1, 1, 0.0),
        (0.7, 0, 0, 0.0),
    ],
)
def test_what_is_as_good_as_greedy_is_greedy(temperature: float, top_k: int, top_p: float, served: float) -> None:
    """As in SGLang. Divided by 1e-40 every positive logit is infinite, and the one with the lowest id would win; where
    the likeliest token is the only one, a draft that draws its proposals would often miss it.
    """
    engine = DoubleEngine()
    chat(engine, temperature=temperature, top_k=top_k, top_p=top_p)
    assert engine.requests[0].sampling.temperature == served


def test_default_max_tokens_shrinks_to_what_fits() -> None:
    engine = DoubleEngine(context_length=30)
    response = chat(engine)
    assert engine.requests[0].max_tokens == 30 - len("<user>hello\n<assistant>")
    assert response.json()["choices"][0]["finish_reason"] == "length"


def test_nulls_and_values_that_ask_for_nothing_are_accepted() -> None:
    engine = DoubleEngine()
    absent = ("temperature", "top_p", "n", "seed", "stop", "stream", "stream_options", "user", "max_tokens")
    nothing = {
        **dict.fromkeys((*absent, "top_logprobs")),
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "logprobs": False,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
    }
    history = {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": None, "annotations": []}
    response = chat(engine, messages=[*HELLO, history, *HELLO], **nothing)
    assert response.status_code == 200, response.text
    assert engine.requests[0].sampling == SamplingParams()


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"content": None, "refusal": "No."}, "No."),
        ({"refusal": "No."}, "No."),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        ({"content": "Well.", "refusal": "No."}, "Well."),
    ],
)
def test_what_a_model_refused_with_is_its_text(answer: dict[str, Any], text: str) -> None:
    engine = DoubleEngine()
    chat(engine, messages=[*HELLO, {"role": "assistant", **answer}, *HELLO])
    assert f"<assistant>{text}\n" in bytes(engine.requests[0].prompt_token_ids).decode()


def test_text_parts_are_joined() -> None:
    engine = DoubleEngine()
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    chat(engine, messages=[{"role": "user", "content": parts}])
    assert bytes(engine.requests[0].prompt_token_ids).decode() == "<user>hello\n<assistant>"


@pytest.mark.parametrize("seed", [-(2**63), -2, 2**63 - 1])
def test_a_seed_may_be_any_signed_number_of_64_bits(seed: int) -> None:
    engine = DoubleEngine()
    assert chat(engine, seed=seed, n=2).status_code == 200
    assert [request.seed for request in engine.requests] == [seed % 2**64, 2**64 + seed % 2**64]


def test_samples_are_concurrent_and_have_derived_seeds() -> None:
    engine = DoubleEngine(hold_at=1)
    app = gateway(engine)

    async def talk(client: httpx.AsyncClient) -> httpx.Response:
        asked = asyncio.create_task(
            client.post(CHAT, json={"model": "double", "messages": HELLO, "n": 3, "seed": 40, "max_tokens": 12})
        )
        await engine.holding.wait()
        # The first chunk of every sample came before any second one: nobody waited for somebody's end.
        assert [request.seed for request in engine.requests] == [sample_seed(40, number) for number in range(3)]
        engine.release.set()
        return await asked

    response = ask(app, talk)
    choices = response.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    for choice, request in zip(choices, engine.requests, strict=True):
        expected = words_for(request).encode()[:12].decode(errors="ignore")
        assert choice["message"]["content"] == expected
    assert len({choice["message"]["content"] for choice in choices}) == 3
    assert response.json()["usage"]["prompt_tokens"] == len("<user>hello\n<assistant>")
    assert response.json()["usage"]["completion_tokens"] == 36
    assert len({request.request_id for request in engine.requests}) == 3


def test_too_long_prompt_says_by_how_much() -> None:
    engine = DoubleEngine(context_length=64)
    response = chat(engine, messages=[{"role": "user", "content": "x" * 100}])
    assert response.status_code == 400
    error = error_of(response)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"
    num_tokens = len("<user>\n<assistant>") + 100
    # LiteLLM, OpenCode and others know an overflow by these words.
    assert "maximum context length is 64 tokens" in error["message"]
    assert f"has {num_tokens}, " in error["message"]
    assert f"shorten the prompt by {num_tokens - 63}." in error["message"]
    assert engine.requests == []


def test_prompt_that_fills_the_context_leaves_no_room_for_an_answer() -> None:
    num_prompt_tokens = len("<user>hello\n<assistant>")
    engine = DoubleEngine(context_length=num_prompt_tokens)
    error = error_of(chat(engine))
    assert error["code"] == "context_length_exceeded"
    assert error["message"].endswith("shorten the prompt by 1.")
    assert engine.requests == []


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_prompt_and_max_tokens_must_fit_together(name: str) -> None:
    num_prompt_tokens = len("<user>hello\n<assistant>")
    engine = DoubleEngine(context_length=num_prompt_tokens + 10)
    assert chat(engine, **{name: 10}).status_code == 200
    assert engine.requests[0].max_tokens == 10
    error = error_of(chat(engine, **{name: 11}))
    assert error["code"] == "context_length_exceeded"
    assert "ask for at most 10" in error["message"]
    assert f"maximum context length is {num_prompt_tokens + 10} tokens" in error["message"]


def test_long_prompts_are_encoded_off_the_loop_wherever_their_text_stands() -> None:
    threads: list[threading.Thread] = []
    engine = DoubleEngine(context_length=100_000)
    encode_chat = engine.tokenizer.encode_chat

    def watched(messages: list[dict[str, Any]], *more: Any) -> list[int]:
        threads.append(threading.current_thread())
        return encode_chat(messages, *more)

    engine.tokenizer.encode_chat = watched
    assert chat(engine, messages=[{"role": "user", "content": "x" * 50_000}]).status_code == 200
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": "x" * 50_000})}}
    assert chat(engine, messages=[*HELLO, {"role": "assistant", "tool_calls": [call]}]).status_code == 200
    tool = {"type": "function", "function": {"name": "f", "description": "x" * 50_000}}
    assert chat(engine, tools=[tool]).status_code == 200
    assert threading.main_thread() not in threads
    assert chat(engine).status_code == 200
    assert threads[3] is threading.main_thread()


def test_template_that_refuses_is_the_clients_error() -> None:
    error = error_of(chat(DoubleEngine(), messages=[{"role": "assistant", "content": "hi"}]))
    assert error == {
        "message": "the conversation starts with the assistant",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "invalid_messages",
    }


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
    assert error["message"].startswith("The request has 9 samples")
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

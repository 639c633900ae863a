"""Responses, Messages, embeddings and tokens in front of SGLang: what goes on, and errors as clients know them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry

from serving.request_metadata import HEADER, RequestMetadata
from tests.serving.gateway.client import error_of, openai_client
from tests.serving.gateway.passage import HELLO, chat, passing, post
from tests.serving.sglang.outside.fake_sglang import CONTEXT_LENGTH, MODEL, NEVER_STREAMS, FakeSglang, chunk, flat_error

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HALF = "\N{REPLACEMENT CHARACTER}"


def named(name: str, **fields: Any) -> bytes:
    """An event as SGLang writes it there."""
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields}, ensure_ascii=False)}\n\n".encode()


def response(status: str, **fields: Any) -> dict[str, Any]:
    return {"response": {"id": "resp_1", "object": "response", "status": status, "output": [], **fields}}


CREATED = [named(f"response.{name}", **response("in_progress")) for name in ("created", "in_progress")]
DELTA = named("response.output_text.delta", delta="Grüße", output_index=0, content_index=0, item_id="m", logprobs=[])
COMPLETED = named("response.completed", **response("completed"))
STARTED = named("message_start", message={"id": "msg_1", "content": [], "usage": {"input_tokens": 3}})
TEXT = named("content_block_delta", index=0, delta={"type": "text_delta", "text": "Grüße"})
STOPPED = named("message_stop")


def failed(message: str) -> bytes:
    return named("response.failed", **response("failed", error={"code": "server_error", "message": message}))


def marks(fake: FakeSglang) -> RequestMetadata:
    return RequestMetadata.of_header(fake.headers[-1][HEADER])


# -- what goes on ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "asked", "added"),
    [
        (RESPONSES, {"input": "hello", "text": {"format": {"type": "text"}}, "new": {"a": [1]}}, {"store": False}),
        (RESPONSES, {"input": "hello", "store": False, "temperature": 0.1}, {"store": False}),
        (RESPONSES, {"input": "hello", "top_p": 0.0}, {"store": False, "top_p": 1, "top_k": 1}),
        (MESSAGES, {"messages": HELLO, "max_tokens": 3, "system": "日本", "metadata": {"user_id": "u"}}, {}),
        (f"{MESSAGES}/count_tokens", {"messages": HELLO}, {}),
        ("/v1/embeddings", {"input": ["a"] * 200, "encoding_format": "base64", "dimensions": 3}, {}),
        ("/tokenize", {"prompt": "hello"}, {}),
    ],
)
def test_a_body_goes_on_with_what_its_endpoint_takes(path: str, asked: dict[str, Any], added: dict[str, Any]) -> None:
    fake = FakeSglang(whole=b'{"an": "answer"}')
    nulls = {"metadata": None, "slipstream": {"domain": "d", "capture": False}, "service_tier": None} | asked
    answer = post(fake, path, nulls)
    assert (answer.status_code, answer.content) == (200, fake.whole)
    assert fake.paths == [path]
    assert marks(fake).policy == {"capture": False, "tenant": "default", "group_id": "", "domain": "d"}
    [sent] = fake.bodies
    if path == RESPONSES:
        assert sent.pop("request_id") == f"resp_{marks(fake).rid}"
        assert sent.pop("cache_salt") == marks(fake).cache_salt == "default"
    assert sent == {"model": MODEL, **asked, **added}


@pytest.mark.parametrize("path", NEVER_STREAMS)
def test_what_is_never_streamed_passes_whole_and_unchanged(path: str) -> None:
    """A text of a client's may end in what marks half a character in an answer."""
    fake = FakeSglang(whole=f'{{"text":"a{HALF}","tokens":[1]}}'.encode())
    for asked in ({"stream": True}, {}):
        answer = post(fake, path, {"messages": HELLO, "prompt": "x", "input": "x", "tokens": [1], **asked})
        assert (answer.status_code, answer.content) == (200, fake.whole)
        assert answer.headers["content-type"] == "application/json"


def test_tokens_need_no_models_name() -> None:
    fake = FakeSglang()
    assert post(fake, "/tokenize", {"model": None, "prompt": "hello"}).status_code == 200
    assert fake.bodies == [{"prompt": "hello"}]
    assert post(fake, "/tokenize", {"model": "other", "prompt": "hello"}).status_code == 404


@pytest.mark.parametrize(
    ("field", "value"),
    [("store", True), ("store", 0), ("previous_response_id", "resp_1"), ("conversation", "conv_1")],
)
def test_nothing_is_kept_that_another_tenant_could_read(field: str, value: object) -> None:
    fake = FakeSglang()
    answer = post(fake, RESPONSES, {"input": "hello", field: value})
    error = error_of(answer)
    assert (answer.status_code, error["param"], error["code"]) == (400, field, "unsupported_parameter")
    assert "'store': false" in error["message"] or "'input'" in error["message"]
    assert fake.bodies == []


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES, "/v1/embeddings", "/tokenize"])
def test_fields_that_no_client_may_use_are_refused_everywhere(path: str) -> None:
    fake = FakeSglang()
    for field in ("bootstrap_host", "stop_regex", "extra_key"):
        assert post(fake, path, {"messages": HELLO, field: "x"}).status_code == 400
    assert fake.bodies == []


@pytest.mark.parametrize("tokens", [[-1], [1, 2**40], [[1], [-1]]])
def test_numbers_that_are_no_tokens_are_the_clients_fault(tokens: list[Any]) -> None:
    """SGLang answers them with 500."""
    fake = FakeSglang(whole=b"{}")
    error = error_of(post(fake, "/detokenize", {"tokens": tokens}))
    assert (error["type"], error["param"]) == ("invalid_request_error", f"tokens[{len(tokens) - 1}]")
    assert fake.bodies == []
    assert post(fake, "/detokenize", {"tokens": [[1, 2], []]}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", RESPONSES, MESSAGES, "/tokenize", f"{MESSAGES}/count_tokens"])
def test_no_client_brings_a_chat_template(path: str) -> None:
    """Rendering one may take for ever, and SGLang does not refuse it everywhere; its own values it answers with 500."""
    fake = FakeSglang(whole=b"{}")
    asked: dict[str, Any] = {"input": "hello", "messages": HELLO}
    template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    for name, value in (("chat_template", template), ("messages", []), ("tokenize", True), ("tools", 7)):
        error = post(fake, path, {**asked, "chat_template_kwargs": {name: value}}).json()["error"]
        assert (error["type"], fake.bodies) == ("invalid_request_error", [])
        assert name in error["message"]
    values = {"enable_thinking": False}
    assert post(fake, path, {**asked, "chat_template_kwargs": values}).status_code == 200
    assert fake.bodies[-1]["chat_template_kwargs"] == values


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_response_format_is_an_object(path: str) -> None:
    """SGLang answers others with 500."""
    fake = FakeSglang(whole=b"{}")
    for value in ("json_object", True, 7, [{}]):
        answer = post(fake, path, {"messages": HELLO, "prompt": "hello", "response_format": value})
        assert (answer.status_code, error_of(answer)["param"], fake.bodies) == (400, "response_format", [])


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        (RESPONSES, "input", [0] * 20_000),
        ("/v1/chat/completions", "messages", [{"role": "user", "content": [0] * 20_000}]),
        ("/v1/chat/completions", "messages", [{"role": "assistant", "tool_calls": [{}] * 20_000}]),
        ("/v1/chat/completions", "response_format", {"type": "structural_tag", "structures": [{}] * 20_000}),
        ("/v1/chat/completions", "logit_bias", {str(number): "x" for number in range(20_000)}),
        (RESPONSES, "include", [0] * 20_000),
        ("/v1/chat/completions", "tools", [{}] * 20_000),
        ("/v1/completions", "prompt", [["x"] * 20_000]),
        ("/v1/completions", "stop_token_ids", ["x"] * 20_000),
        (MESSAGES, "system", [7] * 20_000),
        (MESSAGES, "stop_sequences", [7] * 20_000),
    ],
)
def test_no_list_is_longer_than_sglang_can_refuse(path: str, name: str, value: Any) -> None:
    fake = FakeSglang(whole=b"{}")
    answer = post(fake, path, {"messages": HELLO, "prompt": "hello", "max_tokens": 4, name: value})
    assert (answer.status_code, fake.bodies) == (400, [])
    assert answer.json()["error"]["message"].startswith(f"{name}: may have at most")


def test_prompts_of_token_ids_may_be_as_long_as_the_context() -> None:
    fake = FakeSglang(whole=b"{}")
    schema = {"type": "string", "enum": [str(number) for number in range(20_000)]}
    for path, asked in (
        ("/v1/completions", {"prompt": [5] * 20_000}),
        ("/v1/embeddings", {"input": [[5] * 20_000]}),
        ("/v1/chat/completions", {"messages": HELLO, "tools": [{"function": {"parameters": schema}}]}),
    ):
        assert post(fake, path, asked).status_code == 200
    assert len(fake.bodies) == 3


def test_the_operators_limit_holds() -> None:
    fake = FakeSglang(whole=b"{}")
    for path, asked in ((RESPONSES, {"max_output_tokens": 9}), (MESSAGES, {"max_tokens": 9, "messages": HELLO})):
        assert post(fake, path, asked, max_completion_tokens=8).status_code == 400
        assert "at most 8" in post(fake, path, asked, max_completion_tokens=8).text
    assert fake.bodies == []
    post(fake, RESPONSES, {"input": "hello"}, max_completion_tokens=8)
    assert fake.bodies[-1]["max_output_tokens"] == 8
    # A prompt that leaves less room is answered within that.
    fake.num_prompt_tokens = CONTEXT_LENGTH - 5
    assert post(fake, RESPONSES, {"input": "hello"}, max_completion_tokens=8).status_code == 200
    assert fake.bodies[-1]["max_output_tokens"] == 5


# -- streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "events"), [(RESPONSES, [*CREATED, DELTA, COMPLETED]), (MESSAGES, [STARTED, TEXT, STOPPED])]
)
def test_streams_pass_byte_for_byte(path: str, events: list[bytes]) -> None:
    registry = CollectorRegistry()
    fake = FakeSglang(events=events)
    answer = post(fake, path, {"messages": HELLO, "stream": True}, registry=registry)
    assert answer.content == b"".join(events)
    assert answer.headers["content-type"].startswith("text/event-stream")
    labels = {"model_name": MODEL, "route": path}
    assert registry.get_sample_value("slipstream_gateway_requests_total", {**labels, "status": "200"}) == 1
    assert registry.get_sample_value("slipstream_gateway_time_to_first_token_seconds_count", labels) == 1


def test_a_silent_message_pings() -> None:
    """Claude Code gives up a stream without events, and does not count comments."""

    async def run() -> None:
        begins = asyncio.Event()
        fake = FakeSglang(events=[STARTED, TEXT, STOPPED], begins=begins)
        body = {"model": MODEL, "messages": HELLO, "stream": True}
        async with passing(fake, stream_comment_s=0.05) as server, httpx.AsyncClient() as client:
            lines: list[str] = []
            async with asyncio.timeout(10), client.stream("POST", f"{server.url}{MESSAGES}", json=body) as answer:
                async for line in answer.aiter_lines():
                    lines.append(line)
                    if lines.count("event: ping") == 2:
                        begins.set()
        assert lines[:3] == ["event: ping", 'data: {"type":"ping"}', ""]
        assert lines[-3] == "event: message_stop"
        assert not [line for line in lines if line.startswith(":")]

    asyncio.run(run())


def used(path: str, **fake: Any) -> tuple[float | None, ...]:
    """Tokens of prompts and of answers, as counted of one request; the time between tokens, as often as observed."""
    registry = CollectorRegistry()
    body = {"messages": HELLO, "stream": "events" in fake}
    assert post(FakeSglang(**fake), path, body, registry=registry).status_code == 200
    labels = {"model_name": MODEL}
    return (
        registry.get_sample_value("slipstream_gateway_prompt_tokens_total", {**labels, "tenant": "default"}),
        registry.get_sample_value("slipstream_gateway_generation_tokens_total", {**labels, "tenant": "default"}),
        registry.get_sample_value("slipstream_gateway_inter_token_latency_seconds_count", {**labels, "route": path}),
    )


def test_tokens_are_counted_as_each_endpoint_says_them() -> None:
    of_response = {"input_tokens": 30, "output_tokens": 5, "total_tokens": 35}
    completed = named("response.completed", **response("completed", usage=of_response))
    assert used(RESPONSES, whole=json.dumps({"usage": of_response}).encode()) == (30, 5, None)
    assert used(RESPONSES, events=[*CREATED, DELTA, completed]) == (30, 5, 1)

    of_message = {"input_tokens": 10, "cache_read_input_tokens": 20, "output_tokens": 5}
    started = named("message_start", message={"usage": {**of_message, "output_tokens": 0}})
    ended = named("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 5})
    assert used(MESSAGES, whole=json.dumps({"usage": of_message}).encode()) == (30, 5, None)
    assert used(MESSAGES, events=[started, TEXT, ended, STOPPED]) == (30, 5, 1)
    of_embeddings = {"prompt_tokens": 30, "total_tokens": 30}
    assert used("/v1/embeddings", whole=json.dumps({"usage": of_embeddings}).encode()) == (30, 0, None)


def test_openais_client_reads_what_breaks_off_as_an_error() -> None:
    async def run() -> None:
        fake = FakeSglang(events=[*CREATED, DELTA], cut=True)
        async with passing(fake) as server, openai_client(server) as client:
            stream = await client.responses.create(model=MODEL, input="hello", stream=True)
            assert [(await anext(stream)).type for _ in range(3)][-1] == "response.output_text.delta"
            with pytest.raises(openai.APIError, match="stopped generating"):
                await anext(stream)

    asyncio.run(run())


def test_a_message_that_breaks_off_ends_with_an_event_of_its_kind() -> None:
    answer = post(FakeSglang(events=[STARTED, TEXT]), MESSAGES, {"messages": HELLO, "stream": True})
    last = answer.text.split("\n\n")[-2]
    assert last.startswith("event: error\ndata: ")
    told = json.loads(last.partition("data: ")[2])
    assert told["type"] == "error"
    assert told["error"] == {"type": "overloaded_error", "message": "The engine stopped generating: retry later."}


TOO_LONG = "The input (9048 tokens) is longer than the model's context length (4096 tokens)."
REFUSED = named("error", error={"type": "invalid_request_error", "message": TOO_LONG})


@pytest.mark.parametrize(
    ("path", "events"), [(RESPONSES, [*CREATED, failed(TOO_LONG)]), (MESSAGES, [STARTED, REFUSED, STOPPED])]
)
def test_what_sglang_refuses_in_a_stream_is_refused(path: str, events: list[bytes]) -> None:
    answer = post(FakeSglang(events=events), path, {"messages": HELLO, "stream": True})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].endswith(TOO_LONG)


@pytest.mark.parametrize(
    ("path", "events"),
    [(RESPONSES, [*CREATED, DELTA, failed("the worker died")]), (MESSAGES, [TEXT, REFUSED, STOPPED])],
)
def test_what_fails_in_the_middle_stays_where_sglang_put_it_and_is_counted(path: str, events: list[bytes]) -> None:
    registry = CollectorRegistry()
    answer = post(FakeSglang(events=events), path, {"messages": HELLO, "stream": True}, registry=registry)
    assert (answer.status_code, answer.content) == (200, b"".join(events))
    labels = {"route": path, "status": "500" if path == RESPONSES else "400"}
    assert registry.get_sample_value("slipstream_gateway_requests_total", {"model_name": MODEL, **labels}) == 1


# -- errors ------------------------------------------------------------------------------------------------------------


def test_sglangs_nested_errors_are_ours() -> None:
    nested = {"message": "no such thing", "type": "Bad Request", "param": "input", "code": 400}
    answer = post(FakeSglang(refusal=JSONResponse({"error": nested}, 400)), RESPONSES, {"input": "hello"})
    error = {"message": "no such thing", "type": "invalid_request_error", "param": "input", "code": "invalid_value"}
    assert (answer.status_code, answer.json()) == (400, {"error": error})


@pytest.mark.parametrize("path", [RESPONSES, "/v1/embeddings", "/tokenize"])
def test_a_route_that_sglang_lacks_is_not_found(path: str) -> None:
    fake = FakeSglang(refusal=flat_error(404, "Not Found"))
    answer = post(fake, path, {"input": "hello"})
    assert (answer.status_code, error_of(answer)["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({"model": "other"}, 404, "not_found_error"),
        ({"max_tokens": "3"}, 400, "invalid_request_error"),
        ({"padding": "x" * 2000}, 413, "request_too_large"),
    ],
)
def test_anthropics_clients_get_their_own_errors(body: dict[str, Any], status: int, kind: str) -> None:
    answer = post(FakeSglang(), MESSAGES, {"messages": HELLO, **body}, max_body_bytes=1024)
    told = answer.json()
    assert answer.status_code == status
    assert told.keys() == {"type", "error", "request_id"}
    assert (told["type"], told["error"]["type"]) == ("error", kind)
    assert told["request_id"] == answer.headers["x-request-id"]


def test_claude_code_reads_why_a_conversation_does_not_fit() -> None:
    """It shortens the conversation, or asks for fewer tokens, where an error has Anthropic's words."""
    told = post(FakeSglang(refusal=flat_error(400, TOO_LONG)), MESSAGES, {"messages": HELLO}).json()
    assert told["error"] == {"type": "invalid_request_error", "message": f"prompt is too long: {TOO_LONG}"}
    fake = FakeSglang(num_prompt_tokens=CONTEXT_LENGTH - 5)
    told = post(fake, MESSAGES, {"messages": HELLO, "max_tokens": 6}).json()
    exceeded = f"input length and `max_tokens` exceed context limit: {CONTEXT_LENGTH - 5} + 6 > {CONTEXT_LENGTH}"
    assert told["error"] == {"type": "invalid_request_error", "message": exceeded}
    told = post(FakeSglang(refusal=flat_error(400, TOO_LONG)), RESPONSES, {"input": "hello"}).json()
    assert told["error"]["message"] == TOO_LONG


# -- half characters ---------------------------------------------------------------------------------------------------


def test_no_text_ends_in_half_a_character() -> None:
    """SGLang shows it at the answer's end; in the middle, where it is the model's own, it stays."""
    begun, ended = chunk(f"日{HALF}本").decode(), chunk(f'語 \\" {HALF}{HALF}').decode()
    events = [json.dumps(json.loads(each[6:]), ensure_ascii=False) for each in (begun, ended)]
    fake = FakeSglang(
        events=[*(f"data: {each}\n\n".encode() for each in events), chunk("", "length"), b"data: [DONE]\n\n"]
    )
    lines = [line[6:] for line in chat(fake, stream=True).text.split("\n\n") if line.startswith("data: {")]
    assert [json.loads(line)["choices"][0]["delta"]["content"] for line in lines] == [f"日{HALF}本", '語 \\" ', ""]

    whole = {"choices": [{"message": {"content": f"日{HALF}"}, "logprobs": {"content": [{"token": HALF}]}}]}
    fake.whole = json.dumps(whole, ensure_ascii=False).encode()
    choice = chat(fake).json()["choices"][0]
    assert choice["message"]["content"] == "日"
    assert choice["logprobs"]["content"] == [{"token": HALF}], "a token is what it is"
    text = named("response.output_text.done", text=f"日{HALF}")
    streamed = post(FakeSglang(events=[text, COMPLETED]), RESPONSES, {"input": "x", "stream": True})
    assert streamed.content.startswith(named("response.output_text.done", text="日"))


def test_the_document_has_each_endpoint() -> None:
    async def run() -> None:
        async with passing(FakeSglang()) as server, httpx.AsyncClient(base_url=server.url) as client:
            paths = (await client.get("/openapi.json")).json()["paths"]
        for path in (RESPONSES, MESSAGES, "/v1/embeddings", "/tokenize", "/detokenize"):
            schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            assert schema["additionalProperties"] is True

    asyncio.run(run())

"""In front of SGLang: what passes unchanged, what the gateway adds, and what it says when SGLang fails."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry, generate_latest
from pydantic import BaseModel

from serving.gateway.app import create_passthrough_app
from serving.gateway.config import GatewaySettings
from serving.gateway.upstream import Upstream
from serving.request_metadata import HEADER, RequestMetadata
from tests.serving.gateway.client import error_of, openai_client
from tests.serving.gateway.passage import HELLO, chat, complete, host, passing, post, talk
from tests.serving.sglang.outside.fake_sglang import (
    DONE,
    EVENTS,
    MODEL,
    TEXT,
    WHOLE,
    FakeSglang,
    chunk,
    error_event,
    flat_error,
)

POLICY = {"capture": True, "tenant": "default", "group_id": "", "domain": ""}
# -- what passes ---------------------------------------------------------------------------------------------------


def test_answers_pass_byte_for_byte() -> None:
    fake = FakeSglang()
    whole = chat(fake)
    assert whole.status_code == 200
    assert whole.content == WHOLE
    assert whole.headers["content-type"] == "application/json"
    stream = chat(fake, stream=True)
    assert stream.content == b"".join(EVENTS)
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert stream.headers["x-accel-buffering"] == "no"
    assert complete(fake, stream=True).content == b"".join(EVENTS)
    assert fake.paths == ["/v1/chat/completions"] * 2 + ["/v1/completions"]


def test_events_are_sent_when_they_come() -> None:
    async def run() -> None:
        fake = FakeSglang(hold=True)
        async with passing(fake) as server, httpx.AsyncClient(base_url=server.url) as client:
            body = {"model": MODEL, "messages": HELLO, "stream": True}
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                async with asyncio.timeout(5):
                    assert await anext(response.aiter_raw()) == EVENTS[0]

    asyncio.run(run())


@pytest.mark.parametrize("size", [1, 7, 64])
def test_events_that_come_in_pieces_pass_whole(size: int) -> None:
    raw = b"".join(EVENTS) + b": a comment behind the last event\n\n"
    fake = FakeSglang(events=[raw[at : at + size] for at in range(0, len(raw), size)])
    assert chat(fake, stream=True).content == raw


def test_other_parameters_go_on_unchanged() -> None:
    fake = FakeSglang()
    asked = {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "response_format": {"type": "json_object"},
        "logprobs": True,
        "top_logprobs": 2,
        "temperature": 0.1,
        "seed": 12345678901234567890,
        "min_p": 0.05,
        "stop": ["\n\n"],
        "user": "日本",
        "something_new": {"deep": [{"er": None}]},
    }
    chat(fake, **asked)
    [sent] = fake.bodies
    added = {key: sent.pop(key) for key in ("rid", "custom_params", "cache_salt", "return_spec_tokens_details")}
    assert sent == {"model": MODEL, "messages": HELLO, **asked}
    assert added["custom_params"] == {"slipstream": POLICY}
    assert added["cache_salt"] == "default"


@pytest.mark.parametrize("top_k", [{}, {"top_k": 40}])
def test_a_top_p_of_0_asks_sglang_for_the_likeliest_token(top_k: dict[str, int]) -> None:
    """SGLang refuses 0."""
    fake = FakeSglang()
    for top_p in (0, 0.0):
        assert chat(fake, top_p=top_p, temperature=0.7, **top_k).status_code == 200
        assert (fake.bodies[-1]["top_p"], fake.bodies[-1]["top_k"], fake.bodies[-1]["temperature"]) == (1, 1, 0.7)


def test_a_null_asks_sglang_for_nothing() -> None:
    """Its own fields are not all allowed to be null."""
    fake = FakeSglang()
    nulls = ("n", "stream", "max_tokens", "max_completion_tokens", "slipstream", "cache_salt", "custom_params", "stop")
    nulls += ("seed", "temperature", "tools", "stop_regex", "something_new")
    message = {"role": "assistant", "content": "hi", "tool_calls": None, "reasoning_content": None}
    plain, nulled = chat(fake, messages=[message]), chat(fake, messages=[message], **dict.fromkeys(nulls))
    assert plain.content == nulled.content == WHOLE
    without, with_nulls = fake.bodies
    assert {**with_nulls, "rid": without["rid"]} == without
    assert without["messages"] == [message]
    unlimited = chat(fake, messages=[message], max_tokens=-1, max_completion_tokens=-1)
    assert unlimited.status_code == 200, "llama.cpp's value for no limit"
    assert {**fake.bodies[-1], "rid": without["rid"]} == without
    chat(fake, messages=[message], max_tokens=-1, max_completion_tokens=None, seed=-1)
    assert fake.bodies[-1]["seed"] == -1
    partly = complete(fake, slipstream={"capture": None, "group_id": None, "domain": None})
    assert partly.status_code == 200


def test_the_document_says_that_a_null_is_taken() -> None:
    app = create_passthrough_app(
        host(), Upstream("http://127.0.0.1:9"), settings=GatewaySettings(), registry=CollectorRegistry()
    )
    for path in ("/v1/chat/completions", "/v1/completions"):
        body = app.openapi()["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body["additionalProperties"] is True
        for name in body["properties"].keys() - {"model"}:
            assert '{"type": "null"}' in json.dumps(body["properties"][name]), name


@pytest.mark.parametrize("how", [{}, {"stream": True}])
def test_a_seed_without_effect_is_answered_with_a_warning(how: dict[str, Any]) -> None:
    def warning(*, heeds_seed: bool = False, **fields: Any) -> str | None:
        fake, draft = FakeSglang(), host()
        draft.heeds_seed = heeds_seed
        response = talk(
            fake,
            lambda client: client.post("/v1/completions", json={"model": MODEL, "prompt": "x", **how, **fields}),
            draft=draft,
        )
        assert response.content == (b"".join(EVENTS) if how else WHOLE), "the answer itself is SGLang's"
        assert fake.bodies[0].get("seed") == fields.get("seed")
        return response.headers.get("x-slipstream-warning")

    said = warning(seed=1)
    assert said is not None
    assert said.startswith("seed has no effect")
    assert "--enable-deterministic-inference" in said
    assert warning(seed=0, temperature=1) == said
    assert warning(seed=1, heeds_seed=True) is None
    assert "n has no effect" in (warning(seed=1, heeds_seed=True, n=2) or "")
    assert warning(seed=1, temperature=0) is warning(seed=None) is warning() is None


def test_numbers_keep_their_digits() -> None:
    fake = FakeSglang()
    body = b'{"model": "%s", "prompt": "x", "temperature": 0.10000000000000000001, "x": 1e400}' % MODEL.encode()
    talk(
        fake, lambda client: client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    )
    assert b"0.10000000000000000001" in fake.raw[0]
    assert b"1e400" in fake.raw[0]


def test_only_the_body_goes_on() -> None:
    fake = FakeSglang()
    headers = {"authorization": "Bearer secret", "x-data-parallel-rank": "7", "cookie": "a=b", "x-request-id-mine": "1"}
    talk(fake, lambda client: client.post("/v1/completions", json={"model": MODEL, "prompt": "x"}, headers=headers))
    assert not fake.headers[0].keys() & headers.keys()


# -- what the gateway adds -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_policy_travels_in_custom_params(path: str) -> None:
    fake = FakeSglang()
    ours = {"capture": False, "group_id": "g-1", "domain": "math"}
    body = {"messages": HELLO, "prompt": "x", "custom_params": {"mine": [1, 2]}, "slipstream": ours}
    response = post(fake, path, body)
    [sent] = fake.bodies
    assert sent["custom_params"] == {"mine": [1, 2], "slipstream": {**ours, "tenant": "default"}}
    assert "slipstream" not in sent
    assert sent["rid"] == response.headers["x-request-id"]


def test_what_is_added_stands_in_a_header_too() -> None:
    """Where a router loses it from the body; the body's is of no other opinion."""
    fake = FakeSglang()
    ours = {"capture": False, "group_id": "g \u00fc\U0001f642", "domain": "math"}
    body = {"messages": HELLO, "slipstream": ours, "cache_salt": "s"}
    spoof = {HEADER: '{"rid":"mine","cache_salt":"other","slipstream":{"tenant":"other"}}'}
    talk(fake, lambda client: client.post("/v1/chat/completions", json={"model": MODEL, **body}, headers=spoof))
    [sent], [headers] = fake.bodies, fake.headers
    assert headers[HEADER].isascii()
    marks = RequestMetadata.of_header(headers[HEADER])
    assert (marks.rid, marks.cache_salt) == (sent["rid"], sent["cache_salt"]) == (sent["rid"], "default/s")
    assert marks.policy == sent["custom_params"]["slipstream"] == {**ours, "tenant": "default"}


@pytest.mark.parametrize("value", ["", "{}", "nonsense", '{"rid":1,"cache_salt":"","slipstream":{}}'])
def test_a_header_that_the_gateway_did_not_write(value: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        RequestMetadata.of_header(value)


def test_no_client_writes_the_policy_or_the_request_id() -> None:
    fake = FakeSglang()
    spoofed = chat(fake, custom_params={"slipstream": {"tenant": "other"}})
    assert (spoofed.status_code, error_of(spoofed)["param"]) == (400, "custom_params.slipstream")
    escaped = b'{"model": "%s", "messages": [], "custom_params": {"\\u0073lipstream": {}}}' % MODEL.encode()
    headers = {"content-type": "application/json"}
    response = talk(fake, lambda client: client.post("/v1/chat/completions", content=escaped, headers=headers))
    assert response.status_code == 400
    assert fake.raw == []
    twice = b'{"model": "%s", "messages": [], "rid": "a", "custom_params": null, "rid": "b"}' % MODEL.encode()
    response = talk(fake, lambda client: client.post("/v1/chat/completions", content=twice, headers=headers))
    assert fake.raw[0].count(b'"rid"') == 1
    assert fake.bodies[0]["rid"] == response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("salt", "status", "sent"),
    [
        (None, 200, "default"),
        ("", 200, "default"),
        ("mine", 200, "default/mine"),
        ("../other", 200, "default/../other"),
        ("x" * 257, 400, None),
        (["other"], 400, None),
        (1, 400, None),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_cache_salt_stays_within_the_tenant(path: str, salt: object, status: int, sent: str | None) -> None:
    fake = FakeSglang()
    response = post(fake, path, {"messages": HELLO, "prompt": "x", "cache_salt": salt})
    assert response.status_code == status
    assert [body["cache_salt"] for body in fake.bodies] == ([] if sent is None else [sent])


@pytest.mark.parametrize(
    "custom",
    [
        *({"a": {"b": {"c": 1}}}, {"a": [[1]]}, {"a": [{}]}, [1], "x"),
        *({"a": 2**64}, {"a": [0, 2**64]}, {"a": {"b": -(2**63) - 1}}),
    ],
)
def test_custom_params_that_the_scheduler_cannot_decode_are_refused(custom: object) -> None:
    fake = FakeSglang()
    response = chat(fake, custom_params=custom)
    assert response.status_code == 400
    assert str(error_of(response)["param"]).startswith("custom_params")
    assert fake.raw == []


def test_custom_params_of_64_bits_are_forwarded() -> None:
    fake = FakeSglang()
    custom = {"a": [2**64 - 1, -(2**63), True, 1e300], "b": {"c": 2**63}}
    assert chat(fake, custom_params=custom).status_code == 200
    assert fake.bodies[0]["custom_params"].items() >= custom.items()


# -- what the gateway refuses by itself ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        ({"model": "other"}, 404, "model", "model_not_found"),
        ({"model": f"{MODEL}:adapter"}, 404, "model", "model_not_found"),
        ({"model": None}, 400, "model", "missing_required_parameter"),
        ({"n": 65}, 400, "n", "invalid_value"),
        ({"n": 2, "prompt": ["a"] * 33}, 400, "n", "invalid_value"),
        ({"n": "2"}, 400, "n", "invalid_type"),
        ({"stream": "yes"}, 400, "stream", "invalid_type"),
        ({"slipstream": {"tenant": "x"}}, 400, "slipstream.tenant", "unknown_parameter"),
        ({"slipstream": {"capture": 1}}, 400, "slipstream.capture", "invalid_type"),
    ],
)
def test_what_the_gateway_must_know_is_checked(body: dict[str, Any], status: int, param: str, code: str) -> None:
    fake = FakeSglang()
    response = complete(fake, **body)
    error = error_of(response)
    assert (response.status_code, error["param"], error["code"]) == (status, param, code)
    assert fake.raw == []


def test_token_ids_are_one_prompt() -> None:
    fake = FakeSglang()
    assert complete(fake, prompt=list(range(1000))).status_code == 200
    assert complete(fake, prompt=[[1, 2]] * 65).status_code == 400


@pytest.mark.parametrize("body", [b"{", b"[]", b'"x"', b'{"model": "%s", "temperature": NaN}' % MODEL.encode(), b""])
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    fake = FakeSglang()
    headers = {"content-type": "application/json"}
    response = talk(fake, lambda client: client.post("/v1/completions", content=body, headers=headers))
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"
    assert fake.raw == []


def test_body_limit_and_content_type() -> None:
    fake = FakeSglang()
    large = post(fake, "/v1/completions", {"prompt": "x" * 5000}, max_body_bytes=2048)
    assert (large.status_code, error_of(large)["code"]) == (413, "body_too_large")
    response = talk(fake, lambda client: client.post("/v1/completions", content=b"{}"))
    assert (response.status_code, error_of(response)["code"]) == (415, "unsupported_media_type")
    assert fake.raw == []


@pytest.mark.parametrize("path", ["/generate", "/v1/responses/resp_1", "/update_weights_from_disk", "/flush_cache"])
def test_no_other_path_reaches_sglang(path: str) -> None:
    fake = FakeSglang()
    response = talk(fake, lambda client: client.post(path, json={}))
    assert response.status_code == 404
    assert error_of(response)["code"] == "not_found"
    assert fake.paths == []


def test_status_pages_answer_for_the_draft() -> None:
    draft = host()
    draft.draft_version = 7

    async def look(client: httpx.AsyncClient) -> None:
        assert (await client.get("/v1/models")).json()["data"][0]["max_model_len"] == 4096
        assert (await client.get(f"/v1/models/{MODEL}")).json()["id"] == MODEL
        assert (await client.get("/ready")).json()["draft_version"] == 7
        draft.alive = False
        assert (await client.get("/health")).status_code == 503
        assert "slipstream_gateway_requests_total" in (await client.get("/metrics")).text

    talk(FakeSglang(), look, draft=draft)


# -- when SGLang refuses or fails ----------------------------------------------------------------------------------

LONG = "The input (5000 tokens) is longer than the model's context length (4096 tokens)."


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("answer", "status", "kind", "code", "message"),
    [
        (flat_error(400, "temperature must be finite"), 400, "invalid_request_error", "invalid_value", "temperature"),
        (flat_error(400, LONG), 400, "invalid_request_error", "context_length_exceeded", "5000 tokens"),
        (flat_error(404, "no such session"), 404, "invalid_request_error", "not_found", "no such session"),
        (flat_error(413, "too large"), 413, "invalid_request_error", "body_too_large", "too large"),
        (flat_error(401, "Unauthorized"), 500, "server_error", "engine_error", "failed"),
        (flat_error(403, "Forbidden"), 500, "server_error", "engine_error", "failed"),
        (flat_error(429, "slow down"), 429, "rate_limit_error", "engine_busy", "retry"),
        (flat_error(503, "The request queue is full."), 429, "rate_limit_error", "engine_busy", "retry"),
        (flat_error(503, "Request waiting timeout reached."), 503, "server_error", "engine_unavailable", "waiting"),
        (flat_error(500, "Internal server error: 'a prompt'"), 500, "server_error", "engine_error", "failed"),
        (flat_error(501, "no streaming"), 501, "server_error", "engine_error", "failed"),
        (Response("<html>", status_code=502), 502, "server_error", "engine_error", "failed"),
        (Response(status_code=307, headers={"location": "/"}), 500, "server_error", "engine_error", "failed"),
    ],
)
def test_refusals_leave_in_the_envelope(
    answer: Response, status: int, kind: str, code: str, message: str, stream: bool
) -> None:
    response = chat(FakeSglang(refusal=answer), stream=stream)
    error = error_of(response)
    assert (response.status_code, error["type"], error["code"]) == (status, kind, code)
    assert message in error["message"]
    assert "prompt" not in error["message"]
    assert ("retry-after" in response.headers) == (status in (429, 503))


def test_the_wait_that_sglang_asks_for_is_passed_on() -> None:
    for status in (429, 503):
        refusal = flat_error(status, "later", headers={"retry-after": "17"})
        assert chat(FakeSglang(refusal=refusal)).headers["retry-after"] == "17"


class _Body(BaseModel):
    messages: list[dict[str, str]]
    temperature: float = 1.0


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "messages", "missing_required_parameter"),
        ({"messages": [], "temperature": 'it\'s "hot"'}, "temperature", "invalid_value"),
        ({"messages": [{"role": ["secret"]}]}, "messages", "invalid_value"),
    ],
)
def test_bodies_that_sglang_does_not_accept_name_the_parameter(body: dict[str, Any], param: str, code: str) -> None:
    """The text is FastAPI's own for such a body, put together as SGLang does."""
    app = FastAPI()

    @app.exception_handler(RequestValidationError)
    async def refuse(request: object, failure: RequestValidationError) -> Response:
        message = f"{failure} {failure.errors()}"
        return JSONResponse(
            {"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400}, 400
        )

    @app.post("/v1/chat/completions")
    async def create(body: _Body) -> None: ...

    fake = FakeSglang()
    fake.app = lambda: app  # type: ignore[method-assign]
    response = post(fake, "/v1/chat/completions", body)
    error = error_of(response)
    assert (response.status_code, error["param"], error["code"]) == (400, param, code)
    assert re.fullmatch(rf"{param}: [A-Z][^'\"{{]+", error["message"]), error["message"]


@pytest.mark.parametrize("urls", [("http://127.0.0.1:9",), ("http://127.0.0.1:9", "http://127.0.0.2:9")])
@pytest.mark.parametrize("stream", [False, True])
def test_no_sglang_is_unavailable(stream: bool, urls: tuple[str, ...]) -> None:
    response = post(FakeSglang(), "/v1/completions", {"prompt": "x", "stream": stream}, urls=urls)
    assert (response.status_code, error_of(response)["code"]) == (503, "engine_unavailable")
    assert int(response.headers["retry-after"]) > 0


@pytest.mark.parametrize("events", [[], [b"data: {"]])
def test_a_stream_that_dies_before_its_first_event_is_unavailable(events: list[bytes]) -> None:
    response = chat(FakeSglang(events=events, cut=True), stream=True)
    assert (response.status_code, error_of(response)["code"]) == (503, "engine_unavailable")


@pytest.mark.parametrize(
    ("message", "status", "code"),
    [("The request queue is full.", 429, "engine_busy"), ("Out of memory.", 503, "engine_unavailable")],
)
def test_a_stream_that_begins_with_an_error_is_a_refusal(message: str, status: int, code: str) -> None:
    response = chat(FakeSglang(events=[error_event(503, message), DONE]), stream=True)
    assert (response.status_code, error_of(response)["code"]) == (status, code)
    assert "retry-after" in response.headers


def test_an_error_inside_a_stream_passes_and_is_counted() -> None:
    registry = CollectorRegistry()
    events = [*EVENTS[:2], error_event(500, "Out of memory"), DONE]
    body = {"messages": HELLO, "stream": True}
    response = post(FakeSglang(events=events), "/v1/chat/completions", body, registry=registry)
    assert response.content == b"".join(events)
    assert _count(registry, "500") == 1


@pytest.mark.parametrize("last", [b"", EVENTS[3][:20], b"data: {"])
@pytest.mark.parametrize("cut", [True, False])
def test_a_stream_that_breaks_off_raises_in_the_openai_client(last: bytes, cut: bool) -> None:
    """Also where the connection ends in order: without `[DONE]` the answer is not whole."""

    async def run() -> None:
        fake = FakeSglang(events=[*EVENTS[:3], *([last] if last else [])], cut=cut)
        registry = CollectorRegistry()
        async with passing(fake, registry=registry) as server, openai_client(server) as client:
            stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
            for text in TEXT[:3]:
                assert (await anext(stream)).choices[0].delta.content == text
            with pytest.raises(openai.APIError) as broken:
                await anext(stream)
            assert broken.value.code == "engine_unavailable"
        assert _count(registry, "503") == 1

    asyncio.run(run())


def test_openai_client_reads_what_sglang_sent() -> None:
    async def run() -> None:
        fake = FakeSglang()
        async with passing(fake) as server, openai_client(server) as client:
            stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
            assert "".join([each.choices[0].delta.content or "" async for each in stream]) == "".join(TEXT)
            whole = await client.chat.completions.create(
                model=MODEL, messages=HELLO, extra_body={"slipstream": {"capture": False}}
            )
            assert whole.choices[0].message.content == "".join(TEXT)
            assert fake.bodies[-1]["custom_params"]["slipstream"]["capture"] is False
            fake.refusal = flat_error(503, "The request queue is full.")
            with pytest.raises(openai.RateLimitError):
                await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)

    asyncio.run(run())


# -- clients that leave, and the end -------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_closes_the_connection_to_sglang(stream: bool) -> None:
    async def run() -> None:
        fake = FakeSglang(hold=True)
        registry = CollectorRegistry()
        async with passing(fake, registry=registry) as server:
            client = httpx.AsyncClient(base_url=server.url)
            body = {"model": MODEL, "messages": HELLO, "stream": stream}
            asked = asyncio.create_task(client.post("/v1/chat/completions", json=body))
            await fake.holding.wait()
            assert not fake.left.is_set()
            asked.cancel()
            await asyncio.wait([asked])
            async with asyncio.timeout(5):
                await fake.left.wait()
            await client.aclose()
        assert _count(registry, "499") == 1
        assert registry.get_sample_value("slipstream_gateway_generations_in_flight", {"model_name": MODEL}) == 0

    asyncio.run(run())


def test_the_end_of_the_grace_period_ends_a_stream_with_an_error() -> None:
    async def run() -> None:
        fake = FakeSglang(hold=True)

        async def ask(url: str) -> bytes:
            async with httpx.AsyncClient(base_url=url) as client:
                body = {"model": MODEL, "messages": HELLO, "stream": True}
                return (await client.post("/v1/chat/completions", json=body)).content

        async with passing(fake, grace_s=0) as server:
            asked = asyncio.create_task(ask(server.url))
            await fake.holding.wait()
        content = await asked
        assert content.startswith(EVENTS[0])
        assert json.loads(content.removeprefix(EVENTS[0]).removeprefix(b"data: "))["error"]["code"] == "shutting_down"

    asyncio.run(run())


def test_many_at_once() -> None:
    async def all_at_once(client: httpx.AsyncClient) -> list[httpx.Response]:
        body = {"model": MODEL, "messages": HELLO, "stream": True}
        return await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for _ in range(50)))

    fake = FakeSglang()
    responses = talk(fake, all_at_once)
    assert {response.content for response in responses} == {b"".join(EVENTS)}
    assert len({body["rid"] for body in fake.bodies}) == 50


def test_no_text_of_a_request_is_logged(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    secret = "xyzzy-plugh"
    refusals = [flat_error(500, f"failed at {secret}"), flat_error(400, secret)]
    for fake in (FakeSglang(), *(FakeSglang(refusal=refusal) for refusal in refusals), FakeSglang(cut=True, events=[])):
        for stream in (False, True):
            chat(fake, messages=[{"role": "user", "content": secret}], stream=stream)
    printed = capfd.readouterr()
    assert secret not in printed.out + printed.err + caplog.text


def test_time_to_the_first_event_is_measured() -> None:
    registry = CollectorRegistry()
    post(FakeSglang(events=[chunk("a"), DONE]), "/v1/completions", {"prompt": "x", "stream": True}, registry=registry)
    assert (
        f'first_token_seconds_count{{model_name="{MODEL}",route="/v1/completions"}} 1.0'
        in generate_latest(registry).decode()
    )


@pytest.mark.parametrize("asks", [{}, {"stream_options": {"include_usage": True}}])
def test_tokens_and_pace_are_measured_whether_or_not_the_client_asks_for_usage(asks: dict[str, Any]) -> None:
    registry = CollectorRegistry()
    used = json.loads(WHOLE)["usage"]
    usage = b"data: " + json.dumps({"choices": [], "usage": used}).encode() + b"\n\n"
    fake = FakeSglang(events=[*EVENTS[:-1], usage, DONE])

    async def say(client: httpx.AsyncClient) -> None:
        body = {"model": MODEL, "messages": HELLO}
        await client.post("/v1/chat/completions", json={**body, "stream": True, **asks})
        assert (tokens("prompt"), tokens("generation"), paces()) == (3, 5, 1)
        await client.post("/v1/chat/completions", json=body)
        assert (tokens("prompt"), tokens("generation"), paces()) == (6, 10, 1)

    def tokens(kind: str) -> float | None:
        labels = {"model_name": MODEL, "tenant": "default"}
        return registry.get_sample_value(f"slipstream_gateway_{kind}_tokens_total", labels)

    def paces() -> float | None:
        labels = {"model_name": MODEL, "route": "/v1/chat/completions"}
        return registry.get_sample_value("slipstream_gateway_inter_token_latency_seconds_count", labels)

    talk(fake, say, registry=registry)


def _count(registry: CollectorRegistry, status: str) -> float | None:
    labels = {"model_name": MODEL, "route": "/v1/chat/completions", "status": status}
    return registry.get_sample_value("slipstream_gateway_requests_total", labels)

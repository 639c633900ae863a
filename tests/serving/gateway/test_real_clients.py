"""What clients and probes send without asking for anything, and the ways in which a proxy passes it on."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from serving.gateway.server import GatewayServer
from tests.fixtures.doubles import DoubleEngine
from tests.serving.gateway.client import CHAT, COMPLETIONS, HELLO, ask, error_of, gateway, post, running

ROLLOUTS = "/v1/rollouts"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "double", "messages": HELLO, "max_tokens": 4, "stream_options": {}, "slipstream": {}},
    COMPLETIONS: {"model": "double", "prompt": "hello", "max_tokens": 4, "stream_options": {}, "slipstream": {}},
    ROLLOUTS: {"model": "double", "slipstream": {}, "groups": [{"messages": HELLO, "max_tokens": 4}]},
}
ENGINE = DoubleEngine()
APP = gateway(ENGINE)


def asked(path: str, body: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What the engine is asked for, but for the names that each request gets."""
    ENGINE.requests.clear()
    response = ask(APP, lambda client: client.post(path, json=body))
    assert response.status_code == 200, response.text
    return [
        (request.prompt_token_ids, request.max_tokens, request.sampling, request.stop, request.ignore_eos)
        for request in ENGINE.requests
    ]


def schema_of(path: str) -> dict[str, Any]:
    body = APP.openapi()["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert isinstance(body, dict)
    return body


def with_nulls(value: Any, schema: dict[str, Any]) -> Any:
    """`value` with a null for every field that its schema knows and that it does not have."""
    schemas = schema.get("anyOf", [schema])
    if isinstance(value, list):
        items = next(each["items"] for each in schemas if "items" in each)
        return [with_nulls(each, items) for each in value]
    if not isinstance(value, dict):
        return value
    properties = next(each["properties"] for each in schemas if "properties" in each)
    return {name: with_nulls(value.get(name), each) for name, each in properties.items()}


@pytest.mark.parametrize("path", BODIES)
def test_a_null_is_as_if_the_field_were_absent_in_every_object(path: str) -> None:
    nulled = with_nulls(BODIES[path], schema_of(path))
    assert json.dumps(nulled).count("null") > 20
    assert asked(path, nulled) == asked(path, BODIES[path])


def harmless() -> Iterator[tuple[str, str, Any]]:
    """Each value that the document declares for a field that this server does not act on."""
    for path in (CHAT, COMPLETIONS):
        for name, schema in schema_of(path)["properties"].items():
            values = schema.get("enum", [] if schema else ["x", 1, True, [{}], {"a": [1]}])
            yield from ((path, name, value) for value in values)


def test_the_document_declares_what_is_accepted_and_changes_nothing() -> None:
    pairs = list(harmless())
    assert len(pairs) > 200
    for path in (CHAT, COMPLETIONS):
        plain = asked(path, BODIES[path])
        for name, value in [pair[1:] for pair in pairs if pair[0] == path]:
            assert asked(path, {**BODIES[path], name: value}) == plain, (name, value)


DEFAULTS = {
    "openai, with what its users set for their own accounts": """{
        "metadata": {"run": "7"}, "store": true, "service_tier": "auto", "user": "u-1", "safety_identifier": "s-1",
        "prompt_cache_key": "k", "parallel_tool_calls": true, "tools": [], "tool_choice": "auto",
        "stream_options": {"include_usage": true}, "verbosity": "medium",
        "prediction": {"type": "content", "content": "hello"}}""",
    "LangChain and LiteLLM, with their defaults written out": """{
        "n": 1, "stop": [], "frequency_penalty": 0.0, "presence_penalty": 0, "logit_bias": {}, "logprobs": false,
        "top_logprobs": null, "response_format": {"type": "text", "json_schema": null}, "modalities": ["text"],
        "reasoning_effort": null, "max_completion_tokens": 4}""",
    "vLLM and SGLang": """{
        "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "length_penalty": 1, "best_of": 1,
        "use_beam_search": false, "skip_special_tokens": true, "min_tokens": 0, "stop_token_ids": [],
        "guided_json": null, "chat_template_kwargs": {}, "priority": 0, "separate_reasoning": true,
        "cache_salt": "s"}""",
    "llama.cpp, OpenRouter, Open WebUI and LiteLLM": """{
        "mirostat": 0, "mirostat_tau": 5.0, "repeat_last_n": 64, "include_reasoning": true, "reasoning": {},
        "usage": {"include": true}, "chat_id": "c", "session_id": "s", "timeout": 600, "num_retries": 2,
        "extra_headers": {}, "modalities": []}""",
}
"""What clients of each of these send without being asked to."""


@pytest.mark.parametrize("who", DEFAULTS)
def test_what_real_clients_send_by_default_changes_nothing(who: str) -> None:
    assert asked(CHAT, {**BODIES[CHAT], **json.loads(DEFAULTS[who])}) == asked(CHAT, BODIES[CHAT])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_says_that_there_is_none_counts_as_absent(path: str) -> None:
    plain = {name: value for name, value in BODIES[path].items() if name != "max_tokens"}
    none = {"max_tokens": -1, "max_completion_tokens": -1, "seed": -1, "logit_bias": {"50": 0, "7": 0.0}}
    asked(path, {**plain, **none})
    assert ENGINE.requests[0].seed is None
    assert asked(path, {**plain, **none, "best_of": 3, "n": 3}) == asked(path, plain) * 3
    assert asked(path, {**plain, **none, "max_completion_tokens": 4}) == asked(path, BODIES[path])


def test_an_answer_is_sent_back_as_a_library_keeps_it() -> None:
    said = {"role": "assistant", "content": "hi"}
    kept = said | json.loads(
        """{
        "refusal": null, "audio": null, "function_call": null, "tool_calls": [], "name": null, "finish_reason": "stop",
        "annotations": [{"type": "url_citation"}], "reasoning_content": "let me think", "index": 0, "timestamp": 1,
        "provider_specific_fields": {"refusal": null}, "partial": false, "files": [], "function_calls": []}"""
    )
    part = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}, "annotations": None}
    asks = {"role": "user", "content": [part]}
    plain = asked(CHAT, {**BODIES[CHAT], "messages": [*HELLO, said, *HELLO]})
    assert asked(CHAT, {**BODIES[CHAT], "messages": [*HELLO, kept, asks]}) == plain
    empty = asked(CHAT, {**BODIES[CHAT], "messages": [*HELLO, {**said, "content": ""}, asks]})
    for silent in ({"role": "assistant"}, {**kept, "content": None}):
        assert asked(CHAT, {**BODIES[CHAT], "messages": [*HELLO, silent, asks]}) == empty
    # A call without arguments, and what a tool without a result said.
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    talk = [*HELLO, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": ""}]
    called = asked(CHAT, {**BODIES[CHAT], "messages": talk})
    bare = {**call, "function": {"name": "f", "arguments": ""}}
    for nothing in ({}, {"content": None}, {"content": []}):
        answers = (
            {**nothing, "role": "assistant", "tool_calls": [bare]},
            {**nothing, "role": "tool", "tool_call_id": "1"},
        )
        assert asked(CHAT, {**BODIES[CHAT], "messages": [*HELLO, *answers]}) == called
    group = {"messages": [*HELLO, kept, asks], "top_k": -1, "max_tokens": 4}
    assert asked(ROLLOUTS, {"model": "double", "groups": [group]})[0][0] == plain[0][0]


def test_two_seeds_share_no_sample() -> None:
    def texts(seed: int, **more: Any) -> list[str]:
        body = {"prompt": "hello", "seed": seed, "max_tokens": 40, **more}
        response = post(DoubleEngine(), COMPLETIONS, body, max_samples=16)
        return [choice["text"] for choice in response.json()["choices"]]

    several = [texts(seed, n=4) for seed in (100, 101, 102, 2**63 - 1)]
    assert len({text for each in several for text in each}) == 16
    assert texts(100, n=4) == several[0], "the same seed gives the same texts"
    assert [texts(seed)[0] for seed in (100, 101)] == [several[0][0], several[1][0]], "one is the first of several"
    assert texts(100, n=2) == several[0][:2]


# -- probes and proxies ------------------------------------------------------------------------------------------------


def on_a_socket(*requests: bytes) -> list[bytes]:
    """The answers to raw requests, each on a connection of its own."""

    async def exchange(server: GatewayServer, raw: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        writer.write(raw)
        async with asyncio.timeout(10):
            answer = await reader.read()
        writer.close()
        return answer

    async def run() -> list[bytes]:
        async with running(DoubleEngine()) as server:
            return [await exchange(server, raw) for raw in requests]

    return asyncio.run(run())


END = b" HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"


def test_head_is_get_without_the_body_on_every_path() -> None:
    templates = [route.path for route in APP.routes if isinstance(route, APIRoute) and "GET" in (route.methods or ())]
    paths = [path.replace("{model:path}", "double").replace("{name:path}", "main.js") for path in templates]
    assert {"/health", "/ready", "/metrics", "/v1/models", "/", "/page/main.js", "/slipstream/live"} <= set(paths)
    raw = [method + b" " + path.encode() + END + b"\r\n" for path in paths for method in (b"GET", b"HEAD")]
    answers = iter(on_a_socket(*raw))
    for path, got, headed in zip(paths, answers, answers, strict=True):
        head, _, body = headed.partition(b"\r\n\r\n")
        assert body == b"", path
        assert head.splitlines()[0] == got.splitlines()[0], path
        assert (b"content-length: 0" in head) == (b"content-length: 0" in got), path


def test_another_method_is_told_which_ones_there_are() -> None:
    def allowed(method: str, path: str) -> str:
        response = ask(APP, lambda client: client.request(method, path))
        assert response.status_code == 405
        assert method == "HEAD" or error_of(response)["code"] == "method_not_allowed"
        return response.headers["allow"]

    assert allowed("OPTIONS", "/health") == allowed("POST", "/metrics") == "GET, HEAD"
    assert allowed("HEAD", CHAT) == allowed("OPTIONS", CHAT) == "POST"
    assert allowed("PUT", f"{ROLLOUTS}/one") == "DELETE, GET, HEAD"


def test_paths_as_proxies_and_base_urls_make_them() -> None:
    async def talk(client: httpx.AsyncClient) -> list[int]:
        got = [await client.get(path) for path in ("/health/", "/v1/models/", "/v1/models/double/", "/metrics/")]
        doubled = ("/v1//chat/completions", "http://127.0.0.1//v1///chat//completions//")
        paths = (f"{CHAT}/", f"http://127.0.0.1/{CHAT}", *doubled)
        got += [await client.post(path, json=BODIES[CHAT]) for path in paths]
        return [response.status_code for response in got]

    assert ask(APP, talk) == [200] * 8
    body = json.dumps(BODIES[CHAT]).encode()
    length = b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
    whole, waiting = on_a_socket(
        b"GET http://127.0.0.1/ready" + END + b"\r\n",
        b"POST " + CHAT.encode() + END + length + b"expect: 100-continue\r\n\r\n" + body,
    )
    assert whole.startswith(b"HTTP/1.1 200")
    assert b"HTTP/1.1 200" in waiting


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/v1/messages", f"{CHAT}/chat/completions", "/v2/models"])
def test_a_wrong_base_url_is_told_how_it_ends(path: str) -> None:
    response = ask(APP, lambda client: client.post(path, json=BODIES[CHAT]))
    error = error_of(response)
    assert (response.status_code, error["code"]) == (404, "not_found")
    assert "ends in /v1" in error["message"]


def test_a_path_that_this_engine_lacks_is_no_wrong_base_url() -> None:
    """Many clients ask for Responses, unless they are told to ask for chats."""
    for path in ("/v1/responses", "/v1/embeddings/"):
        response = ask(APP, lambda client, path=path: client.post(path, json=BODIES[CHAT]))
        error = error_of(response)
        assert (response.status_code, error["code"]) == (404, "not_found")
        assert CHAT in error["message"]
        assert "base URL" not in error["message"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_anthropics_clients_read_that_this_engine_lacks_their_paths(path: str) -> None:
    told = ask(APP, lambda client: client.post(path, json=BODIES[CHAT])).json()
    assert (told["type"], told["error"]["type"]) == ("error", "not_found_error")
    assert CHAT in told["error"]["message"]


def test_an_offer_of_http_2_is_passed_over_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    """Java's HttpClient makes it with each request that is not encrypted."""
    offer = (
        b"connection: Upgrade, HTTP2-Settings, close\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
    )
    body = json.dumps(BODIES[CHAT]).encode()
    head = b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n" + offer
    chunked = b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    sized = b"content-length: %d\r\n\r\n%b" % (len(body), body)
    assert all(answer.startswith(b"HTTP/1.1 200") for answer in on_a_socket(head + chunked, head + sized))
    assert caplog.records == []


PREFIX = "/slipstream"
"""The one that a route of the gateway begins with, too."""


@pytest.mark.parametrize("is_left_in", [False, True])
def test_below_a_prefix_that_the_proxy_takes_away_or_leaves(is_left_in: bool) -> None:
    app = gateway(DoubleEngine(), root_path="slipstream/")
    before = PREFIX if is_left_in else ""

    async def talk(client: httpx.AsyncClient) -> None:
        for path in ("/", "/page/main.js", "/health", "/slipstream/live", "/slipstream/drafts", "/v1/models/double"):
            for method in ("GET", "HEAD"):
                response = await client.request(method, f"{before}{path}")
                assert response.status_code == 200, (method, path)
        assert (await client.post(f"{before}{CHAT}", json=BODIES[CHAT])).status_code == 200
        assert (await client.get(f"{before}/v1/nothing")).status_code == 404
        document = (await client.get(f"{before}/openapi.json")).json()
        assert document["servers"] == [{"url": PREFIX}]
        counted = (await client.get(f"{before}/metrics")).text
        assert 'route="/slipstream/live",status="200"} 2.0' in counted

    ask(app, talk)


def test_the_page_is_found_below_its_prefix_without_the_slash() -> None:
    app = gateway(DoubleEngine(), root_path=PREFIX)
    response = ask(app, lambda client: client.get(PREFIX))
    assert (response.status_code, response.headers["location"]) == (307, f"{PREFIX}/")
    assert ask(gateway(DoubleEngine()), lambda client: client.get("/")).status_code == 200


def test_every_address_in_the_page_is_relative() -> None:
    page = files("serving.gateway.live") / "page"
    text = "".join(file.read_text() for file in page.iterdir() if file.name.endswith((".html", ".js")))
    found = re.findall(r"""(?:href|src)="([^"]+)"|(?:fetch|from|import)\s*\(?\s*["'`]([^"'`]+)""", text)
    assert len(found) > 10
    assert not [url for pair in found for url in pair if url.startswith("/") or "://" in url]

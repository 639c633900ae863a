"""Whatever a client sends, it gets a 4xx envelope that names the field, and the engine never sees it; what a server may
leave out is left out and logged, unless it is strict.
"""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from serving.gateway.openai.schema import IGNORABLE
from tests.fixtures.doubles import DoubleEngine
from tests.serving.gateway.client import CHAT, COMPLETIONS, HELLO, ask, error_of, gateway

JSON = {"content-type": "application/json"}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}


def tool(name: str, parameters: object = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


UNSUPPORTED = "unsupported_parameter"
UNKNOWN = "unknown_parameter"
MISSING = "missing_required_parameter"
TYPE = "invalid_type"
VALUE = "invalid_value"

RAW = [
    b"",
    b"{",
    b"hello",
    b"{'model': 'double'}",
    b'{"model": "double",}',
    b'{"model": "double"} trailing',
    b'{"model": "\xff\xfe"}',
    b'{"model": "\\ud800"}',
    b'{"model": "\\udfff\\ud800"}',
    '{"model": "double"}'.encode("utf-16"),
    b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"x": ' + b'{"x":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    b'{"seed": ' + b"9" * 10_000 + b"}",
    b"\x00",
]

NOT_OBJECTS = [b"[]", b"null", b"1", b'"text"', b"true", b"NaN"]

BOTH = [
    # value outside the range, or of another type: a boolean is not a number, a string is not one either
    ({"model": 1}, "model", TYPE),
    ({"model": None}, "model", MISSING),
    ({"temperature": False}, "temperature", TYPE),
    ({"temperature": "1"}, "temperature", TYPE),
    ({"temperature": 2.1}, "temperature", VALUE),
    ({"temperature": float("nan")}, "temperature", VALUE),
    ({"top_p": -0.1}, "top_p", VALUE),
    ({"top_p": True}, "top_p", TYPE),
    ({"top_k": -2}, "top_k", VALUE),
    ({"top_k": 1.5}, "top_k", TYPE),
    ({"max_tokens": 0}, "max_tokens", VALUE),
    ({"max_tokens": 1.0}, "max_tokens", TYPE),
    ({"max_tokens": "10"}, "max_tokens", TYPE),
    ({"max_tokens": True}, "max_tokens", TYPE),
    ({"max_tokens": 10**30}, "max_tokens", VALUE),
    ({"n": 0}, "n", VALUE),
    ({"n": 1000}, "n", VALUE),
    ({"n": False}, "n", TYPE),
    ({"seed": -(2**63) - 1}, "seed", VALUE),
    ({"seed": 2**63}, "seed", VALUE),
    ({"seed": "7"}, "seed", TYPE),
    ({"stop": ""}, "stop", VALUE),
    ({"stop": 1}, "stop", TYPE),
    ({"stop": ["a", ""]}, "stop[1]", VALUE),
    ({"stop": ["a", 1]}, "stop[1]", TYPE),
    ({"stop": ["a"] * 33}, "stop", VALUE),
    ({"stop": {"a": 1}}, "stop", TYPE),
    ({"stream": "true"}, "stream", TYPE),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", TYPE),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", UNKNOWN),
    ({"stream": True, "stream_options": []}, "stream_options", TYPE),
    ({"slipstream": {"tokens": True}}, "slipstream.tokens", VALUE),
    ({"slipstream": []}, "slipstream", TYPE),
    ({"slipstream": {"capture": "no"}}, "slipstream.capture", TYPE),
    ({"slipstream": {"group_id": 1}}, "slipstream.group_id", TYPE),
    ({"slipstream": {"group_id": "g" * 257}}, "slipstream.group_id", VALUE),
    ({"slipstream": {"tenant": "other"}}, "slipstream.tenant", UNKNOWN),
    # what this server cannot honour
    ({"frequency_penalty": 0.5}, "frequency_penalty", UNSUPPORTED),
    ({"frequency_penalty": False}, "frequency_penalty", UNSUPPORTED),
    ({"logit_bias": {"50": -100}}, "logit_bias", UNSUPPORTED),
    ({"logit_bias": {"50": 0, "7": False}}, "logit_bias", UNSUPPORTED),
    ({"reasoning_effort": "high"}, "reasoning_effort", UNSUPPORTED),
    ({"reasoning": {"effort": "high"}}, "reasoning", UNSUPPORTED),
    ({"best_of": 2}, "best_of", UNSUPPORTED),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", VALUE),
    ({"guided_json": {}}, "guided_json", UNSUPPORTED),
    # grammars
    ({"response_format": {"type": "regex"}}, "response_format.type", VALUE),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", MISSING),
    ({"response_format": SCHEMA | {"more": 1}}, "response_format.more", UNKNOWN),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}}},
        "response_format.json_schema.schema",
        VALUE,
    ),
    # what nobody knows
    ({"temprature": 1}, "temprature", UNKNOWN),
    ({"__class__": "x"}, "__class__", UNKNOWN),
    ({"": 1}, None, UNKNOWN),
]

ONLY_CHAT = [
    ({"messages": []}, "messages", VALUE),
    ({"messages": None}, "messages", MISSING),
    ({"messages": "hello"}, "messages", TYPE),
    ({"messages": ["hello"]}, "messages[0]", TYPE),
    ({"messages": [None] * 100_000}, "messages[0]", TYPE),
    ({"messages": [{}]}, "messages[0].role", MISSING),
    ({"messages": [{"role": "user"}]}, "messages[0].content", MISSING),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", MISSING),
    ({"messages": [{"role": None, "content": "a"}]}, "messages[0].role", MISSING),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content", TYPE),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", TYPE),
    ({"messages": [*HELLO, {"role": "robot", "content": "x"}]}, "messages[1].role", VALUE),
    ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content[0]", TYPE),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
        UNSUPPORTED,
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", TYPE),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}]},
        "messages[0].content[0].b",
        UNKNOWN,
    ),
    ({"messages": [{"role": "user", "content": "a", "mood": "bad"}]}, "messages[0].mood", UNKNOWN),
    *(
        (
            {"messages": [*HELLO, {"role": "assistant", "content": content, "tool_calls": [{}]}]},
            "messages[1].tool_calls[0].function",
            MISSING,
        )
        for content in ("a", None)
    ),
    ({"tools": [{"type": "function"}]}, "tools[0].function", MISSING),
    ({"tools": [{"type": "computer", "function": {"name": "f"}}]}, "tools[0].type", VALUE),
    ({"tools": [tool("a b")]}, "tools[0].function.name", VALUE),
    ({"tools": [tool("f"), tool("g"), tool("f")]}, "tools[2].function.name", VALUE),
    ({"tools": [tool("f"), tool("g", {"properties": {"a": {"type": "no"}}})]}, "tools[1].function.parameters", VALUE),
    ({"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", VALUE),
    ({"tools": [tool("f")], "tool_choice": "any"}, "tool_choice", VALUE),
    ({"tools": [tool("f")], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", VALUE),
    ({"tools": [tool("f")], "tool_choice": allowed("auto", "f", "g")}, "tool_choice", VALUE),
    ({"tools": [tool("f")], "tool_choice": allowed("required")}, "tool_choice", VALUE),
    ({"tools": [tool("f")], "tool_choice": allowed("none", "f")}, "tool_choice", VALUE),
    ({"tools": [tool("f")], "stream": True, "slipstream": {"tokens": True}}, "slipstream.tokens", VALUE),
    ({"tool_choice": "required"}, "tool_choice", VALUE),
    ({"messages": [{"role": "user", "content": "a", "audio": {"id": "x"}}]}, "messages[0].audio", UNSUPPORTED),
    ({"messages": [{"role": "assistant", "content": "a", "prefix": True}]}, "messages[0].prefix", UNSUPPORTED),
    ({"messages": [{"role": "assistant", "content": "a", "files": ["x"]}]}, "messages[0].files", UNSUPPORTED),
    ({"modalities": ["text", "audio"]}, "modalities", UNSUPPORTED),
    ({"max_completion_tokens": 0}, "max_completion_tokens", VALUE),
    ({"logprobs": True}, "logprobs", UNSUPPORTED),
    ({"logprobs": 0}, "logprobs", UNSUPPORTED),
    ({"prompt": "hello"}, "prompt", UNKNOWN),
    ({"suffix": "end"}, "suffix", UNKNOWN),
]

ONLY_COMPLETIONS = [
    ({"prompt": None}, "prompt", MISSING),
    ({"prompt": 1}, "prompt", TYPE),
    ({"prompt": ""}, "prompt", VALUE),
    ({"prompt": [1, "a"]}, "prompt[1]", TYPE),
    ({"prompt": [1, True]}, "prompt[1]", TYPE),
    ({"prompt": [True]}, "prompt[0]", TYPE),
    ({"prompt": ["a", 1]}, "prompt[1]", TYPE),
    ({"prompt": [1, -1]}, "prompt[1]", VALUE),
    ({"prompt": [2**31]}, "prompt[0]", VALUE),
    ({"prompt": [1.5]}, "prompt[0]", TYPE),
    ({"prompt": [[1], [2, "a"]]}, "prompt[1][1]", TYPE),
    ({"prompt": [[[1]]]}, "prompt[0][0]", TYPE),
    ({"messages": HELLO}, "messages", UNKNOWN),
    ({"suffix": "end"}, "suffix", UNSUPPORTED),
    ({"tools": [tool("f")]}, "tools", UNSUPPORTED),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs", UNSUPPORTED),
    ({"logprobs": 0}, "logprobs", UNSUPPORTED),
    ({"best_of": 3}, "best_of", UNSUPPORTED),
    ({"best_of": True}, "best_of", TYPE),
]

TABLE = [(path, *row) for row in BOTH for path in (CHAT, COMPLETIONS)]
TABLE += [(CHAT, *row) for row in ONLY_CHAT] + [(COMPLETIONS, *row) for row in ONLY_COMPLETIONS]


def valid(path: str) -> dict[str, Any]:
    return {"model": "double", **({"messages": HELLO} if path == CHAT else {"prompt": "hello"})}


ENGINE = DoubleEngine()
APP = gateway(ENGINE, strict_fields=True)
"""One app for all bodies: they must not reach what it holds."""


def send(path: str, raw: bytes) -> httpx.Response:
    ENGINE.requests.clear()
    return ask(APP, lambda client: client.post(path, content=raw, headers=JSON))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("raw", RAW, ids=lambda raw: ascii(raw[:20]))
def test_malformed(path: str, raw: bytes) -> None:
    response = send(path, raw)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["code"], error["type"]) == ("invalid_json", "invalid_request_error")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("raw", NOT_OBJECTS, ids=ascii)
def test_not_an_object(path: str, raw: bytes) -> None:
    response = send(path, raw)
    assert response.status_code == 400
    assert error_of(response)["code"] == TYPE


@pytest.mark.parametrize(("path", "change", "param", "code"), TABLE, ids=lambda value: ascii(value)[:60])
def test_bad_field(path: str, change: dict[str, Any], param: str | None, code: str) -> None:
    response = send(path, json.dumps({**valid(path), **change}).encode())
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert (error["param"], error["code"]) == (param, code)
    assert error["type"] == "invalid_request_error"
    assert len(response.content) < 1000
    assert ENGINE.requests == []


@pytest.mark.parametrize(("path", "name"), [(CHAT, "messages"), (CHAT, "model"), (COMPLETIONS, "prompt")])
def test_missing_field(path: str, name: str) -> None:
    body = {key: value for key, value in valid(path).items() if key != name}
    error = error_of(send(path, json.dumps(body).encode()))
    assert (error["param"], error["code"]) == (name, MISSING)


# -- fields that are left out ------------------------------------------------------------------------------------------

LEFT_OUT = [
    (path, change, param)
    for path, change, param, code in TABLE
    if code in (UNKNOWN, UNSUPPORTED) and (code == UNKNOWN or param in IGNORABLE | {"logit_bias"})
    # An error has no name for this field, and our own are checked by name everywhere.
    if param is not None and not param.startswith("slipstream")
]


@pytest.mark.parametrize(("path", "change", "param"), LEFT_OUT, ids=lambda value: ascii(value)[:60])
def test_what_may_be_left_out_changes_nothing_and_is_listed_once(
    path: str, change: dict[str, Any], param: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = DoubleEngine()
    app = gateway(engine)

    async def talk(client: httpx.AsyncClient) -> list[httpx.Response]:
        return [await client.post(path, json={**valid(path), **body, "max_tokens": 4}) for body in ({}, change, change)]

    plain, *others = ask(app, talk)
    assert {response.status_code for response in others} == {200}, others[0].text
    lines = [line for line in capsys.readouterr().out.splitlines() if "fields ignored" in line]
    assert len(lines) == 1
    shown = re.sub(r"\[\d\]", "[]", param)
    assert ("'?'" if "__" in shown else shown) in lines[0]
    assert plain.status_code == 200
    prompts = {request.prompt_token_ids for request in engine.requests}
    assert len(prompts) == 1 or "messages" in change


def test_a_client_cannot_fill_the_log_with_names(capsys: pytest.CaptureFixture[str]) -> None:
    app = gateway(DoubleEngine())

    async def talk(client: httpx.AsyncClient) -> None:
        for turn in range(8):
            names = {f"x{turn}_{number}": 1 for number in range(100)} | {f"{turn} {'x' * 200}": 1}
            await client.post(CHAT, json={**valid(CHAT), **names, "max_tokens": 1})

    ask(app, talk)
    logged = capsys.readouterr().out
    assert logged.count("fields ignored") == 2
    assert "xxx" not in logged


def test_the_document_says_what_is_left_out() -> None:
    def schema(**settings: Any) -> dict[str, Any]:
        document = gateway(DoubleEngine(), **settings).openapi()
        body = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert isinstance(body, dict)
        return body

    tolerant, strict = schema(), schema(strict_fields=True)
    assert tolerant["additionalProperties"] is True
    assert strict["additionalProperties"] is False
    assert tolerant["properties"]["min_p"] == {}
    assert strict["properties"]["min_p"] == {"enum": [0, None]}
    for body in (tolerant, strict):
        assert body["properties"]["slipstream"]["anyOf"][0]["additionalProperties"] is False
        assert "x-may-ignore" not in json.dumps(body)

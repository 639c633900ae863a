from __future__ import annotations

import codecs
import gzip

import httpx
import pytest

from speculator.errors import EngineBusyError, EngineDeadError, RequestError
from tests.fixtures.doubles import DoubleEngine
from tests.serving.gateway.client import CHAT, HELLO, ask, chat, complete, error_of, gateway, post


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("send", [chat, complete])
@pytest.mark.parametrize(
    ("failure", "status", "code", "kind", "retry_after"),
    [
        (EngineBusyError("secret prompt", retry_after_s=7), 429, "engine_busy", "rate_limit_error", "7"),
        (EngineDeadError("secret prompt"), 503, "engine_unavailable", "server_error", "5"),
        (RuntimeError("secret prompt"), 500, "internal_error", "server_error", None),
    ],
)
def test_engine_failures(send, failure, status, code, kind, retry_after, stream) -> None:
    response = send(DoubleEngine(failure=failure), stream=stream)
    error = error_of(response)
    assert (response.status_code, error["code"], error["type"]) == (status, code, kind)
    assert response.headers.get("retry-after") == retry_after
    assert "secret" not in response.text


def test_refusal_by_the_engine_keeps_its_param_and_code() -> None:
    response = complete(DoubleEngine(failure=RequestError("token 999 is not in it", param="prompt", code="bad_token")))
    assert response.status_code == 400
    assert error_of(response) == {
        "message": "token 999 is not in it",
        "type": "invalid_request_error",
        "param": "prompt",
        "code": "bad_token",
    }


def test_non_streamed_failure_after_some_tokens_is_still_a_status() -> None:
    response = chat(DoubleEngine(failure=EngineDeadError("gone"), fail_at=2))
    assert response.status_code == 503


def test_unknown_model() -> None:
    engine = DoubleEngine()
    response = chat(engine, model="gpt-99")
    assert response.status_code == 404
    error = error_of(response)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'double'" in error["message"]
    assert engine.requests == []


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/page/other.js", 404, "not_found"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("POST", "/v1/chat//completion", 404, "not_found"),
        ("GET", "/page/index.html", 404, "not_found"),
        ("GET", "/v1/models/org/other", 404, "model_not_found"),
        ("POST", "/update_weights_from_disk", 404, "not_found"),
        ("GET", "/docs", 404, "not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("PUT", "/health", 405, "method_not_allowed"),
    ],
)
def test_unknown_paths_and_methods_never_reach_the_engine(method: str, path: str, status: int, code: str) -> None:
    engine = DoubleEngine()
    response = ask(gateway(engine), lambda client: client.request(method, path, json={"model": "double"}))
    assert response.status_code == status
    assert error_of(response)["code"] == code
    assert ("allow" in response.headers) == (status == 405)
    assert engine.requests == []


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonp"])
def test_only_json_is_read(content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    body = b'{"model": "double", "messages": [{"role": "user", "content": "hello"}]}'
    response = ask(gateway(DoubleEngine()), lambda client: client.post(CHAT, content=body, headers=headers))
    assert response.status_code == 415
    error = error_of(response)
    assert error["code"] == "unsupported_media_type"
    assert "application/json" in error["message"]


def test_a_compressed_body_is_refused_by_its_encoding() -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    body = gzip.compress(b'{"model": "double", "messages": [{"role": "user", "content": "hello"}]}')
    response = ask(gateway(DoubleEngine()), lambda client: client.post(CHAT, content=body, headers=headers))
    assert (response.status_code, error_of(response)["code"]) == (415, "unsupported_media_type")
    assert "ompressed" in error_of(response)["message"]


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
def test_json_with_a_charset_is_read(mark: bytes) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8", "content-encoding": "Identity"}
    body = mark + b'{"model": "double", "messages": [{"role": "user", "content": "hello"}]}'
    response = ask(gateway(DoubleEngine()), lambda client: client.post(CHAT, content=body, headers=headers))
    assert response.status_code == 200


def test_body_limit_is_exact_and_holds_without_a_length() -> None:
    app = gateway(DoubleEngine(), max_body_bytes=2048)
    fits = b'{"model": "double", "messages": [{"role": "user", "content": "hello"}]}'.ljust(2048)

    num_sent = []

    async def parts(body: bytes):
        num_sent.append(0)
        for start in range(0, len(body), 500):
            num_sent[-1] += 500
            yield body[start : start + 500]

    async def talk(client: httpx.AsyncClient) -> list[httpx.Response]:
        headers = {"content-type": "application/json"}
        return [
            await client.post(CHAT, content=content, headers=headers)
            for content in (fits, fits + b" ", parts(fits), parts(fits + b" "), parts(fits * 10))
        ]

    responses = ask(app, talk)
    assert [response.status_code for response in responses] == [200, 413, 200, 413, 413]
    error = error_of(responses[1])
    assert error["code"] == "body_too_large"
    assert "2048 bytes" in error["message"]
    assert num_sent[-1] == 8500, "one without an end is not read on"


def test_unread_field_names_are_cut() -> None:
    response = post(DoubleEngine(), CHAT, {"messages": HELLO, "x" * 5000: 1}, strict_fields=True)
    assert error_of(response)["param"] == "x" * 100
    assert len(response.content) < 600


def test_braces_in_field_names_stay_braces() -> None:
    response = post(DoubleEngine(), CHAT, {"messages": HELLO, "{message}": 1}, strict_fields=True)
    assert error_of(response)["param"] == "{message}"

"""How much one request, one key and everybody together may ask for, and how long it may take."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.routing import Route

from serving.engine import Chunk, GenerateRequest
from serving.gateway.access import AccessControl, Quota
from serving.gateway.app import create_app
from serving.gateway.body import read_json
from serving.gateway.config import GatewaySettings
from serving.gateway.errors import ApiError, deadline
from serving.gateway.keys import ApiKey
from serving.gateway.metrics import GatewayMetrics
from serving.gateway.openai import stream
from serving.gateway.server import GatewayServer, raise_open_file_limit
from serving.gateway.telemetry import Exchange, Telemetry
from speculator.errors import ConfigError
from tests.fixtures.clock import Clock
from tests.fixtures.doubles import DoubleEngine
from tests.serving.gateway import passage
from tests.serving.gateway.client import (
    CHAT,
    HELLO,
    FullEngine,
    ask,
    error_of,
    events,
    openai_client,
    post,
    running,
    serve,
)
from tests.serving.gateway.keyfile import KeyFile
from tests.serving.sglang.outside.fake_sglang import CONTEXT_LENGTH, MODEL, FakeSglang

BODY: dict[str, Any] = {"model": "double", "messages": HELLO, "max_tokens": 40}


# -- a key's rate, with a clock of our own --------------------------------------------------------------------------


def key(**limits: int) -> ApiKey:
    return ApiKey(name="a", sha256="0" * 64, **limits)


def wait_of(quota: Quota, key: ApiKey) -> int:
    """Seconds to wait by the refusal; 0 where there is none and the request is over at once."""
    try:
        quota.take(key)()
    except ApiError as refused:
        return int(refused.headers["retry-after"])
    return 0


def test_a_minute_holds_so_many_requests_wherever_it_begins() -> None:
    clock = Clock()
    quota, limited = Quota(10, clock), key(requests_per_minute=3)
    assert [wait_of(quota, limited) for _ in range(4)] == [0, 0, 0, 60]
    clock.now_s += 30
    assert [wait_of(quota, limited) for _ in range(2)] == [30, 30]
    clock.now_s += 29.5
    assert wait_of(quota, limited) == 1
    clock.now_s += 0.5
    assert [wait_of(quota, limited) for _ in range(4)] == [0, 0, 0, 60]


def test_a_key_that_is_no_longer_used_is_forgotten() -> None:
    clock = Clock()
    quota = Quota(10, clock)
    for number in range(100):
        wait_of(quota, ApiKey(name="a", sha256=f"{number:064x}", requests_per_minute=1))
        clock.now_s += 6
    assert len(quota.begun_s) <= 10
    assert wait_of(quota, ApiKey(name="a", sha256=f"{99:064x}", requests_per_minute=1)) == 54


def test_a_limit_that_was_lowered_holds_at_once() -> None:
    clock = Clock()
    quota = Quota(10, clock)
    for _ in range(5):
        assert wait_of(quota, key(requests_per_minute=5)) == 0
        clock.now_s += 10
    # Begun 50, 40, 30, 20 and 10 s ago: of two in a minute there is room when the last but one is a minute old.
    assert wait_of(quota, key(requests_per_minute=2)) == 40


def test_a_key_without_a_limit_of_its_own_leaves_places_to_others() -> None:
    settings = GatewaySettings(max_in_flight=5, max_key_share=0.5)
    quota = Quota(settings.max_in_flight, max_of_key=settings.max_in_flight_of_key)
    greedy, entitled = key(), ApiKey(name="b", sha256="1" * 64, max_concurrent=4)
    held = [quota.take(greedy), quota.take(greedy)]
    with pytest.raises(ApiError, match="may have 2 requests") as refused:
        quota.take(greedy)
    assert (refused.value.status, refused.value.code) == (429, "concurrency_limit_exceeded")
    held += [quota.take(entitled) for _ in range(3)]
    with pytest.raises(ApiError, match="which is the limit"):
        quota.take(entitled)
    for release in held:
        release()
    assert GatewaySettings(max_in_flight=1).max_in_flight_of_key == 1


# -- at once --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def keyed(engine: DoubleEngine, keys: KeyFile, **settings: Any) -> AsyncIterator[GatewayServer]:
    given = GatewaySettings(keys_file=keys.path, **settings)
    async with serve(create_app(engine, settings=given, registry=CollectorRegistry()), grace_s=1) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
def test_a_key_has_so_many_requests_under_way(tmp_path: Path, stream: bool) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    two, other = keys.add("two", max_concurrent=2), keys.add("other")

    async def run() -> None:
        engine = DoubleEngine(hold_at=1)
        async with keyed(engine, keys) as server, httpx.AsyncClient(base_url=server.url, timeout=20) as client:

            async def ask(headers: dict[str, str]) -> httpx.Response:
                return await client.post(CHAT, json={**BODY, "stream": stream}, headers=headers)

            async def asked(headers: dict[str, str]) -> asyncio.Task[httpx.Response]:
                engine.holding.clear()
                task = asyncio.create_task(ask(headers))
                async with asyncio.timeout(10):
                    await engine.holding.wait()
                return task

            first = [await asked(two), await asked(two)]
            refused = await ask(two)
            assert (refused.status_code, error_of(refused)["code"]) == (429, "concurrency_limit_exceeded")
            assert refused.headers["retry-after"] == "1"
            first.append(await asked(other))
            engine.release.set()
            assert [(await task).status_code for task in first] == [200, 200, 200]
            assert (await ask(two)).status_code == 200

    asyncio.run(run())


@pytest.mark.parametrize("how", ["left", "failed"])
def test_a_place_is_free_again_however_the_request_ended(tmp_path: Path, how: str) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    headers = keys.add("one", max_concurrent=1)

    async def run() -> None:
        failure = RuntimeError("broken") if how == "failed" else None
        engine = DoubleEngine(hold_at=1 if how == "left" else None, failure=failure)
        async with keyed(engine, keys) as server, httpx.AsyncClient(base_url=server.url) as client:
            for _ in range(3):
                if how == "failed":
                    assert (await client.post(CHAT, json=BODY, headers=headers)).status_code == 500
                    continue
                engine.abort_seen.clear()
                async with client.stream("POST", CHAT, json={**BODY, "stream": True}, headers=headers) as response:
                    assert response.status_code == 200, await response.aread()
                async with asyncio.timeout(10):
                    await engine.abort_seen.wait()
                    while (await client.get("/slipstream/live", headers=headers)).json()["health"]["running"]:
                        pass

    asyncio.run(run())


def test_all_together_have_so_many_under_way() -> None:
    async def run() -> None:
        engine = DoubleEngine(hold_at=1)
        async with running(engine, max_in_flight=1) as server, openai_client(server) as client:
            first = asyncio.create_task(client.chat.completions.create(**BODY))
            await engine.holding.wait()
            with pytest.raises(openai.RateLimitError) as refused:
                await client.chat.completions.create(**BODY)
            assert refused.value.code == "gateway_busy"
            assert refused.value.response.headers["retry-after"] == "1"
            assert [model.id async for model in client.models.list()] == ["double"]
            engine.release.set()
            assert (await first).choices[0].finish_reason

    asyncio.run(run())


# -- in one request -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_tokens_of_prompt_and_answer_are_bounded(path: str) -> None:
    prompt = {"messages": [{"role": "user", "content": "x" * 100}]} if path == CHAT else {"prompt": "x" * 100}

    def code(settings: dict[str, int], **fields: Any) -> str | None:
        response = post(DoubleEngine(), path, {**prompt, **fields}, **settings)
        return None if response.status_code == 200 else str(error_of(response)["code"])

    assert code({"max_prompt_tokens": 50}) == "prompt_too_long"
    assert "prompt is too long" in post(DoubleEngine(), path, prompt, max_prompt_tokens=50).text
    assert code({"max_prompt_tokens": 200}) is None
    assert code({"max_completion_tokens": 10}, max_tokens=11) == "too_many_tokens"
    assert code({"max_completion_tokens": 10}, max_tokens=10) is None
    answer = post(DoubleEngine(), path, prompt, max_completion_tokens=10).json()
    assert answer["usage"]["completion_tokens"] == 10


def test_tokens_of_an_answer_are_bounded_in_front_of_sglang() -> None:
    fake = FakeSglang()

    async def talk(client: httpx.AsyncClient) -> None:
        body = {"model": MODEL, "messages": HELLO}
        for fields in (
            {"max_tokens": 11},
            {"max_completion_tokens": 11},
            {"max_tokens": 5, "max_completion_tokens": 11},
        ):
            assert error_of(await client.post(CHAT, json={**body, **fields}))["code"] == "too_many_tokens"
        assert fake.bodies == []
        for fields in ({}, {"max_tokens": 7}, {"max_completion_tokens": 8}):
            assert (await client.post(CHAT, json={**body, **fields})).status_code == 200

    passage.talk(fake, talk, max_completion_tokens=10)
    asked = [(body.get("max_tokens"), body.get("max_completion_tokens")) for body in fake.bodies]
    assert asked == [(10, None), (7, None), (None, 8)]


@pytest.mark.parametrize("stream", [False, True])
def test_the_limit_on_a_chat_in_front_of_sglang_refuses_no_prompt_that_fits(stream: bool) -> None:
    fake = FakeSglang(num_prompt_tokens=CONTEXT_LENGTH - 300)

    def chat(limit: int, **fields: Any) -> httpx.Response:
        return passage.post(fake, CHAT, {"messages": HELLO, "stream": stream, **fields}, max_completion_tokens=limit)

    assert chat(1000).status_code == 200
    assert [body.pop("max_tokens") for body in fake.bodies] == [1000, 300]
    first, second = fake.bodies
    assert {**first, "max_tokens": 300} == second, "nothing else has changed"
    fake.raw.clear()
    assert chat(200).status_code == 200
    assert chat(CONTEXT_LENGTH).status_code == 200, "SGLang's own limit is the same"
    assert [body.get("max_tokens") for body in fake.bodies] == [200, None]
    fake.raw.clear()
    refused = chat(1000, max_tokens=900)
    assert (refused.status_code, error_of(refused)["code"]) == (400, "context_length_exceeded")
    assert len(fake.bodies) == 1, "what a client asks for itself is its own to mend"
    fake.raw.clear()
    fake.num_prompt_tokens = CONTEXT_LENGTH
    assert chat(1000).status_code == 400
    assert len(fake.bodies) == 1


def test_a_completion_in_front_of_sglang_keeps_sglangs_default() -> None:
    def sent(limit: int, **fields: Any) -> int | None:
        fake = FakeSglang()
        body = {"prompt": "hello", **fields}
        response = passage.post(fake, "/v1/completions", body, max_completion_tokens=limit)
        assert response.status_code == (200 if fake.bodies else 400)
        return fake.bodies[0].get("max_tokens") if fake.bodies else -1

    assert sent(1000) is None
    assert sent(1000, max_tokens=900) == 900
    assert sent(1000, max_tokens=1001) == -1
    assert sent(10) == 10, "less than the 16 tokens that SGLang would make"
    assert sent(10, max_completion_tokens=9) == 10, "SGLang does not know that name here"
    assert sent(10, max_tokens=7) == 7


def test_sglangs_own_levers_are_not_for_clients() -> None:
    fake = FakeSglang()

    async def talk(client: httpx.AsyncClient) -> None:
        levers = ("custom_logit_processor", "stop_regex", "bootstrap_host", "bootstrap_port", "bootstrap_room")
        for name in (*levers, "ebnf", "extra_key"):
            body = {"model": MODEL, "messages": HELLO, name: "(a+)+$"}
            refused = error_of(await client.post(CHAT, json=body))
            assert (refused["code"], refused["param"]) == ("unsupported_parameter", name)
            assert fake.bodies == []
            assert (await client.post(CHAT, json={**body, name: None})).status_code == 200
            assert name not in json.loads(fake.raw.pop())

    passage.talk(fake, talk)


def test_no_client_hides_a_grammar_in_a_structural_tag() -> None:
    fake, grammar = FakeSglang(), {"type": "grammar", "grammar": "root ::= root"}
    tag = {"type": "tag", "begin": "<a>", "content": grammar, "end": "</a>"}
    for within in (grammar, tag, {"type": "triggered_tags", "triggers": ["<a>"], "tags": [tag]}):
        asked = {"response_format": {"type": "structural_tag", "format": within}}
        for response in (passage.chat(fake, **asked), passage.complete(fake, **asked)):
            refused = error_of(response)
            assert (response.status_code, refused["code"]) == (400, "unsupported_parameter")
            assert refused["param"] == "response_format"
    assert fake.bodies == []
    regex = {"type": "structural_tag", "format": {**tag, "content": {"type": "regex", "pattern": "a+"}}}
    named = {"type": "object", "properties": {"type": {"const": "grammar"}}, "example": {"type": "grammar"}}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": named}}
    for taken in (regex, schema, None):
        assert passage.chat(fake, response_format=taken).status_code == 200
        assert fake.bodies[-1].get("response_format") == taken


@pytest.mark.parametrize("stop", ["x" * 1000, ["a", "x" * 999], [chr(at) for at in range(65, 97)]])
def test_stop_strings_may_be_many(stop: Any) -> None:
    """Continue sends 14 for each completion in an editor."""
    engine = DoubleEngine()
    assert post(engine, CHAT, {"messages": HELLO, "stop": stop}).status_code == 200
    assert engine.requests[0].stop == ((stop,) if isinstance(stop, str) else tuple(stop))
    assert passage.chat(FakeSglang(), stop=stop).status_code == 200


@pytest.mark.parametrize("stop", ["x" * 1001, ["a", "x" * 1000], ["a"] * 33])
def test_stop_strings_are_bounded(stop: Any) -> None:
    ours = post(DoubleEngine(), CHAT, {"messages": HELLO, "stop": stop})
    sglangs = passage.chat(FakeSglang(), stop=stop)
    for refused in (ours, sglangs):
        assert refused.status_code == 400
        assert str(error_of(refused)["param"]).startswith("stop")


# -- in time --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hold_at", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long_ends_with_an_error(stream: bool, hold_at: int) -> None:
    async def run() -> None:
        engine = DoubleEngine(hold_at=hold_at)
        async with running(engine, max_request_s=0.2) as server, openai_client(server) as client:  # type: ignore[arg-type]

            async def talk() -> None:
                answer = await client.chat.completions.create(**BODY, stream=stream)
                assert stream, "a whole answer came"
                async for _ in answer:
                    pass

            with pytest.raises(openai.APIError) as late:
                await talk()
            assert late.value.code == "deadline_exceeded"
            if isinstance(late.value, openai.APIStatusError):
                assert late.value.status_code == 504
                assert late.value.response.headers["x-should-retry"] == "false"
            assert len(engine.aborted) == 1

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_of_sglang_that_takes_too_long_ends_with_an_error(stream: bool) -> None:
    body = {"model": MODEL, "messages": HELLO, "stream": stream}
    late = passage.talk(FakeSglang(hold=True), lambda client: client.post(CHAT, json=body), max_request_s=1.0)
    if stream:
        assert events(late)[-1]["error"]["code"] == "deadline_exceeded"
    else:
        assert (late.status_code, error_of(late)["code"]) == (504, "deadline_exceeded")


def test_a_body_that_does_not_arrive_is_not_waited_for() -> None:
    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", b"application/json")]}

    async def never() -> Any:
        await asyncio.Event().wait()

    with pytest.raises(ApiError) as slow:
        asyncio.run(read_json(Request(scope, never), max_bytes=100, limit_s=0.05))
    assert (slow.value.status, slow.value.code) == (408, "body_too_slow")


class Flood(DoubleEngine):
    """More than the buffers of a connection hold."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        for _ in range(200):
            yield Chunk(text="x" * 100_000, token_ids=(1,))
        yield Chunk(text="", token_ids=(), finish_reason="stop")


def test_a_client_that_does_not_read_holds_no_place_for_ever() -> None:
    content, empty = json.dumps({**BODY, "stream": True}).encode(), {"model": "double", "prompt": ""}
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"

    async def run() -> None:
        async with running(Flood(), max_request_s=0.5, max_in_flight=1, grace_s=0) as server:  # type: ignore[arg-type]
            host, port = server.url.removeprefix("http://").split(":")
            # Reads 64 KiB ahead and then no more.
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
            async with httpx.AsyncClient(base_url=server.url) as client, asyncio.timeout(20):
                # An empty prompt is refused with 400 where there is a place for it.
                for status in (429, 400):
                    while (await client.post("/v1/completions", json=empty)).status_code != status:
                        pass
            writer.close()

    asyncio.run(run())


def test_no_route_holds_a_place_for_ever() -> None:
    async def hang(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    settings = GatewaySettings(max_request_s=0.05, max_in_flight=1)
    route = Route("/v1/completions", hang, methods=["POST"])
    metrics = GatewayMetrics(CollectorRegistry(), "double")
    access = AccessControl(hang, routes=[route], keyring=None, settings=settings, metrics=metrics, transfer_s=0.05)

    async def run() -> None:
        transport = httpx.ASGITransport(Telemetry(access, metrics=metrics))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            for _ in range(2):
                late = await client.post("/v1/completions")
                assert (late.status_code, error_of(late)["code"]) == (504, "deadline_exceeded")

    asyncio.run(run())


def test_a_stream_that_takes_too_long_to_leave_says_so() -> None:
    """The gate's limit ends it, as a shutdown would."""
    events_sent: list[bytes] = []

    async def produce(emit: stream.Emit) -> bytes:
        await emit(b"data: {}\n\n")
        await asyncio.Event().wait()
        return b""

    async def send(message: Any) -> None:
        events_sent.append(message.get("body", b""))

    async def run(exchange: Exchange) -> None:
        async with deadline(0.01) as exchange.limit:
            await stream.EventStream(exchange, produce)({"method": "POST"}, asyncio.Event().wait, send)  # type: ignore[arg-type]

    with pytest.raises(ApiError):
        asyncio.run(run(Exchange()))
    assert b"deadline_exceeded" in events_sent[-1]
    assert b"shutting_down" not in events_sent[-1]


def test_while_the_engine_is_full_no_body_is_read() -> None:
    engine, registry = FullEngine(), CollectorRegistry()
    app = create_app(engine, settings=GatewaySettings(), registry=registry)
    headers = {"content-type": "application/json"}
    refused = ask(app, lambda client: client.post(CHAT, content=b"no JSON", headers=headers))
    assert (refused.status_code, error_of(refused)["code"]) == (429, "engine_busy")
    assert refused.headers["retry-after"] == "1"
    assert registry.get_sample_value("slipstream_gateway_refusals_total", {"code": "engine_busy"}) == 1
    assert ask(app, lambda client: client.get("/v1/models")).status_code == 200
    assert engine.requests == []


def test_the_process_may_open_what_the_limits_let_in() -> None:
    settings = GatewaySettings(max_in_flight=1000, rollout_max_samples=500)
    assert settings.max_connections == 1200
    before = _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if not 2800 < hard < 10**9:
        pytest.skip("needs a limit of files")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        raise_open_file_limit(settings, each=1)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1300, hard)
        raise_open_file_limit(settings, each=2)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (2800, hard), "one more for each sample of a rollout"
        raise_open_file_limit(settings, each=1)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (2800, hard), "what is enough stays"
        with pytest.raises(ConfigError, match=f"MAX_IN_FLIGHT={hard} takes {2 * hard + 100} file descriptors"):
            raise_open_file_limit(GatewaySettings(max_in_flight=hard), each=2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_headers_that_do_not_end_are_refused() -> None:
    async def run() -> bytes:
        async with running(DoubleEngine()) as server, asyncio.timeout(20):
            host, port = server.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /health HTTP/1.1\r\nx-long: " + b"x" * 20_000)
            refused = await reader.readline()
            writer.close()
            return refused

    assert asyncio.run(run()).startswith(b"HTTP/1.1 400 ")

"""Streams: order of events, usage, failures, whose tokens they show, and a client that leaves or does not read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from serving.gateway.openai.stream import Emit, EventStream
from serving.gateway.server import GatewayServer
from serving.gateway.telemetry import Exchange
from speculator.errors import EngineDeadError
from tests.fixtures.doubles import DoubleEngine, says, words_for
from tests.serving.gateway import passage
from tests.serving.gateway.client import (
    CHAT,
    HELLO,
    chat,
    complete,
    error_of,
    events,
    gateway,
    openai_client,
    running,
)
from tests.serving.sglang.outside.fake_sglang import MODEL, FakeSglang


def deltas(chunks: list[Any], index: int = 0) -> list[Any]:
    return [choice["delta"] for chunk in chunks for choice in chunk.get("choices", ()) if choice["index"] == index]


def test_order_of_events() -> None:
    response = chat(DoubleEngine(answer=says("Hi there")), stream=True)
    assert response.status_code == 200
    assert response.headers["cache-control"] == "no-store"
    assert "content-length" not in response.headers
    *chunks, done = events(response)
    assert done == "[DONE]"
    assert deltas(chunks) == [{"role": "assistant", "content": ""}, {"content": "Hi t"}, {"content": "here"}, {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert {chunk["id"] for chunk in chunks} == {f"chatcmpl-{response.headers['x-request-id']}"}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all("usage" not in chunk for chunk in chunks)


def test_usage_is_the_last_event_when_asked_for() -> None:
    response = chat(DoubleEngine(answer=says("Hi there")), stream=True, stream_options={"include_usage": True})
    *chunks, usage, done = events(response)
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 23,
        "completion_tokens": 8,
        "total_tokens": 31,
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 6,
            "rejected_prediction_tokens": 2,
        },
    }
    assert usage["metrics"]["speculative_decoding"]["acceptance_histogram"] == [0, 0, 0, 2]
    assert not any("metrics" in chunk for chunk in chunks)


def test_each_event_has_the_usage_so_far_when_asked_for() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, _ = events(chat(DoubleEngine(answer=says("Hi there")), stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 8
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {23}
    options = {"continuous_usage_stats": True}
    *chunks, _ = events(chat(DoubleEngine(answer=says("Hi there")), stream=True, stream_options=options))
    assert all("usage" not in chunk for chunk in chunks)


def test_chunks_without_text_are_skipped() -> None:
    # Three-byte characters, one token a chunk: two of three chunks have nothing to show yet.
    *chunks, _ = events(chat(DoubleEngine(answer=says("日本"), tokens_per_chunk=1), stream=True))
    assert deltas(chunks) == [{"role": "assistant", "content": ""}, {"content": "日"}, {"content": "本"}, {}]


def test_stream_says_what_the_whole_answer_says() -> None:
    body = {"seed": 11, "max_tokens": 40, "n": 3}
    whole = [choice["message"]["content"] for choice in chat(DoubleEngine(), **body).json()["choices"]]
    engine = DoubleEngine()
    *chunks, _ = events(chat(engine, stream=True, **body))
    streamed = ["".join(delta.get("content", "") for delta in deltas(chunks, index)) for index in range(3)]
    assert streamed == whole
    assert whole[0] == words_for(engine.requests[0]).encode()[:40].decode(errors="ignore")
    for index in range(3):
        assert deltas(chunks, index)[0] == {"role": "assistant", "content": ""}
        assert deltas(chunks, index)[-1] == {}


def test_failure_mid_stream_ends_with_an_error_event() -> None:
    for ask in (chat, complete):
        engine = DoubleEngine(failure=RuntimeError("boom"), fail_at=2)
        response = ask(engine, stream=True)
        assert response.status_code == 200
        *chunks, last = events(response)
        assert len(chunks) >= 2
        assert set(last) == {"error"}
        assert last["error"]["code"] == "internal_error"
        assert "boom" not in response.text
        assert "[DONE]" not in response.text


def test_one_failing_sample_aborts_the_others() -> None:
    class OneFails(DoubleEngine):
        async def misbehave(self, index: int) -> None:
            await super().misbehave(index)
            if index == 3 and self.failure is None:
                self.failure, self.fail_at = RuntimeError("boom"), 3
                raise self.failure

    engine = OneFails()
    *_, last = events(chat(engine, n=3, stream=True, max_tokens=200))
    assert last["error"]["code"] == "internal_error"
    assert engine.finished == []
    assert len(engine.aborted) == 3


def test_engine_that_aborts_or_just_stops_is_an_error() -> None:
    for engine in (DoubleEngine(ends_with="abort"), DoubleEngine(is_cut=True)):
        *_, last = events(chat(engine, stream=True, max_tokens=40))
        assert last["error"]["code"] == "engine_unavailable"
        response = chat(engine, max_tokens=40)
        assert response.status_code == 503
        assert error_of(response)["code"] == "engine_unavailable"


TEXT = "über 日本 river stone"


def with_pieces() -> DoubleEngine:
    return DoubleEngine(answer=says(TEXT))


def without_pieces(data: Any) -> Any:
    """An event as a client that did not ask sees it; its id and time are its own."""
    if data == "[DONE]":
        return data
    choices = [{key: value for key, value in choice.items() if key != "slipstream"} for choice in data["choices"]]
    return {**data, "id": "", "created": 0, "choices": choices}


@pytest.mark.parametrize("ask", [chat, complete])
def test_pieces_are_the_text_of_their_event(ask: Any) -> None:
    plain = events(ask(with_pieces(), stream=True, stream_options={"include_usage": True}))
    asked = events(ask(with_pieces(), stream=True, stream_options={"include_usage": True}, slipstream={"tokens": True}))
    assert "slipstream" not in str(plain)
    assert [without_pieces(each) for each in plain] == [without_pieces(each) for each in asked]
    shown, sources = "", []
    for data in asked[:-2]:
        [choice] = data["choices"]
        text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        pieces = choice["slipstream"]["pieces"] if text else []
        assert ("slipstream" in choice) == bool(text)
        assert "".join(piece["text"] for piece in pieces) == text
        shown += text
        sources += [piece["source"] for piece in pieces]
    assert shown == TEXT
    # Four tokens a chunk, the last of them the target's: "ü" ends with the second, "本" with the twelfth.
    assert "".join(source[0] for source in sources[:7]) == "hhthhht"


@pytest.mark.parametrize("ask", [chat, complete])
def test_only_a_stream_has_them(ask: Any) -> None:
    refused = error_of(ask(with_pieces(), slipstream={"tokens": True}))
    assert refused["param"] == "slipstream.tokens"
    assert "stream" in refused["message"]


def test_sglang_cannot_say_and_nobody_pretends() -> None:
    response = passage.chat(FakeSglang(), stream=True, slipstream={"tokens": True})
    assert response.status_code == 400
    assert error_of(response)["param"] == "slipstream.tokens"


LONG = {"model": "double", "messages": HELLO, "max_tokens": 400}


async def request_over(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    raw = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: [::]\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)
    await writer.drain()


@pytest.mark.parametrize(
    ("hold_at", "stream", "n"), [(0, False, 1), (3, False, 1), (0, True, 1), (3, True, 1), (3, True, 3), (3, False, 3)]
)
def test_closed_socket_aborts_the_generation(hold_at: int, stream: bool, n: int) -> None:
    async def run() -> None:
        engine = DoubleEngine(hold_at=hold_at)
        async with running(engine) as server:
            host, port = server.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            await request_over(writer, {**LONG, "stream": stream, "n": n})
            await engine.holding.wait()
            if stream and hold_at:
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            assert engine.aborted == []
            writer.close()
            async with asyncio.timeout(5):
                await engine.abort_seen.wait()
        assert sorted(engine.aborted) == sorted(request.request_id for request in engine.requests)
        assert len(engine.aborted) == n
        assert engine.finished == []

    asyncio.run(run())


class BareClient:
    """One request spoken in ASGI itself, to leave or to stop reading at an exact point."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.leave = asyncio.Event()
        self.read = asyncio.Event()
        """Set: takes what the gateway sends. Cleared: makes it wait, as a full socket does."""
        self.read.set()
        self.sent: list[str] = []
        self._messages: list[dict[str, Any]] = [
            {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        ]

    async def receive(self) -> dict[str, Any]:
        if self._messages:
            return self._messages.pop()
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message["type"])
        await self.read.wait()

    async def ask(self, app: FastAPI) -> None:
        scope = {
            "type": "http",
            "method": "POST",
            "path": CHAT,
            "raw_path": CHAT.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [
                (b"host", b"localhost"),
                (b"content-type", b"application/json"),
                (b"content-length", str(len(self._messages[0]["body"])).encode()),
            ],
        }
        async with asyncio.timeout(5):
            await app(scope, self.receive, self.send)


def test_leaving_is_counted_and_leaves_nothing_in_flight() -> None:
    registry = CollectorRegistry()
    engine = DoubleEngine(hold_at=2)
    app = gateway(engine, registry)

    async def run() -> None:
        client = BareClient(LONG)
        asking = asyncio.create_task(client.ask(app))
        await engine.holding.wait()
        assert registry.get_sample_value("slipstream_gateway_generations_in_flight", {"model_name": "double"}) == 1
        client.leave.set()
        await asking
        assert client.sent == []

    asyncio.run(run())
    assert len(engine.aborted) == 1
    assert registry.get_sample_value("slipstream_gateway_generations_in_flight", {"model_name": "double"}) == 0
    labels = {"model_name": "double", "route": CHAT, "status": "499"}
    assert registry.get_sample_value("slipstream_gateway_requests_total", labels) == 1


def test_client_that_does_not_read_holds_back_its_own_engine_stream() -> None:
    async def run() -> None:
        num_chunks = 0

        class Counting(DoubleEngine):
            async def misbehave(self, index: int) -> None:
                nonlocal num_chunks
                num_chunks += 1

        engine = Counting()
        app = gateway(engine)
        client = BareClient({**LONG, "stream": True, "n": 2})
        client.read.clear()
        asking = asyncio.create_task(client.ask(app))
        other = BareClient({**LONG, "stream": True, "max_tokens": 4})
        await other.ask(app)
        assert len(engine.finished) == 1
        # One chunk of each sample of the slow client's, which wait for its socket, and one of the other's.
        assert num_chunks == 3
        client.leave.set()
        await asking
        assert client.sent == ["http.response.start"]
        assert len(engine.aborted) == 2

    asyncio.run(run())


def test_leaving_while_the_body_arrives() -> None:
    async def run() -> None:
        engine = DoubleEngine()
        async with running(engine) as server:
            host, port = server.url.removeprefix("http://").split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: [::]\r\ncontent-type: application/json\r\n".encode())
            writer.write(b'content-length: 100\r\n\r\n{"model"')
            await writer.drain()
            writer.close()
            async with httpx.AsyncClient() as client:
                assert (await client.post(server.url + CHAT, json={**LONG, "max_tokens": 4})).status_code == 200
        assert len(engine.requests) == 1

    asyncio.run(run())


# -- streams that wait -------------------------------------------------------------------------------------------------

COMMENT = ": keep-alive"


def test_a_silent_stream_says_that_it_lives_and_clients_skip_it() -> None:
    """Before the first token and between two, in front of either engine."""

    async def comments(url: str, model: str, release: Callable[[], None]) -> list[str]:
        body = {"model": model, "messages": HELLO, "stream": True, "max_tokens": 40}
        lines: list[str] = []
        async with httpx.AsyncClient() as client, client.stream("POST", f"{url}{CHAT}", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                lines.append(line)
                if lines.count(COMMENT) == 2:
                    release()
        return lines

    def events(lines: list[str]) -> list[str]:
        # On a busy machine one more comment may come behind the last event.
        return [line for line in lines if line not in ("", COMMENT)]

    async def read(server: GatewayServer, model: str, release: Callable[[], None]) -> int:
        async with openai_client(server) as client:
            asyncio.get_running_loop().call_later(0.2, release)
            stream = await client.chat.completions.create(model=model, messages=HELLO, stream=True, max_tokens=40)  # type: ignore[arg-type]
            return len([chunk async for chunk in stream])

    async def run() -> None:
        for held_at in (0, 2):
            engine = DoubleEngine(hold_at=held_at)
            async with running(engine, stream_comment_s=0.05) as server:
                lines = await comments(server.url, "double", engine.release.set)
                assert events(lines)[-1] == "data: [DONE]"
                assert (lines[0] == COMMENT) == (held_at == 0)
                engine.release.clear()
                assert await read(server, "double", engine.release.set) > 3
        begins = asyncio.Event()
        async with passage.passing(FakeSglang(begins=begins), stream_comment_s=0.05) as server:
            lines = await comments(server.url, MODEL, begins.set)
            assert lines[0] == COMMENT
            assert events(lines)[-1] == "data: [DONE]"

    asyncio.run(run())


def test_what_fails_after_a_comment_is_an_event() -> None:
    async def run() -> None:
        engine = DoubleEngine(hold_at=0, failure=EngineDeadError("gone"), fail_at=0)
        async with running(engine, stream_comment_s=0.05) as server, openai_client(server) as client:
            stream = await client.chat.completions.create(model="double", messages=HELLO, stream=True)  # type: ignore[arg-type]
            engine.release.set()
            with pytest.raises(openai.APIError) as broken:
                await anext(stream)
            assert broken.value.code == "engine_unavailable"

    asyncio.run(run())


def test_a_stream_that_is_stopped_while_its_end_is_sent_ends_once() -> None:
    class Stuck(BareClient):
        """Does not take the last message."""

        def __init__(self) -> None:
            super().__init__({**LONG, "stream": True, "max_tokens": 4})
            self.ends: list[bytes] = []
            self.is_stuck = asyncio.Event()

        async def send(self, message: Any) -> None:
            if not message.get("more_body", True):
                self.ends.append(message["body"])
                self.is_stuck.set()
                await asyncio.Event().wait()

    async def run() -> None:
        client = Stuck()
        asking = asyncio.create_task(client.ask(gateway(DoubleEngine())))
        await client.is_stuck.wait()
        asking.cancel()
        await asyncio.wait((asking,))
        assert client.ends == [b"data: [DONE]\n\n"]

    asyncio.run(run())


def test_nothing_to_show_yet_is_not_the_beginning_of_a_stream() -> None:
    """So what fails after it is still an error response."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def produce(emit: Emit) -> bytes:
        await emit(b"")
        raise EngineDeadError("gone")

    async def run() -> None:
        with pytest.raises(EngineDeadError):
            await EventStream(Exchange(), produce)({"type": "http", "method": "POST"}, receive, send)

    asyncio.run(run())
    assert sent == []

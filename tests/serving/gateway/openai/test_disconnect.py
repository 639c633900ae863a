"""A client that leaves frees what its request held."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from tests.fixtures.doubles import DoubleEngine
from tests.serving.gateway.client import CHAT, HELLO, gateway, running

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
        self._messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

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
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
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
        assert registry.get_sample_value("slipstream_gateway_generations_in_flight") == 1
        client.leave.set()
        await asking
        assert client.sent == []

    asyncio.run(run())
    assert len(engine.aborted) == 1
    assert registry.get_sample_value("slipstream_gateway_generations_in_flight") == 0
    labels = {"route": CHAT, "status": "499"}
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

"""How these tests reach a gateway: in process for answers, over a real socket for what only a socket can show."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import httpx
from fastapi import FastAPI
from openai import AsyncOpenAI
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from serving.engine import EngineHealth
from serving.gateway.app import create_app
from serving.gateway.config import GatewaySettings
from serving.gateway.server import GatewayServer, bind
from tests.fixtures.doubles import DoubleEngine

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]

T = TypeVar("T")


@asynccontextmanager
async def serve(
    app: ASGIApp, host: str = "127.0.0.1", port: int = 0, *, grace_s: int = 10, **limits: Any
) -> AsyncIterator[GatewayServer]:
    """`async with serve(app) as server:` accepts requests inside the block; raises ConfigError for a busy port."""
    server = GatewayServer(app, bind(host, port), grace_s=grace_s, **limits)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


class FullEngine(DoubleEngine):
    """Its queue has no room."""

    def health(self) -> EngineHealth:
        return replace(super().health(), is_full=True)


def gateway(engine: DoubleEngine, registry: CollectorRegistry | None = None, **settings: Any) -> FastAPI:
    return create_app(engine, settings=GatewaySettings(**settings), registry=registry or CollectorRegistry())


def ask(app: FastAPI, talk: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
    """Run `talk` with an in-process client; a streamed answer arrives as one body."""

    async def run() -> T:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            return await talk(client)

    return asyncio.run(run())


def post(engine: DoubleEngine, path: str, body: dict[str, Any], **settings: Any) -> httpx.Response:
    return ask(gateway(engine, **settings), lambda client: client.post(path, json={"model": "double", **body}))


def chat(engine: DoubleEngine, **body: Any) -> httpx.Response:
    return post(engine, CHAT, {"messages": HELLO, **body})


def complete(engine: DoubleEngine, **body: Any) -> httpx.Response:
    return post(engine, COMPLETIONS, {"prompt": "hello", **body})


def events(response: httpx.Response) -> list[Any]:
    """The data of each event; `[DONE]` stays a string."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    data = [block.removeprefix("data: ") for block in blocks]
    return [each if each == "[DONE]" else json.loads(each) for each in data]


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of a response, after checking that it has the whole envelope."""
    body = response.json()
    assert set(body) == {"error"}, body
    assert set(body["error"]) == {"message", "type", "param", "code"}, body
    assert body["error"]["message"]
    assert len(response.headers["x-request-id"]) == 32
    error: dict[str, Any] = body["error"]
    return error


@asynccontextmanager
async def running(engine: DoubleEngine, *, grace_s: int = 5, **settings: Any) -> AsyncIterator[GatewayServer]:
    """A gateway on a loopback port that the system chose."""
    async with serve(gateway(engine, **settings), port=0, grace_s=grace_s) as server:
        yield server


def openai_client(server: GatewayServer) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)

"""A pass-through gateway in front of a stand-in for SGLang, each on a port, and a host that answers for the draft."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx
from prometheus_client import CollectorRegistry

from serving.gateway.app import create_passthrough_app
from serving.gateway.config import GatewaySettings
from serving.gateway.live.live import ReadTrainerStatus
from serving.gateway.server import GatewayServer
from serving.gateway.upstream import Upstream
from tests.fixtures.doubles import DoubleEngine
from tests.serving.gateway.client import serve
from tests.serving.sglang.outside.fake_sglang import CONTEXT_LENGTH, MODEL, FakeSglang

T = TypeVar("T")

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


def host() -> DoubleEngine:
    return DoubleEngine(model=MODEL, context_length=CONTEXT_LENGTH)


@asynccontextmanager
async def passing(
    fake: FakeSglang,
    *,
    draft: DoubleEngine | None = None,
    registry: CollectorRegistry | None = None,
    urls: tuple[str, ...] = (),
    target: str = "",
    grace_s: int = 5,
    trainer_status: ReadTrainerStatus | None = None,
    **settings: Any,
) -> AsyncIterator[GatewayServer]:
    """The gateway in front of `fake`, or of whatever is at `urls`."""
    async with serve(fake.app(), grace_s=0) as behind:
        upstream = Upstream(*(urls or (behind.url,)))
        app = create_passthrough_app(
            draft or host(),
            upstream,
            settings=GatewaySettings(**settings),
            registry=registry or CollectorRegistry(),
            target=target,
            trainer_status=trainer_status,
        )
        async with serve(app, grace_s=grace_s) as server:
            yield server
        await upstream.close()


def talk(fake: FakeSglang, say: Callable[[httpx.AsyncClient], Awaitable[T]], **how: Any) -> T:
    """Run `say` with a client of a gateway in front of `fake`."""

    async def run() -> T:
        async with passing(fake, **how) as server, httpx.AsyncClient(base_url=server.url) as client:
            return await say(client)

    return asyncio.run(run())


def post(fake: FakeSglang, path: str, body: dict[str, Any], **how: Any) -> httpx.Response:
    return talk(fake, lambda client: client.post(path, json={"model": MODEL, **body}), **how)


def chat(fake: FakeSglang, **body: Any) -> httpx.Response:
    return post(fake, "/v1/chat/completions", {"messages": HELLO, **body})


def complete(fake: FakeSglang, **body: Any) -> httpx.Response:
    return post(fake, "/v1/completions", {"prompt": "hello", **body})

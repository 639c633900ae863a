"""Several addresses in front of the same engines: which one is asked, and that nothing is sent twice."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from serving.gateway.upstream import Upstream, completion_room, refusal
from speculator.errors import EngineBusyError, EngineDeadError
from speculator.host import free_port
from tests.fixtures.connections import answering, leave_at_any_moment, until_closed
from tests.serving.gateway.client import serve
from tests.serving.sglang.outside.fake_sglang import MODEL, WHOLE, FakeSglang

BODY = json.dumps({"model": MODEL, "prompt": "x"}).encode()


async def ask(upstream: Upstream) -> bytes:
    async with upstream.answer("/v1/completions", BODY, {}) as response:
        return await response.aread()


@asynccontextmanager
async def reaching(*urls: str, **limits: int) -> AsyncIterator[Upstream]:
    upstream = Upstream(*urls, **limits)
    yield upstream
    await upstream.close()


def test_an_address_that_cannot_be_reached_goes_behind_the_others() -> None:
    async def run() -> None:
        first, second, port = FakeSglang(), FakeSglang(), free_port()
        async with serve(second.app(), grace_s=0) as other:
            upstream = Upstream(f"http://127.0.0.1:{port}", other.url)
            assert await ask(upstream) == WHOLE
            async with serve(first.app(), port=port, grace_s=0):
                assert await ask(upstream) == WHOLE
                assert (len(first.raw), len(second.raw)) == (0, 2)
                await other.stop()
                assert [await ask(upstream) for _ in range(2)] == [WHOLE] * 2
                assert (len(first.raw), len(second.raw)) == (2, 2)
        with pytest.raises(EngineDeadError, match="cannot be reached"):
            await ask(upstream)
        await upstream.close()

    asyncio.run(run())


def test_requests_that_find_out_at_once_agree() -> None:
    async def run() -> None:
        fake, away = FakeSglang(), ("http://127.0.0.1:9", "http://127.0.0.2:9")
        async with serve(fake.app(), grace_s=0) as server, reaching(*away, server.url) as upstream:
            assert await asyncio.gather(*(ask(upstream) for _ in range(20))) == [WHOLE] * 20
            assert upstream.urls[0] == server.url
            assert len(upstream.urls) == 3
        assert len(fake.raw) == 20

    asyncio.run(run())


def close(writer: asyncio.StreamWriter) -> None:
    writer.close()


def reset(writer: asyncio.StreamWriter) -> None:
    """As the kernel does for a process that was killed with something unread."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()


@pytest.mark.parametrize("end", [close, reset])
@pytest.mark.parametrize("num_bytes", [0, 1])
def test_a_request_that_may_have_arrived_is_not_sent_again(
    num_bytes: int, end: Callable[[asyncio.StreamWriter], None]
) -> None:
    num_connections = 0

    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        await reader.read(num_bytes)
        end(writer)

    async def run() -> None:
        other = FakeSglang()
        dying = await asyncio.start_server(die, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{dying.sockets[0].getsockname()[1]}"
        async with dying, serve(other.app(), grace_s=0) as server, reaching(url, server.url) as upstream:
            with pytest.raises(EngineDeadError, match="does not answer"):
                await ask(upstream)
            assert (num_connections, other.raw) == (1, [])
            assert upstream.urls[0] == url

    asyncio.run(run())


def test_a_client_that_leaves_at_any_moment_leaves_no_connection_behind() -> None:
    async def run() -> None:
        async with answering() as (url, connections):
            upstream = Upstream(url, max_connections=1)
            await leave_at_any_moment(lambda: ask(upstream))
            assert await ask(upstream) == b"ok"
            await until_closed(connections)
            await upstream.close()

    asyncio.run(run())


def test_requests_beyond_the_limit_wait_for_a_connection() -> None:
    async def run() -> None:
        async with answering() as (url, connections), reaching(url, max_connections=1) as upstream:
            upstream._client.timeout = httpx.Timeout(None, pool=0)
            async with upstream.answer("/v1/completions", BODY, {}):
                with pytest.raises(EngineBusyError, match="1 requests are under way"):
                    await ask(upstream)
            assert await ask(upstream) == b"ok"
            await until_closed(connections)

    asyncio.run(run())


def test_closing_ends_what_is_under_way() -> None:
    async def run() -> None:
        async with answering() as (url, connections):
            upstream = Upstream(url)
            async with upstream.answer("/v1/completions", BODY, {}):
                await upstream.close()
                await until_closed(connections)

    asyncio.run(run())


def test_a_name_with_several_addresses_is_reached_at_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the headless Service `router` of deploy/kubernetes is, whose pods have an address each."""
    own = socket.getaddrinfo

    def resolve(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        hosts = ("127.0.0.2", "127.0.0.3", "127.0.0.1") if host == b"router" else (host,)
        return [found for each in hosts for found in own(each, port, *args, **kwargs)]

    async def run() -> None:
        fake = FakeSglang()
        async with serve(fake.app(), grace_s=0) as server:
            upstream = Upstream(server.url.replace("127.0.0.1", "router"))
            assert await ask(upstream) == WHOLE
            await upstream.close()
        assert len(fake.raw) == 1

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    asyncio.run(run())


def test_a_refusal_that_quotes_the_clients_text_is_read_at_once() -> None:
    """SGLang's refusal repeats the body: a search through all of it would take time by the square of its length."""
    # Where the fault is in no field of its own, the body is the only place in which a field may be found.
    text = "'type': 'x', 'loc': ('body', 'x'" * 4000
    of_body = f"1 validation error: {{'type': 'value_error', 'loc': ('body',), 'msg': 'no', 'input': {text}}}"
    started_s = time.process_time()
    error = refusal(400, json.dumps({"message": of_body}).encode())
    assert time.process_time() - started_s < 1
    assert (error.status, error.param, len(error.message)) == (400, None, 1000)
    of_field = f"[{{'type': 'float_parsing', 'loc': ('body', 'top_p'), 'msg': 'not a number', 'input': {text}}}]"
    error = refusal(400, json.dumps({"message": of_field}).encode())
    assert (error.param, error.message) == ("top_p", "top_p: not a number")


def test_an_address_that_swallows_connections_goes_behind_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a machine that is off: nothing refuses the connection."""
    monkeypatch.setattr("serving.gateway.upstream._CONNECT_S", 0.1)

    async def run() -> None:
        fake = FakeSglang()
        with socket.socket() as full:
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            swallows = f"http://127.0.0.1:{full.getsockname()[1]}"
            with socket.create_connection(full.getsockname()):
                async with serve(fake.app(), grace_s=0) as server, reaching(swallows, f"{server.url}/") as upstream:
                    assert await ask(upstream) == WHOLE
                    assert upstream.urls == [server.url, swallows]

    asyncio.run(run())


@pytest.mark.parametrize(("num_prompt_tokens", "room"), [(90, 10), (100, None), (120, None)])
def test_a_prompt_that_fills_the_context_leaves_nothing_to_ask_for(num_prompt_tokens: int, room: int | None) -> None:
    said = (
        "Requested token count exceeds the model's maximum context length of 100 tokens. You requested a total of "
        f"{num_prompt_tokens + 50} tokens: {num_prompt_tokens} tokens from the input messages and 50 tokens for the "
        "completion."
    )
    assert completion_room(refusal(400, json.dumps({"message": said}).encode())) == room

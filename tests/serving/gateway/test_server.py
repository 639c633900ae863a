from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import struct
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from ipaddress import IPv4Address

import httpx
import openai
import pytest

from serving.gateway.config import GatewaySettings
from serving.gateway.server import GatewayServer, bind, serve_until_signal
from speculator.errors import ConfigError
from tests.fixtures.doubles import DoubleEngine
from tests.serving.gateway.client import CHAT, HELLO, events, gateway, openai_client, serve

BODY = {"model": "double", "messages": HELLO, "max_tokens": 40}


def test_gateway_runs_without_torch() -> None:
    program = (
        "import sys, serving.gateway.app, serving.gateway.server\n"
        "sys.exit(', '.join({'torch', 'transformers'} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_busy_port_names_the_fix() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as refused:
            bind("127.0.0.1", port)
    assert str(refused.value) == f"port {port} is in use: pass --port or stop the other process"


@pytest.mark.parametrize(
    ("host", "port", "fix"),
    [("127.0.0.1", 70_000, "--port"), ("192.0.2.1", 0, "--host"), ("no.such.invalid", 0, "--host")],
)
def test_unusable_addresses_name_the_fix(host: str, port: int, fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        bind(host, port)


def test_small_writes_are_sent_at_once() -> None:
    with bind("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


def test_client_that_is_early_waits_for_the_start() -> None:
    async def run() -> None:
        server = GatewayServer(gateway(DoubleEngine()), bind("127.0.0.1", 0), grace_s=1)
        async with httpx.AsyncClient() as client:
            early = asyncio.create_task(client.get(f"{server.url}/health"))
            await server.start()
            assert (await early).status_code == 200
        await server.stop()

    asyncio.run(run())


def test_stop_lets_a_running_answer_finish_and_takes_no_new_one() -> None:
    async def run() -> None:
        engine = DoubleEngine(hold_at=2)
        server = GatewayServer(gateway(engine), bind("127.0.0.1", 0), grace_s=30)
        await server.start()
        async with httpx.AsyncClient() as client:
            asked = asyncio.create_task(client.post(server.url + CHAT, json={**BODY, "stream": True}))
            await engine.holding.wait()
            stopping = asyncio.create_task(server.stop())
            await refusal(server)
            engine.release.set()
            response = await asked
            await stopping
        assert events(response)[-1] == "[DONE]"
        assert len(engine.finished) == 1

    asyncio.run(run())


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    for number, kept in before.items():
        signal.signal(number, kept)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.usefixtures("handlers")
def test_a_signal_ends_it_with_a_shutdown(number: int) -> None:
    stopped: list[str] = []

    class Server(GatewayServer):
        async def stop(self) -> None:
            await super().stop()
            stopped.append(self.url)

    server = Server(gateway(DoubleEngine()), bind("127.0.0.1", 0), grace_s=1)
    end = lambda _: os.kill(os.getpid(), number)  # noqa: E731
    asyncio.run(serve_until_signal(server, model="double", draft_version=0, on_serving=end))
    assert stopped == [server.url]
    if number == signal.SIGINT:
        assert signal.getsignal(number) is signal.default_int_handler
    else:
        assert callable(signal.getsignal(number)), "not the default, which would kill this process"
        os.kill(os.getpid(), number)


async def refusal(server: GatewayServer) -> None:
    """Returns once the listener is closed: only then is there nobody to connect to."""
    host, port = server.url.removeprefix("http://").split(":")
    while True:
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except ConnectionError:
            return
        writer.close()


@pytest.mark.parametrize("stream", [False, True])
def test_end_of_the_grace_period_is_an_error_and_not_a_short_answer(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        engine = DoubleEngine(hold_at=3)
        server = GatewayServer(gateway(engine), bind("127.0.0.1", 0), grace_s=0)
        await server.start()
        async with openai_client(server) as client:

            async def talk() -> None:
                answer = await client.chat.completions.create(**BODY, stream=stream)
                async for _ in answer:
                    pass

            asked = asyncio.create_task(talk())
            await engine.holding.wait()
            await server.stop()
            with pytest.raises(openai.APIError) as broken:
                await asked
            assert broken.value.code == "shutting_down"
        assert len(engine.aborted) == 1

    asyncio.run(run())
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("host", "printed", "reached"),
    [
        ("::1", "[::1]", ["[::1]"]),
        ("::", "[::1]", ["[::1]", "127.0.0.1"]),
        (str(IPv4Address(0)), "127.0.0.1", ["127.0.0.1", "localhost"]),
    ],
)
def test_addresses(host: str, printed: str, reached: list[str]) -> None:
    if ":" in host and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")

    async def run() -> None:
        async with serve(gateway(DoubleEngine()), host=host) as server, httpx.AsyncClient(trust_env=False) as client:
            port = server.url.rpartition(":")[2]
            assert server.url == f"http://{printed}:{port}"
            for each in reached:
                # Without keys it looks at the name by which it was found.
                assert (await client.get(f"http://{each}:{port}/v1/models")).status_code == 200

    asyncio.run(run())


class Connection:
    """One that is kept open between requests."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def to(cls, server: GatewayServer) -> Connection:
        return cls(*await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2])))

    async def ask(self) -> bytes:
        """The status of an answer of which nothing is left unread."""
        self._writer.write(b"HEAD /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        return (await self._reader.readuntil(b"\r\n\r\n")).split()[1]

    def begin(self) -> None:
        """Send less than a request."""
        self._writer.write(b"GET /health HTTP/1.1\r\nhost:")

    async def closed(self) -> bool:
        async with asyncio.timeout(10):
            return await self._reader.read() == b""

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        linger = struct.pack("ii", 1, 0)
        self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._writer.close()


def test_a_connection_without_a_request_is_closed_after_a_while() -> None:
    """Which is longer than any load balancer's own, as the operator has it."""
    assert GatewaySettings().idle_connection_s > 600

    async def run() -> None:
        async with serve(gateway(DoubleEngine()), idle_s=0.2) as server:
            connection = await Connection.to(server)
            assert [await connection.ask(), await connection.ask()] == [b"200", b"200"]
            assert await connection.closed()
            connection.close()

    asyncio.run(run())


@pytest.mark.parametrize("end", [Connection.close, Connection.reset])
def test_nothing_is_kept_of_an_idle_connection_that_its_client_ends(end: Callable[[Connection], None]) -> None:
    """No key is needed to open, and to end, many of them."""

    async def run() -> None:
        async with serve(gateway(DoubleEngine())) as server:
            connection = await Connection.to(server)
            assert await connection.ask() == b"200"
            connections = server._server.server_state.connections
            [kept] = [weakref.ref(protocol) for protocol in connections]
            end(connection)
            while connections:  # noqa: ASYNC110 - the server's
                await asyncio.sleep(0)
            gc.collect()
            assert kept() is None

    asyncio.run(asyncio.wait_for(run(), 10))


def test_connections_without_a_request_make_room_for_others() -> None:
    async def run() -> None:
        async with serve(gateway(DoubleEngine()), max_connections=4) as server:
            kept = [await Connection.to(server) for _ in range(3)]
            assert [await each.ask() for each in kept] == [b"200"] * 3
            crowding = await Connection.to(server)
            assert all([await each.closed() for each in kept])
            assert await crowding.ask() == b"200"
            for each in (*kept, crowding):
                each.close()

    asyncio.run(run())


def test_connections_whose_request_does_not_come_make_room_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """They need no key. Some send nothing, some the beginning of a request after another; one runs meanwhile."""
    monkeypatch.setattr("serving.gateway.server._HEADERS_S", 0.5)

    async def run() -> None:
        engine = DoubleEngine(hold_at=2)
        async with serve(gateway(engine), max_connections=5) as server, httpx.AsyncClient(trust_env=False) as client:
            asked = asyncio.create_task(client.post(server.url + CHAT, json=BODY))
            await engine.holding.wait()
            silent, slow, cut = [await Connection.to(server) for _ in range(3)]
            assert await slow.ask() == b"200"
            slow.begin()
            cut.begin()
            assert all([await each.closed() for each in (silent, slow, cut)])
            late = await Connection.to(server)
            assert await late.ask() == b"200"
            engine.release.set()
            assert (await asked).status_code == 200
            for each in (silent, slow, cut, late):
                each.close()

    asyncio.run(run())

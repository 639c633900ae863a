"""HTTP connections that a cancelled request always closes; addresses of servers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx

from speculator.errors import ConfigError


def server_url(url: str, option: str) -> str:
    """`url` without a slash, or the `/v1` that OpenAI's clients want, at its end. Raises ConfigError, which names the
    option, for an address at which nothing can ever answer.
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{option} {url} is not an address ({error}): write http://HOST:PORT") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"{option} {url} is not an address: write http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


class SeparateConnections(httpx.AsyncBaseTransport):
    """A transport with a new connection for each request, closed with the response; at most `max_connections` at once.

    Not httpx's own pool: a request that is cancelled right after its connection is made leaves it there, open, for as
    long as the pool lives. A request waits for a connection as long as its pool timeout says; raises httpx.PoolTimeout.
    """

    def __init__(self, *, max_connections: int = sys.maxsize) -> None:
        self._free = asyncio.Semaphore(max_connections)
        self._ssl_context = httpx.create_ssl_context(trust_env=False)
        self._open: set[httpx.AsyncHTTPTransport] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            async with asyncio.timeout(request.extensions.get("timeout", {}).get("pool")):
                await self._free.acquire()
        except TimeoutError:
            raise httpx.PoolTimeout("") from None
        connection = httpx.AsyncHTTPTransport(verify=self._ssl_context, trust_env=False)
        self._open.add(connection)
        try:
            response = await connection.handle_async_request(request)
        except BaseException:
            await self._close(connection)
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Body(response.stream, lambda: self._close(connection))
        return response

    async def aclose(self) -> None:
        """Close all connections, also those of requests under way."""
        for connection in tuple(self._open):
            await self._close(connection)

    async def _close(self, connection: httpx.AsyncHTTPTransport) -> None:
        if connection in self._open:
            self._open.remove(connection)
            self._free.release()
            # Closes the socket before it first waits, so that another cancellation changes nothing.
            await connection.aclose()


class _Body(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream, close: Callable[[], Awaitable[None]]) -> None:
        self._stream, self._close = stream, close

    def __aiter__(self) -> AsyncIterator[bytes]:
        return aiter(self._stream)

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            await self._close()

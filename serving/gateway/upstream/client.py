"""The server behind a gateway that passes answers through: one HTTP client for the app's lifetime.

An answer is awaited for as long as it takes; only connecting and sending have a deadline. Leaving `answer` early
closes the connection, which is how SGLang learns that nobody waits for the rest.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager

import httpx

from serving.gateway.upstream.errors import refusal
from speculator.errors import EngineBusyError, EngineDeadError
from speculator.tracing import outgoing_headers

_CONNECT_S = 5.0
_SEND_S = 30.0


class Upstream:
    """SGLang's HTTP address, or those of routers in front of the same engines; at most `max_connections` requests are
    under way there at once.

    A request goes to the first address that can be reached. One that could not be goes behind the others, and stays
    there until those cannot be reached either.
    """

    def __init__(self, *urls: str, max_connections: int = 400) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._max_connections = max_connections
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=_CONNECT_S, write=_SEND_S, pool=_CONNECT_S),
            # A kept connection may be closed by the server just as a request goes out on it, and a generation is not
            # sent twice. Connecting anew takes a tenth of a millisecond on the same machine.
            limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=0),
            headers={"accept-encoding": "identity", "content-type": "application/json"},
            trust_env=False,
        )

    @asynccontextmanager
    async def answer(self, path: str, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[httpx.Response]:
        """The open response of status 200 to a POST; its body has not been read.

        Raises ApiError for another status, EngineBusyError or EngineDeadError where no answer comes or it breaks off.
        """
        headers = {**headers, **outgoing_headers()}
        try:
            async with aclosing(await self._send(path, body, headers)) as response:
                if response.status_code != 200:
                    content = await response.aread()
                    raise refusal(response.status_code, content, retry_after=response.headers.get("retry-after"))
                yield response
        except httpx.PoolTimeout:
            raise EngineBusyError(f"{self._max_connections} requests are under way") from None
        except httpx.TransportError as failure:
            raise EngineDeadError(f"SGLang does not answer: {type(failure).__name__}") from failure

    async def _send(self, path: str, body: bytes, headers: Mapping[str, str]) -> httpx.Response:
        """Never twice: the next address is asked only where no connection to the one before could be made."""
        failure: httpx.TransportError | None = None
        for url in tuple(self._urls):
            request = self._client.build_request("POST", url + path, content=body, headers=headers)
            try:
                return await self._client.send(request, stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout) as unreachable:
                failure = unreachable
                # Several requests may find out at once, each with the order that it began with.
                self._urls.remove(url)
                self._urls.append(url)
        raise EngineDeadError(f"SGLang cannot be reached: {type(failure).__name__}") from failure

    async def close(self) -> None:
        await self._client.aclose()

"""Work that stops when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog
from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")
log = structlog.get_logger(__name__)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; cancels it, waits for its cleanup and raises ClientDisconnect when the client leaves first.

    The request's body must have been read: what `receive` still brings is dropped.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))
            if not working.cancelled() and (failure := working.exception()) is not None:
                log.warning("abort_failed", error=type(failure).__name__)
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

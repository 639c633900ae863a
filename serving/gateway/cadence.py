"""Events of a stream at fixed times instead of whenever a round ends.

With speculative decoding the tokens of an event, and the time to the next, show how many proposals were accepted, and
with that something of the text, also to whoever sees only sizes and times of encrypted packets (arXiv 2411.01076). At
fixed times they show how much text a period brought; no longer which round brought what. The text is the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Generic, TypeVar

from serving.engine import Chunk, Piece
from serving.gateway.config import GatewaySettings
from serving.gateway.deadline import deadline

_LAST_ITEMS_S = 5.0
"""Beyond the time for an answer, for its last items to leave."""

T = TypeVar("T")


class Cadence(Generic[T]):
    """`async with`: what is `put` inside is sent together every `interval_s`, the rest at the last such time.

    With an interval of 0 each item is sent at once. Either way `put` waits for a slow client.
    """

    def __init__(self, interval_s: float, send: Callable[[Sequence[T]], Awaitable[None]]) -> None:
        self._interval_s, self._send = interval_s, send
        self._items: list[T] = []
        self._ended = self._has_sent = False
        self._sending: asyncio.Task[None] | None = None
        self._may_put = asyncio.Event()
        """Cleared while items are being sent: what comes meanwhile is kept by whoever makes it."""
        self._may_put.set()

    async def put(self, item: T) -> None:
        """Raises what sending earlier items raised."""
        if self._sending is None:
            await self._send([item])
            return
        await self._may_put.wait()
        if self._sending.done():
            await self._sending
        self._items.append(item)

    async def __aenter__(self) -> Cadence[T]:
        if self._interval_s:
            self._sending = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._sending is None:
            return
        self._ended = True
        is_left = kind is not None and not issubclass(kind, Exception)
        is_refused = kind is not None and not self._items and not self._has_sent
        if is_left or is_refused:
            # The client has gone, or the server stops: nobody reads the rest. Or there is none.
            self._sending.cancel()
        else:
            await self._sending

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        due_s = clock() + self._interval_s
        while not self._ended or self._items:
            await asyncio.sleep(due_s - clock())
            due_s = max(due_s + self._interval_s, clock())
            items, self._items = self._items, []
            if items:
                self._has_sent = True
                await self._send_all(items)

    async def _send_all(self, items: Sequence[T]) -> None:
        self._may_put.clear()
        try:
            await self._send(items)
        finally:
            self._may_put.set()


@asynccontextmanager
async def paced(settings: GatewaySettings, send: Callable[[Sequence[T]], Awaitable[None]]) -> AsyncIterator[Cadence[T]]:
    """What a stream's items go through, for as long as an answer may take and its last items need to leave.

    Raises ApiError (504) where the client does not take them by then.
    """
    interval_s = settings.stream_interval_ms / 1000
    async with deadline(settings.max_request_s + interval_s + _LAST_ITEMS_S), Cadence(interval_s, send) as cadence:
        yield cadence


def merged(items: Iterable[tuple[int, Chunk]]) -> list[tuple[int, Chunk]]:
    """One chunk a sample, with everything that its chunks had."""
    by_sample: dict[int, list[Chunk]] = {}
    for index, chunk in items:
        by_sample.setdefault(index, []).append(chunk)
    return [(index, _merged(chunks)) for index, chunks in by_sample.items()]


def _merged(chunks: Sequence[Chunk]) -> Chunk:
    if len(chunks) == 1:
        return chunks[0]
    return Chunk(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        pieces=tuple(piece for chunk in chunks for piece in chunk.pieces or _unknown(chunk)),
        num_accepted=sum(chunk.num_accepted for chunk in chunks),
        finish_reason=chunks[-1].finish_reason,
    )


def _unknown(chunk: Chunk) -> tuple[Piece, ...]:
    return (Piece(chunk.text, "target"),) if chunk.text else ()

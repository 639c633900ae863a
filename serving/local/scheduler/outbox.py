"""Chunks on their way from the engine's thread to those that wait for them.

Those of a round leave together. Waking another thread gives the interpreter's lock away, and whoever wakes keeps it for
as long as it has something to do: with eight requests that took an eighth of the engine's time.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable

import structlog

from serving.engine import Chunk

log = structlog.get_logger(__name__)

Arrived = asyncio.Queue[Chunk]


class Outbox:
    """Used by the engine's thread alone."""

    def __init__(self) -> None:
        self._waiting: defaultdict[asyncio.AbstractEventLoop, list[tuple[Arrived, Chunk]]] = defaultdict(list)

    def put(self, loop: asyncio.AbstractEventLoop, queue: Arrived, chunk: Chunk) -> None:
        """Of a queue of that loop."""
        self._waiting[loop].append((queue, chunk))

    def send(self) -> None:
        """All of them, in the order in which they came."""
        waiting, self._waiting = self._waiting, defaultdict(list)
        for loop, chunks in waiting.items():
            try:
                loop.call_soon_threadsafe(_deliver, chunks)
            except RuntimeError:
                log.debug("client loop closed before its answer ended", chunks=len(chunks))


def _deliver(chunks: Iterable[tuple[Arrived, Chunk]]) -> None:
    for queue, chunk in chunks:
        queue.put_nowait(chunk)

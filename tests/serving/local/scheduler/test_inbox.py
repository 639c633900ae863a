"""Chunks of a round leave together, in order, and a client that is gone holds nobody up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from serving.engine import Chunk
from serving.local.scheduler.inbox import Outbox


def _chunk(text: str) -> Chunk:
    return Chunk(text=text, token_ids=(1,))


def test_what_was_put_comes_in_order_after_one_waking(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> list[list[str]]:
        loop, outbox = asyncio.get_running_loop(), Outbox()
        wakings: list[Callable[..., Any]] = []
        wake = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *given: (wakings.append(given[0]), wake(*given)))
        queues: list[asyncio.Queue[Chunk]] = [asyncio.Queue() for _ in range(2)]
        for queue, text in ((0, "a"), (1, "b"), (0, "c")):
            outbox.put(loop, queues[queue], _chunk(text))
        await asyncio.sleep(0)
        assert all(queue.empty() for queue in queues)
        sender = threading.Thread(target=outbox.send)
        sender.start()
        sender.join()
        assert len(wakings) == 1
        outbox.send()
        outbox.put(loop, queues[1], _chunk("d"))
        outbox.send()
        assert len(wakings) == 2
        return [[(await queue.get()).text for _ in range(2)] for queue in queues]

    assert asyncio.run(main()) == [["a", "c"], ["b", "d"]]


def test_a_client_whose_loop_is_closed_takes_nothing_from_others() -> None:
    async def main() -> str:
        outbox, gone = Outbox(), asyncio.new_event_loop()
        lost: asyncio.Queue[Chunk] = asyncio.Queue()
        mine: asyncio.Queue[Chunk] = asyncio.Queue()
        gone.close()
        outbox.put(gone, lost, _chunk("lost"))
        outbox.put(asyncio.get_running_loop(), mine, _chunk("mine"))
        outbox.send()
        outbox.send()
        chunk = await mine.get()
        assert mine.empty()
        return chunk.text

    assert asyncio.run(main()) == "mine"

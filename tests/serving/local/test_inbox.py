"""Tasks of other threads are answered; chunks of a round leave together, and a client that is gone holds nobody up."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from serving.engine import Chunk
from serving.local.scheduler.queue import Inbox, Outbox
from speculator.errors import EngineDeadError


def _chunk(text: str) -> Chunk:
    return Chunk(text=text, token_ids=(1,))


class CountingLoop:
    """An event loop, as far as an outbox needs it, that counts how often its thread is woken."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self.num_wakings = loop, 0

    def call_soon_threadsafe(self, *call: Any) -> None:
        self.num_wakings += 1
        self._loop.call_soon_threadsafe(*call)


def test_a_task_that_fails_leaves_nobody_waiting_and_the_engine_running() -> None:
    inbox = Inbox(1)
    failing, done = inbox.add_task(lambda: 1 // 0), inbox.add_task(lambda: "done")
    inbox.run_tasks()
    with pytest.raises(ZeroDivisionError):
        failing.result(0)
    assert done.result(0) == "done"


def test_what_is_to_end_the_engine_ends_it_and_whoever_still_waits_is_told() -> None:
    inbox = Inbox(1)

    def end() -> None:
        raise EngineDeadError("half a target")

    ending, late = inbox.add_task(end), inbox.add_task(lambda: None)
    with pytest.raises(EngineDeadError, match="half"):
        inbox.run_tasks()
    inbox.end_all()
    for task in (ending, late):
        with pytest.raises(EngineDeadError):
            task.result(0)
    with pytest.raises(EngineDeadError):
        inbox.add_task(lambda: None)


def test_what_was_put_comes_in_order_after_one_waking() -> None:
    async def main() -> list[list[str]]:
        loop: Any = CountingLoop(asyncio.get_running_loop())
        outbox = Outbox()
        queues: list[asyncio.Queue[Chunk]] = [asyncio.Queue() for _ in range(2)]
        for queue, text in ((0, "a"), (1, "b"), (0, "c")):
            outbox.put(loop, queues[queue], _chunk(text))
        await asyncio.sleep(0)
        assert all(queue.empty() for queue in queues)
        sender = threading.Thread(target=outbox.send)
        sender.start()
        sender.join()
        assert loop.num_wakings == 1
        outbox.send()
        outbox.put(loop, queues[1], _chunk("d"))
        outbox.send()
        assert loop.num_wakings == 2
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

"""What passes between the engine's thread and others: requests and tasks in, chunks of answers out.

Nobody waits in here but the engine's thread, for something to do; nothing is computed under the lock.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TypeVar

import structlog

from serving.engine import Chunk
from serving.local.request import ActiveRequest
from speculator.errors import EngineBusyError, EngineDeadError, type_and_place

log = structlog.get_logger(__name__)
Arrived = asyncio.Queue[Chunk]
T = TypeVar("T")


class Inbox:
    """Of one engine. Once it is closed it takes nothing and raises EngineDeadError."""

    def __init__(self, max_waiting: int) -> None:
        """More than `max_waiting` requests are refused with EngineBusyError."""
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._waiting: deque[ActiveRequest] = deque()
        self._tasks: deque[tuple[Callable[[], object], Future[object]]] = deque()
        self.is_closed = False

    # -- of any thread ------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_tasks(self) -> int:
        return len(self._tasks)

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= self._max_waiting

    def submit(self, generation: ActiveRequest) -> None:
        with self._changed:
            self._refuse_if_closed()
            if self.is_full:
                raise EngineBusyError(f"{len(self._waiting)} requests are waiting already")
            self._waiting.append(generation)
            self._changed.notify()

    def add_task(self, run: Callable[[], T]) -> Future[T]:
        """Have the engine's thread call `run` between two steps."""
        done: Future[T] = Future()
        with self._changed:
            self._refuse_if_closed()
            self._tasks.append((run, done))  # type: ignore[arg-type]
            self._changed.notify()
        return done

    def close(self) -> None:
        """Take nothing more; the engine's thread ends after its step."""
        with self._changed:
            self.is_closed = True
            self._changed.notify()

    def _refuse_if_closed(self) -> None:
        if self.is_closed:
            raise EngineDeadError("the engine has stopped")

    # -- of the engine's thread ----------------------------------------------------------------------------------

    def wait(self, *, is_busy: bool) -> bool:
        """Until there is something to do, at once where the engine `is_busy`; False when it is to stop."""
        with self._changed:
            while not (is_busy or self._waiting or self._tasks or self.is_closed):
                self._changed.wait()
            return not self.is_closed

    def next_request(self) -> ActiveRequest | None:
        with self._changed:
            return self._waiting.popleft() if self._waiting else None

    def drop_aborted(self) -> int:
        """How many requests were given up before they were admitted."""
        with self._changed:
            num_before = len(self._waiting)
            self._waiting = deque(generation for generation in self._waiting if not generation.aborted)
            return num_before - len(self._waiting)

    def run_tasks(self) -> None:
        """Whoever added a task gets what it returns or raises. EngineDeadError goes on: it is to end the engine."""
        while self._tasks:
            with self._changed:
                run, done = self._tasks.popleft()
            try:
                done.set_result(run())
            except Exception as error:
                log.error("task between two steps failed", error=type_and_place(error))
                done.set_exception(error)
                if isinstance(error, EngineDeadError):
                    raise

    def end_all(self) -> None:
        """Close, and tell everybody whose matter is still in here that nothing will come of it."""
        self.close()
        for generation in self._waiting:
            generation.abort()
        for _, done in self._tasks:
            done.set_exception(EngineDeadError("the engine stopped before this was done"))
        self._waiting.clear()
        self._tasks.clear()


class Outbox:
    """Chunks on their way to those that wait for them; used by the engine's thread alone.

    Those of a round leave together. Waking another thread gives the interpreter's lock away, and whoever wakes keeps
    it for as long as it has something to do: with eight requests that took an eighth of the engine's time.
    """

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

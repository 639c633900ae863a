"""What passes between the engine's thread and others: requests, staged weights and tasks in, chunks of answers out.

Nobody waits in here but the engine's thread, for something to do; nothing is computed under the lock.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict, deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass

import structlog

from serving.engine import Chunk, SwapReport, TargetReport
from serving.local.draft import StagedDraft
from serving.local.request import Generation
from serving.local.suffix_text import Errand
from serving.local.target.model import StagedTarget
from speculator.errors import EngineBusyError, EngineDeadError

log = structlog.get_logger(__name__)
Arrived = asyncio.Queue[Chunk]


@dataclass(frozen=True)
class Swap:
    staged: StagedDraft
    report: Future[SwapReport]


@dataclass(frozen=True)
class Move:
    version: int
    staged: StagedTarget
    report: Future[TargetReport]


class Inbox:
    """Of one engine. Once it is closed it takes nothing: what has an answer to wait for raises EngineDeadError."""

    def __init__(self, max_waiting: int) -> None:
        """More than `max_waiting` requests are refused with EngineBusyError."""
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._waiting: deque[Generation] = deque()
        self._swap: Swap | None = None
        self._move: Move | None = None
        self._errands: deque[tuple[Errand, Future[None]]] = deque()
        self._is_closed = False

    # -- of any thread ------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= self._max_waiting

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def submit(self, generation: Generation) -> None:
        with self._changed:
            self._refuse_if_closed()
            if self.is_full:
                raise EngineBusyError(f"{len(self._waiting)} requests are waiting already")
            self._waiting.append(generation)
            self._changed.notify()

    def offer_draft(self, staged: StagedDraft) -> Future[SwapReport]:
        """Raises EngineBusyError while another one waits."""
        swap = Swap(staged, Future())
        with self._changed:
            self._refuse_if_closed()
            if self._swap is not None:
                raise EngineBusyError("a draft is being installed already")
            self._swap = swap
            self._changed.notify()
        return swap.report

    def offer_target(self, version: int, staged: StagedTarget) -> Future[TargetReport]:
        """Raises EngineBusyError while another one is on its way."""
        move = Move(version, staged, Future())
        with self._changed:
            self._refuse_if_closed()
            if self._move is not None:
                raise EngineBusyError("the target is being moved already")
            self._move = move
            self._changed.notify()
        return move.report

    def add_errand(self, errand: Errand) -> Future[None] | None:
        """None where it is closed: the texts are gone with the engine."""
        done: Future[None] = Future()
        with self._changed:
            if self._is_closed:
                return None
            self._errands.append((errand, done))
            self._changed.notify()
        return done

    def close(self) -> None:
        """Take nothing more; the engine's thread ends after its step."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise EngineDeadError("the engine has stopped")

    # -- of the engine's thread ----------------------------------------------------------------------------------

    def wait(self, *, is_busy: bool) -> bool:
        """Until there is something to do, at once where the engine `is_busy`; False when it is to stop."""
        with self._changed:
            while not (is_busy or self._waiting or self._swap or self._move or self._errands or self._is_closed):
                self._changed.wait()
            return not self._is_closed

    def next_request(self) -> Generation | None:
        with self._changed:
            return self._waiting.popleft() if self._waiting else None

    def drop_aborted(self) -> int:
        """How many requests were given up before they were admitted."""
        with self._changed:
            num_before = len(self._waiting)
            self._waiting = deque(generation for generation in self._waiting if not generation.aborted)
            return num_before - len(self._waiting)

    def take_swap(self) -> Swap | None:
        with self._changed:
            swap, self._swap = self._swap, None
        return swap

    def staged_move(self) -> Move | None:
        """It stays here until `end_move`, so that no other is taken meanwhile."""
        with self._changed:
            return self._move

    def end_move(self) -> None:
        with self._changed:
            self._move = None

    def take_errands(self) -> deque[tuple[Errand, Future[None]]]:
        with self._changed:
            errands, self._errands = self._errands, deque()
        return errands

    def end_all(self) -> None:
        """Close, and tell everybody whose matter is still in here that nothing will come of it."""
        with self._changed:
            self._is_closed = True
            waiting, self._waiting = self._waiting, deque()
            swap, self._swap = self._swap, None
            move, self._move = self._move, None
            errands, self._errands = self._errands, deque()
        for generation in waiting:
            generation.abort()
        if swap is not None:
            swap.report.set_exception(EngineDeadError("the engine stopped before the swap"))
        if move is not None:
            move.report.set_exception(EngineDeadError("the engine stopped before the target moved"))
        for _, done in errands:
            # Its texts are gone with it.
            done.set_result(None)


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

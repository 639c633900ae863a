"""Queues of the local engine: waiting requests and tasks, slots in the KV cache, chunks of answers.

`Inbox` and `Outbox` connect the engine's thread with others. Only the engine's thread waits on the inbox, and nothing
is computed under its lock.

`Slots` assigns KV-cache slots. Running requests fill slots 0…n−1. The one that is being prefilled, if any, has slot n.
A new sample of a prompt group copies the prompt's keys and values from a running sample.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import structlog

from serving.engine import Chunk
from serving.local.decode.rounds import RoundRunner
from serving.local.request import ActiveRequest
from speculator.errors import EngineBusyError, EngineDeadError, type_and_place

log = structlog.get_logger(__name__)
Arrived = asyncio.Queue[Chunk]
T = TypeVar("T")


class Inbox:
    """Waiting requests and tasks of one engine. Once closed, it refuses both with EngineDeadError."""

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
        """Refuse new work; the engine's thread ends after its step."""
        with self._changed:
            self.is_closed = True
            self._changed.notify()

    def _refuse_if_closed(self) -> None:
        if self.is_closed:
            raise EngineDeadError("the engine has stopped")

    # -- of the engine's thread ----------------------------------------------------------------------------------

    def wait(self, *, is_busy: bool) -> bool:
        """Wait for work, not at all if the engine `is_busy`; returns False when the engine must stop."""
        with self._changed:
            while not (is_busy or self._waiting or self._tasks or self.is_closed):
                self._changed.wait()
            return not self.is_closed

    def next_request(self) -> ActiveRequest | None:
        with self._changed:
            return self._waiting.popleft() if self._waiting else None

    def drop_aborted(self) -> int:
        """Remove waiting requests that their clients gave up; returns how many."""
        with self._changed:
            num_before = len(self._waiting)
            self._waiting = deque(generation for generation in self._waiting if not generation.aborted)
            return num_before - len(self._waiting)

    def run_tasks(self) -> None:
        """Run all tasks; futures get results or exceptions. EngineDeadError is also raised, to end the engine."""
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
        """Close, and end all waiting requests and tasks with EngineDeadError."""
        self.close()
        for generation in self._waiting:
            generation.abort()
        for _, done in self._tasks:
            done.set_exception(EngineDeadError("the engine stopped before this was done"))
        self._waiting.clear()
        self._tasks.clear()


class Outbox:
    """Chunks to be sent to their readers; used by the engine's thread alone.

    All chunks of a round are sent together. Each wake-up of another thread hands over the interpreter's lock until that
    thread is done: chunk by chunk, eight requests cost an eighth of the engine's time.
    """

    def __init__(self) -> None:
        self._waiting: defaultdict[asyncio.AbstractEventLoop, list[tuple[Arrived, Chunk]]] = defaultdict(list)

    def put(self, loop: asyncio.AbstractEventLoop, queue: Arrived, chunk: Chunk) -> None:
        """Add a chunk for a queue of that event loop."""
        self._waiting[loop].append((queue, chunk))

    def send(self) -> None:
        """Send all chunks, in order."""
        waiting, self._waiting = self._waiting, defaultdict(list)
        for loop, chunks in waiting.items():
            try:
                loop.call_soon_threadsafe(_deliver, chunks)
            except RuntimeError:
                log.debug("client loop closed before its answer ended", chunks=len(chunks))


def _deliver(chunks: Iterable[tuple[Arrived, Chunk]]) -> None:
    for queue, chunk in chunks:
        queue.put_nowait(chunk)


class Slots:
    """Slots of the running and the prefilling request. For the engine's thread; others may read the numbers."""

    def __init__(self, runner: RoundRunner, *, num_slots: int, prompt_labels: int) -> None:
        self._runner, self._num_slots, self._prompt_labels = runner, num_slots, prompt_labels
        self.running: list[ActiveRequest] = []
        self.prefilling: ActiveRequest | None = None

    @property
    def all_requests(self) -> list[ActiveRequest]:
        return [*self.running, *([self.prefilling] if self.prefilling else [])]

    @property
    def can_admit(self) -> bool:
        """Whether a slot is free and no prompt is being read: one is read at a time."""
        return self.prefilling is None and len(self.running) < self._num_slots

    def admit(self, generation: ActiveRequest) -> None:
        """Give a request a slot; copies what a running sample of the same group has read of the prompt."""
        self.prefilling = generation
        slot, length = longest_prefix(generation, self.running, prompt_labels=self._prompt_labels)
        if length > 0:
            self._copy_prefix(generation, slot, length)

    def _copy_prefix(self, generation: ActiveRequest, slot: int, length: int) -> None:
        """Copy `length` positions from `slot`; if that is all but the prompt's last token, start decoding."""
        sibling, last = self.running[slot], generation.num_prompt_tokens - 1
        self._runner.move_slot(slot, len(self.running), generation)
        # The pair at a position needs the token after it.
        generation.num_pairs_read = min(sibling.num_pairs_read, length - 1) if sibling.can_share_draft_kv else 0
        if sibling.request.prompt_token_ids == generation.request.prompt_token_ids:
            generation.topk = [top.before(length) for top in sibling.topk if top.position < length]
        generation.num_prefilled = length
        if length == last:
            self.start_decoding()

    def start_decoding(self) -> None:
        """Move the request whose prompt has been read to the running ones; it keeps its slot."""
        if self.prefilling is not None:
            self.running.append(self.prefilling)
            self.prefilling = None

    def free(self, generation: ActiveRequest) -> None:
        """Close the gap: the last running request moves into the freed slot, the prefilling one follows."""
        slot, last = self.running.index(generation), len(self.running) - 1
        if slot != last:
            self.running[slot] = self.running[last]
            self._runner.move_slot(last, slot, self.running[slot])
        self.running.pop()
        if self.prefilling is not None:
            self._runner.move_slot(last + 1, last, self.prefilling)

    def drop_aborted(self) -> int:
        """Free the slots of requests whose clients have left; returns how many."""
        gone = [generation for generation in self.all_requests if generation.aborted]
        for generation in gone:
            if generation is self.prefilling:
                self.prefilling = None
            else:
                self.free(generation)
        return len(gone)


def longest_prefix(
    generation: ActiveRequest, running: Sequence[ActiveRequest], *, prompt_labels: int
) -> tuple[int, int]:
    """(slot of the running sibling that shares most of the prompt, how many tokens of it), without the last token."""
    policy, best = generation.request.policy, (0, 0)
    # Requests that opt out of capture share nothing with others.
    if not (policy.group_id and policy.capture):
        return best
    for slot, sibling in enumerate(running):
        if sibling.can_share_prefix_kv and sibling.request.policy == policy and sibling.capture == generation.capture:
            found = slot, _common(generation, sibling, prompt_labels)
            best = max(best, found, key=lambda one: (one[1], running[one[0]].can_share_draft_kv))
    return best


def _common(generation: ActiveRequest, sibling: ActiveRequest, prompt_labels: int) -> int:
    prompt = generation.tokens
    most = min(len(prompt), len(sibling.tokens)) - 1
    if generation.capture and sibling.request.prompt_token_ids != generation.request.prompt_token_ids:
        # The last positions must be read again, since their distributions are captured for each request.
        most = min(most, max(0, len(prompt) - prompt_labels))
    pairs = enumerate(zip(prompt[:most], sibling.tokens, strict=False))
    return next((at for at, (one, other) in pairs if one != other), most)

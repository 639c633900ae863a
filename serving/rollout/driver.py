"""Run groups of samples on engines, as the scheduler says: the I/O around `serving/rollout/scheduler.py`.

One task a lease reads its engine's stream and reports every chunk; when the scheduler says stop, the stream is closed,
and the sample goes on elsewhere as a request for its prompt and its tokens so far. All state is changed on the event
loop, between two awaits, so chunks of an ended lease are ignored, and nothing is counted twice.

A driver waits for chunks. New work starts after `submit`, a chunk, an engine that comes back (polled at every `tick`),
or slots that become free (`dispatch`). Until then samples wait in the scheduler; the caller bounds how many.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Literal, cast

import structlog

from serving.engine import Chunk, GenerateRequest
from serving.rollout.engines import RolloutEngine
from serving.rollout.samples import Answer, GroupWork, Lease, SampleEnd, SampleId, SampleResult, SampleState, Turn
from serving.rollout.scheduler import Policy, Scheduler
from speculator.errors import EngineBusyError, EngineDeadError, EngineError, RequestError, type_and_place

log = structlog.get_logger(__name__)

MAX_FAILURES = 3
"""Failures in a row of living engines on one sample, after which it is refused."""


class Driver:
    """Runs groups on engines; owned by one event loop.

    `on_ended` is called once for each sample, when it has ended, and `on_turn` for each turn that an environment is to
    answer (`observe`, `end_conversation`); they must not block.
    """

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        policy: Policy,
        *,
        on_ended: Callable[[SampleResult], object],
        on_turn: Callable[[Turn], object] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Deadlines of groups are on `clock`."""
        self._engines = {engine.name: engine for engine in engines}
        assert len(self._engines) == len(engines), "two engines have one name"
        self._on_ended, self._on_turn, self._clock = on_ended, on_turn, clock
        self._scheduler = Scheduler(policy)
        self._works: dict[str, GroupWork] = {}
        self._num_left: dict[str, int] = {}
        self._answers: dict[SampleId, Answer] = {}
        self._live: dict[int, tuple[Lease, asyncio.Task[None]]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._lost: set[str] = set()
        self._resting: set[str] = set()
        """Engines that get no work until the next tick: one that was busy would be busy again at once."""
        self.num_tokens = 0
        """Generated and reported."""
        self.num_begun = 0
        self.num_resumed = 0
        """Leases of samples that had run before, here or elsewhere."""
        self.num_lost = 0
        """Leases that ended because their engine died."""

    # -- what callers do ----------------------------------------------------------------------------------------------

    def submit(self, works: Iterable[GroupWork]) -> None:
        """Start groups. Raises RequestError for the id of a group that is still under way; the groups before it have
        started.
        """
        for work in works:
            self._scheduler.submit(work.request)
            group_id, num_samples = work.request.group_id, len(work.request.seeds)
            self._works[group_id] = work
            self._num_left[group_id] = num_samples
            self._answers |= {SampleId(group_id, number): Answer() for number in range(num_samples)}
        self.dispatch()

    def set_engines(self, engines: Iterable[RolloutEngine]) -> None:
        """Replace the engines. Samples on one that is gone or dead go on elsewhere."""
        found = {engine.name: engine for engine in engines}
        alive = {name for name, engine in found.items() if engine.is_alive}
        for name in self._engines.keys() - alive - self._lost:
            self._on_engine_lost(name)
        self._engines = found
        # A new engine that is not alive yet counts as lost until `tick` finds it alive.
        self._lost = found.keys() & self._lost | found.keys() - alive
        self._resting &= found.keys()
        self.dispatch()

    def cancel(self, group_ids: Iterable[str]) -> None:
        """End what has not ended of these groups; groups that are not known have ended."""
        for group_id in group_ids:
            if group_id in self._works:
                self._end_all(self._scheduler.cancel(group_id))
        self.dispatch()

    def awaited_turn(self, sample_id: SampleId) -> int | None:
        """The number of the turn that an environment is to answer; None where the sample awaits no answer."""
        work = self._works.get(sample_id.group_id)
        if work is None or sample_id.number >= len(work.request.seeds):
            return None
        sample = self._scheduler.sample(sample_id)
        return len(sample.turns) - 1 if sample.state is SampleState.AWAITING else None

    def last_token(self, sample_id: SampleId) -> int:
        """The last token of a sample that awaits its environment."""
        return self._scheduler.sample(sample_id).tokens[-1]

    def observe(self, sample_id: SampleId, tokens: Sequence[int]) -> None:
        """Add the environment's answer to a sample that awaits it, as far as it fits; the sample goes on behind it."""
        ended = self._scheduler.observed(sample_id, tokens)
        num_taken = len(self._scheduler.sample(sample_id).tokens) - self._scheduler.sample(sample_id).turns[-1][1]
        self._answers[sample_id].observe(num_taken, logprobs=self._works[sample_id.group_id].logprobs)
        if ended is not None:
            self._end_all([ended])
        self.dispatch()

    def end_conversation(self, sample_id: SampleId, *, failure: str | None = None) -> None:
        """End a sample that awaits its environment, because the environment says so or has failed."""
        if failure is None:
            self._end_all([self._scheduler.done(sample_id)])
        else:
            self._end_all([self._scheduler.failed(sample_id)], detail=failure)
        self.dispatch()

    def set_target_version(self, version: int) -> None:
        """Move to a newer target: end samples that are too old for it, and stop the engines on them.

        Engines must already serve the new target: samples that begin from now on carry its number. A version that is
        not newer changes nothing.
        """
        # Not for one that comes back later, perhaps with other weights.
        self._end_all(self._scheduler.announce_target(version, self._engines.keys() - self._lost))
        self.dispatch()

    @property
    def counts(self) -> Counter[SampleState]:
        """Samples by state, of all groups under way."""
        return self._scheduler.counts()

    def counts_of(self, group_id: str) -> Counter[SampleState]:
        """The same of one group; nothing of one that has ended."""
        numbers = range(len(self._works[group_id].request.seeds)) if group_id in self._works else ()
        return Counter(self._scheduler.sample(SampleId(group_id, number)).state for number in numbers)

    @property
    def num_read_again(self) -> int:
        """Tokens that were read again because samples moved to another engine, prompts included."""
        return self._scheduler.num_read_again

    @property
    def has_engine(self) -> bool:
        return len(self._lost) < len(self._engines)

    def tick(self) -> None:
        """Apply deadlines, find engines that are back, and those that died without ending their streams, as a machine
        does that loses its power. Call it a few times a second.
        """
        for name, engine in self._engines.items():
            # An idle one, too: no sample may wait for it, and it may come back with the weights that it began with.
            if not engine.is_alive and name not in self._lost:
                self._on_engine_lost(name)
        if any(work.request.deadline_s is not None for work in self._works.values()):
            self._end_all(self._scheduler.expire(self._clock()))
        self._resting.clear()
        for name in [name for name in self._lost if self._engines[name].is_alive]:
            log.info("rollout engine back", engine=name)
            self._lost.discard(name)
        self.dispatch()

    def dispatch(self) -> None:
        """Give engines as much work as they have slots for, and take back work for which they have no slot left."""
        if not self._works:
            return
        alive = self._engines.keys() - self._lost
        names = sorted(name for name in alive - self._resting if self._engines[name].takes_new)
        for name in names:
            self._preempt_excess(name)
        for name in alive.difference(names):
            # The scheduler must not leave samples to an engine that takes none now.
            self._request_work(name, 0)
        while (lease := self._next_lease(names)) is not None:
            self._start(lease)
        for name in names:
            # No work is left, but the scheduler judges moves by the free slots that it was told last.
            for lease in self._request_work(name, self._num_free(name)):
                self._start(lease)

    async def close(self) -> None:
        """Close every stream; what had not ended is forgotten, so that nothing begins again."""
        self._works.clear()
        tasks = [task for _, task in self._live.values()]
        self._live.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._ending, return_exceptions=True)

    def check(self) -> None:
        """Assert that every sample is in one place, and that each that runs has a stream."""
        self._scheduler.check()
        running = self.counts[SampleState.RUNNING]
        assert running == len(self._live), f"{running} samples run, with {len(self._live)} streams"

    # -- slots --------------------------------------------------------------------------------------------------------

    def _num_free(self, name: str) -> int:
        return self._engines[name].num_slots - self._scheduler.num_running(name)

    def _leases_on(self, name: str) -> list[Lease]:
        return [lease for lease, _ in self._live.values() if lease.engine == name]

    def _next_lease(self, names: Sequence[str]) -> Lease | None:
        """One lease, for the emptiest engine first: otherwise the first engine would get everything."""
        free = {name: self._num_free(name) for name in names}
        for name in sorted((name for name in names if free[name] > 0), key=lambda name: -free[name]):
            if leases := self._request_work(name, free[name], most=1):
                return leases[0]
        return None

    def _request_work(self, name: str, num_slots: int, most: int | None = None) -> list[Lease]:
        memory = self._engines[name].memory_tokens - self._scheduler.reserved_tokens(name)
        return self._scheduler.next_for(name, max(num_slots, 0), memory, most)

    def _preempt_excess(self, name: str) -> None:
        """Preempt what is beyond the engine's slots, the newest first: they have the least to read again."""
        if (num_over := -self._num_free(name)) <= 0:
            return
        for lease in sorted(self._leases_on(name), key=lambda lease: -lease.number)[:num_over]:
            self._scheduler.preempted(lease)
            self._stop(lease.number)

    # -- leases -------------------------------------------------------------------------------------------------------

    def _start(self, lease: Lease) -> None:
        answer = self._answers[lease.sample_id]
        if answer.num_leases:
            self.num_resumed += 1
        else:
            self.num_begun += 1
        answer.num_leases += 1
        task = asyncio.create_task(self._run(lease))
        task.add_done_callback(_report)
        self._live[lease.number] = lease, task

    def _stop(self, number: int) -> None:
        """Stop the stream of a lease that the scheduler has ended."""
        _, task = self._live.pop(number)
        if task is not asyncio.current_task():
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _run(self, lease: Lease) -> None:
        engine = self._engines[lease.engine]
        heard_s = self._clock()
        try:
            # The protocol promises an iterator that can be closed: that is how a request is aborted.
            chunks = cast(AsyncGenerator[Chunk, None], engine.generate(self._request_of(lease)))
            async with aclosing(chunks):
                async for chunk in chunks:
                    if chunk.finish_reason == "abort":
                        raise EngineError("the engine aborted the request")
                    last_s, heard_s = heard_s, self._clock()
                    self._scheduler.measure(lease, len(chunk.token_ids), heard_s - last_s)
                    if not self._take(lease, chunk):
                        break
            if lease.number in self._live:
                raise EngineError("the engine's stream ended without a finish reason")
        except Exception as failure:
            if lease.number in self._live:
                self._fail(lease, failure)
        self.dispatch()

    def _request_of(self, lease: Lease) -> GenerateRequest:
        work = self._works[lease.sample_id.group_id]
        return GenerateRequest(
            request_id=work.request_id(lease.sample_id.number),
            prompt_token_ids=lease.prompt_token_ids,
            num_answered=lease.num_generated,
            max_tokens=lease.max_tokens,
            sampling=work.sampling,
            stop=work.stop,
            seed=lease.seed,
            ignore_eos=work.ignore_eos,
            logprobs=work.logprobs,
            policy=work.policy,
        )

    def _take(self, lease: Lease, chunk: Chunk) -> bool:
        """Report a chunk; returns whether the engine shall go on. Chunks of a lease that is over are dropped."""
        if lease.number in self._live and (too_old := self._scheduler.target_seen(lease, chunk.target_version)):
            self._end_all(too_old)
            self.dispatch()
        if lease.number not in self._live:
            return False
        if self._scheduler.is_behind(lease, chunk.target_version):
            self._resting.add(lease.engine)
            self._scheduler.preempted(lease)
            self._stop(lease.number)
            return False
        self._answers[lease.sample_id].add(chunk, lease.engine)
        self.num_tokens += len(chunk.token_ids)
        if chunk.finish_reason is not None:
            assert chunk.finish_reason != "abort"
            if self._scheduler.turn_ended(lease, chunk.token_ids):
                self._stop(lease.number)
                self._hand_over(lease.sample_id, chunk.finish_reason)
                return False
            ended = self._scheduler.finished(lease, chunk.token_ids, chunk.finish_reason)
            assert ended is not None
            self._stop(lease.number)
            self._end_all([ended])
            return False
        if self._scheduler.progressed(lease, chunk.token_ids) == "go on":
            return True
        self._stop(lease.number)
        return False

    def _hand_over(self, sample_id: SampleId, reason: Literal["stop", "length"]) -> None:
        """Pass a finished turn to the sample's environment."""
        sample = self._scheduler.sample(sample_id)
        text, logprobs = self._answers[sample_id].next_turn()
        start, end = sample.turns[-1]
        self._on_turn(
            Turn(
                sample_id=sample_id,
                number=len(sample.turns) - 1,
                tokens=tuple(sample.tokens[start:end]),
                logprobs=logprobs,
                text=text,
                reason=reason,
            )
        )

    def _fail(self, lease: Lease, failure: Exception) -> None:
        if isinstance(failure, RequestError):
            self._end_all(self._scheduler.refuse(lease.sample_id), detail=str(failure))
        elif isinstance(failure, EngineDeadError) or not self._engines[lease.engine].is_alive:
            self._on_engine_lost(lease.engine)
        elif not isinstance(failure, EngineBusyError) and self._has_failed_too_often(lease.sample_id):
            log.error("rollout sample failed too often", error=type_and_place(failure))
            refused = self._scheduler.refuse(lease.sample_id)
            self._end_all(refused, detail="the engine failed on it repeatedly")
        else:
            self._resting.add(lease.engine)
            self._scheduler.preempted(lease, has_failed=not isinstance(failure, EngineBusyError))
            self._stop(lease.number)

    def _has_failed_too_often(self, sample_id: SampleId) -> bool:
        """Count one more failure."""
        answer = self._answers[sample_id]
        answer.num_failures += 1
        return answer.num_failures >= MAX_FAILURES

    def _on_engine_lost(self, name: str) -> None:
        """Handle an engine that died: its samples go on elsewhere from the tokens that were reported."""
        log.warning("rollout engine lost", engine=name, num_samples=len(self._leases_on(name)))
        self._lost.add(name)
        self._scheduler.engine_lost(name)
        for lease in self._leases_on(name):
            self.num_lost += 1
            self._stop(lease.number)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _end_all(self, ended: Iterable[SampleEnd], *, detail: str = "") -> None:
        for one in ended:
            if one.stop is not None:
                self._stop(one.stop)
            self._on_ended(self._result_of(one, detail))
            group_id = one.sample_id.group_id
            self._num_left[group_id] -= 1
            if self._num_left[group_id] and one.state is SampleState.FINISHED:
                self._end_all(self._scheduler.redundant(group_id))
            elif not self._num_left[group_id]:
                self._forget(group_id)

    def _result_of(self, ended: SampleEnd, detail: str) -> SampleResult:
        answer, sample = self._answers[ended.sample_id], self._scheduler.sample(ended.sample_id)
        # Where a stale sample is aborted the caller wants no tokens of an old target.
        is_wanted = not (ended.state is SampleState.ABORTED and ended.reason == "stale")
        return SampleResult(
            sample_id=ended.sample_id,
            state=ended.state,
            reason=ended.reason,
            tokens=tuple(sample.tokens) if is_wanted else (),
            logprobs=tuple(answer.logprobs) if is_wanted else (),
            text="".join(answer.parts) if is_wanted else "",
            target_version=sample.target_version,
            engine=answer.engine,
            num_leases=answer.num_leases,
            turns=tuple(sample.turns) if is_wanted else (),
            detail=detail,
        )

    def _forget(self, group_id: str) -> None:
        """Drop a group whose samples have all ended and were reported."""
        self._scheduler.forget(group_id)
        work = self._works.pop(group_id)
        del self._num_left[group_id]
        for number in range(len(work.request.seeds)):
            del self._answers[SampleId(group_id, number)]
        for engine in self._engines.values():
            engine.drop_group_text(work.policy.tenant, work.policy.group_id)


def _report(task: asyncio.Task[None]) -> None:
    """Log an unexpected error of a task, which nobody awaits."""
    if not task.cancelled() and (failure := task.exception()) is not None:
        log.error("rollout task failed", error=type_and_place(failure))

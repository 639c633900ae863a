"""Decide which sample runs where: the state of all groups, changed by events. No clock, no I/O.

A driver asks `next_for` whenever an engine has a free slot, runs the leases that it gets, and reports: tokens as they
come (`progressed`), the end (`finished`), an engine that dropped a sample (`preempted`) or died (`engine_lost`). Only
the newest lease of a sample may report. Reports of older leases are ignored, so no token counts twice. Every
sample is waiting, running on one engine, with its environment, or ended, at any time; `check` asserts it.

After any event that frees a slot or brings work back, all engines with free slots ask again. The samples of a prompt
are work items of their own, and whichever engine has a free slot takes the next one: queue scheduling with prompt
replication. Nothing waits for the end of a batch. Of engines with different speeds each takes first what costs it the
least, compared with the others: long prompts where prefill is cheap, long answers where decoding is.

Staleness is bounded: with the asynchronous ratio α a sample may be used at target version n if it was begun at version
n − α or later. A sample under way that has fallen behind is given up at once: every further token of it would be
wasted. Queue scheduling, prompt replication and α are from ROLL Flash (arXiv 2510.11345).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from serving.rollout.engine_costs import Cost
from serving.rollout.engines import EngineCapacity
from serving.rollout.job_fairness import MOST_JOBS, FairShares
from serving.rollout.order import Order, urgency
from serving.rollout.queue import WaitingQueue
from serving.rollout.samples import EndReason, Group, GroupRequest, Lease, Sample, SampleEnd, SampleId, SampleState
from speculator.errors import RequestError

Verdict = Literal["go on", "stop"]


@dataclass(frozen=True, kw_only=True)
class Policy:
    order: Order
    chunk_tokens: int
    """Tokens of a chunk, after which the scheduler decides again where a sample runs."""


class Scheduler:
    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.target_version = 0
        """The newest that any engine has shown."""
        self._groups: dict[str, Group] = {}
        self._num_groups = 0
        self._shares = FairShares()
        self._queue = WaitingQueue(self._shares.virtual_time)
        self.prefill, self.decode = Cost(0.001), Cost(0.01)  # at first only the ratio of the two matters
        self._mean_lengths: dict[str, float] = {}
        """Of the finished samples of each job, the newest counting most."""
        self._capacities: dict[str, EngineCapacity] = {}
        # Numbers are unique over all groups, since the id of a forgotten group may be used again.
        self._lease_numbers = itertools.count(1)
        self._leases: dict[int, Sample] = {}
        self.num_read_again = 0
        """Tokens that were read again because samples moved to another engine, prompts included."""

    # -- groups -------------------------------------------------------------------------------------------------------

    def submit(self, request: GroupRequest) -> None:
        """Queue the samples of a group. Raises RequestError for the id of a group that is still known.

        The caller ensures that prompt and limit fit into the model's context.
        """
        if request.group_id in self._groups:
            raise RequestError(f"there is a group {request.group_id} already", param="group_id", code="duplicate")
        group = Group(request=request, number=self._num_groups)
        group.samples = [Sample(group=group, index=index, seed=seed) for index, seed in enumerate(request.seeds)]
        self._groups[request.group_id] = group
        self._num_groups += 1
        self._shares.add_samples(request.job, len(group.samples))
        for sample in group.samples:
            self._enqueue(sample)

    def sample(self, sample_id: SampleId) -> Sample:
        """A sample, to be read only."""
        return self._groups[sample_id.group_id].samples[sample_id.number]

    def cancel(self, group_id: str) -> list[SampleEnd]:
        """End all of a group that has not ended."""
        group = self._groups[group_id]
        return [self._end(sample, SampleState.ABORTED, "cancelled") for sample in self._under_way(group)]

    def refuse(self, sample_id: SampleId) -> list[SampleEnd]:
        """End a sample that engines refuse. One without tokens takes its group along: all have the same prompt."""
        sample = self.sample(sample_id)
        refused = [sample] if sample.tokens else self._under_way(sample.group)
        return [self._end(one, SampleState.ABORTED, "refused") for one in refused]

    def forget(self, group_id: str) -> None:
        """Drop a group that has ended."""
        assert not self._under_way(self._groups[group_id]), group_id
        del self._groups[group_id]

    # -- engines ------------------------------------------------------------------------------------------------------

    def next_for(self, engine: str, free_slots: int, free_tokens: int, most: int | None = None) -> list[Lease]:
        """Work for an engine with so many free slots, and tokens of memory that running samples neither hold nor have
        reserved (`reserved_tokens`); `most` leases, or as many as there are slots.
        """
        capacity = self._capacities.setdefault(engine, self._new_capacity())
        capacity.free_slots, capacity.free_tokens = free_slots, free_tokens
        leases: list[Lease] = []
        cost = self._relative_cost(engine)
        is_left = functools.partial(self._is_left, engine=engine)
        while self._queue and capacity.free_slots > 0 and (most is None or len(leases) < most):
            fits = functools.partial(capacity.fits, room=capacity.room())
            sample = self._queue.take(fits, capacity.could_hold, is_left, cost=cost)
            if sample is None and not capacity.running:
                sample = self._queue.take(self._fits_nowhere, self._fits_nowhere, is_left)
            if sample is None:
                break
            leases.append(self._start(sample, engine, capacity))
        return leases

    def measure(self, lease: Lease, num_tokens: int, seconds: float) -> None:
        """Measure an engine: a lease is about to report tokens, so many seconds after the last ones or its start."""
        sample = self._leases.get(lease.number)
        if sample is None or not num_tokens or seconds <= 0:
            return
        engine, capacity = lease.engine, self._capacities[lease.engine]
        batch, others = len(capacity.running), capacity.num_read - sample.read_mark
        if sample.unread is None:
            decoding_s = max(seconds - others * self.prefill.at(engine), seconds / 4)
            self.decode.measured(engine, num_tokens, decoding_s, batch=batch)
        elif sample.unread == len(lease.prompt_token_ids):  # else its cache may have less than we know, or more
            reading_s = max(seconds - num_tokens * self.decode.at(engine, batch), seconds / 4)
            self.prefill.measured(engine, sample.unread + others, reading_s)
        capacity.num_read += sample.unread or 0
        sample.read_mark, sample.unread = capacity.num_read, None

    def reserved_tokens(self, engine: str) -> int:
        """Tokens of memory that the running samples of an engine may fill before the scheduler is asked again."""
        return self._capacities[engine].reserved_now if engine in self._capacities else 0

    def num_running(self, engine: str) -> int:
        return len(self._capacities[engine].running) if engine in self._capacities else 0

    def free_tokens(self, engine: str) -> int:
        """An engine's KV-cache room in tokens that running samples neither hold nor have reserved, as reported."""
        return self._capacities[engine].free_tokens

    def engine_lost(self, engine: str) -> list[SampleId]:
        """Queue the samples of an engine that died, with the tokens that were reported."""
        capacity = self._capacities.pop(engine, self._new_capacity())
        self.prefill.forget(engine)
        self.decode.forget(engine)
        for group in self._groups.values():
            group.engines.discard(engine)
            for sample in group.samples:
                sample.last_engine = None if sample.last_engine == engine else sample.last_engine
        for sample in capacity.running.values():
            del self._leases[sample.lease]
            self._shares.count_running(sample.job, -1)
            self._to_queue(sample)
        return list(capacity.running)

    # -- samples ------------------------------------------------------------------------------------------------------

    def progressed(self, lease: Lease, tokens: Sequence[int]) -> Verdict:
        """Add new tokens of a lease, but not its last. Returns "stop" where the lease is over: the sample waits again,
        has ended, or is elsewhere.
        """
        sample = self._leases.get(lease.number)
        if sample is None:
            return "stop"
        self._append(sample, tokens)
        assert sample.tokens_left > 0, "the last tokens come with `finished`"
        if len(sample.tokens) < sample.chunk_end:
            return "go on"
        return self._next_chunk(sample, lease.engine)

    def finished(self, lease: Lease, tokens: Sequence[int], reason: Literal["stop", "length"]) -> SampleEnd | None:
        """End a sample with its last tokens; None for a lease that is over."""
        sample = self._leases.get(lease.number)
        if sample is None:
            return None
        self._append(sample, tokens)
        return self._end_finished(sample, reason)

    def turn_ended(self, lease: Lease, tokens: Sequence[int]) -> bool:
        """End a turn with its last tokens, and await the environment, which may reward a sample that has no room left.

        Returns False, and does nothing, where no environment is to answer; call `finished` then.
        """
        sample = self._leases.get(lease.number)
        if sample is None or sample.group.request.turn_tokens is None:
            return False
        self._append(sample, tokens)
        self._detach(sample)
        sample.state, sample.engine = SampleState.AWAITING, None
        sample.turns.append((sample.turn_start, len(sample.tokens)))
        sample.group.num_decoded += len(sample.tokens) - sample.turn_start
        return True

    def observed(self, sample_id: SampleId, tokens: Sequence[int]) -> SampleEnd | None:
        """Add the environment's answer to a sample that awaits it, and queue the sample; it ends where nothing more has
        room.
        """
        sample = self.sample(sample_id)
        assert sample.state is SampleState.AWAITING, sample_id
        room = sample.group.request.max_tokens - len(sample.tokens)
        self._append(sample, tokens[:room])
        sample.group.num_said += len(tokens[:room])
        sample.turn_start = len(sample.tokens)
        if len(tokens) >= room:
            return self._end_finished(sample, "length")
        self._to_queue(sample)
        return None

    def done(self, sample_id: SampleId) -> SampleEnd:
        """End a sample that awaits its environment, because the environment says so."""
        sample = self.sample(sample_id)
        assert sample.state is SampleState.AWAITING, sample_id
        return self._end_finished(sample, "done" if len(sample.tokens) < sample.group.request.max_tokens else "length")

    def failed(self, sample_id: SampleId) -> SampleEnd:
        """Abort a sample that awaits its environment, because the environment has failed."""
        sample = self.sample(sample_id)
        assert sample.state is SampleState.AWAITING, sample_id
        return self._end(sample, SampleState.ABORTED, "environment")

    def redundant(self, group_id: str) -> list[SampleEnd]:
        """End what has not ended of a group of which enough samples have finished."""
        group = self._groups[group_id]
        needed = group.request.num_needed
        if needed is None or group.num_finished < needed:
            return []
        return [self._end(sample, SampleState.ABORTED, "redundant") for sample in self._under_way(group)]

    def preempted(self, lease: Lease, *, has_failed: bool = False) -> None:
        """Queue a sample again that its engine dropped, for want of memory or because it failed there."""
        sample = self._leases.get(lease.number)
        if sample is not None:
            self._pause(sample)
            sample.failed_at = lease.engine if has_failed else sample.failed_at

    # -- versions and time --------------------------------------------------------------------------------------------

    def announce_target(self, version: int, engines: Iterable[str]) -> list[SampleEnd]:
        """Note that these engines serve a target; end samples that are too old for it, with their tokens or without, as
        their group asks. A version that is not newer changes nothing.
        """
        for engine in engines:
            capacity = self._capacities.setdefault(engine, self._new_capacity())
            capacity.target_version = max(capacity.target_version, version)
        return self._move_target(version)

    def target_seen(self, lease: Lease, version: int) -> list[SampleEnd]:
        """Note the target version of tokens that a lease is about to report, and end the samples that it makes too old,
        the lease's own too, without these tokens.

        An engine may decode under a new target before that is announced, and before the others do.
        """
        sample = self._leases.get(lease.number)
        if sample is None:
            return []
        capacity = self._capacities[lease.engine]
        capacity.target_version = max(capacity.target_version, version)
        if not sample.tokens:
            sample.target_version = max(version, lease.target_version)
        return self._move_target(version)

    def is_behind(self, lease: Lease, version: int) -> bool:
        """Whether tokens of this target version are too old for a lease's sample, which is not: an engine had sent them
        before it moved, or has yet to move. The sample can go on elsewhere without them.
        """
        sample = self._leases.get(lease.number)
        limit = None if sample is None else sample.group.request.max_staleness
        return limit is not None and self.target_version - max(version, lease.target_version) > limit

    def _move_target(self, version: int) -> list[SampleEnd]:
        if version <= self.target_version:
            return []
        self.target_version = version
        # What has no tokens yet may still get new ones (`is_behind`).
        old = [sample for sample in self._all_under_way() if sample.tokens and is_stale(sample, version)]
        return [self._end_stale(sample) for sample in old]

    def expire(self, now_s: float) -> list[SampleEnd]:
        """End what is past its deadline."""
        late = [
            sample
            for sample in self._all_under_way()
            if sample.group.request.deadline_s is not None and sample.group.request.deadline_s <= now_s
        ]
        return [self._end(sample, SampleState.ABORTED, "deadline") for sample in late]

    # -- accounts -----------------------------------------------------------------------------------------------------

    def counts(self) -> Counter[SampleState]:
        return Counter(sample.state for group in self._groups.values() for sample in group.samples)

    def check(self) -> None:
        """Assert that every sample is in one place, the one that its state names."""
        running = {key: name for name, capacity in self._capacities.items() for key in capacity.running}
        assert len(running) == sum(len(capacity.running) for capacity in self._capacities.values()), (
            "a sample runs twice"
        )
        assert len(running) == len(self._leases), "a lease has no running sample"
        for capacity in self._capacities.values():
            assert capacity.reserved_now == sum(map(capacity.reserved_tokens, capacity.running.values())), (
                "memory is lost"
            )
        waiting = 0
        for group in self._groups.values():
            for sample in group.samples:
                is_waiting = sample.state in (SampleState.WAITING, SampleState.PAUSED)
                waiting += is_waiting
                assert is_waiting == (sample in self._queue), sample.sample_id
                is_running = sample.state is SampleState.RUNNING
                assert (sample.engine if is_running else None) == running.get(sample.sample_id), sample.sample_id
        assert waiting == len(self._queue), "a queued sample belongs to no group"

    # -- inside -------------------------------------------------------------------------------------------------------

    @staticmethod
    def _under_way(group: Group) -> list[Sample]:
        return [sample for sample in group.samples if not sample.state.has_ended]

    def _all_under_way(self) -> Iterable[Sample]:
        return (sample for group in self._groups.values() for sample in self._under_way(group))

    def _append(self, sample: Sample, tokens: Sequence[int]) -> None:
        request = sample.group.request
        self._shares.charge(request.job, len(tokens), request.weight)
        sample.tokens.extend(tokens)
        sample.failed_at = None
        most = request.max_tokens
        assert len(sample.tokens) <= most, f"{sample.sample_id} got more than its {most} tokens"

    def _new_capacity(self) -> EngineCapacity:
        return EngineCapacity(order=self._policy.order, chunk_tokens=self._policy.chunk_tokens)

    def _start(self, sample: Sample, engine: str, capacity: EngineCapacity) -> Lease:
        capacity.add(sample)
        sample.unread, sample.read_mark = sample.unread_at(engine), capacity.num_read
        self.num_read_again += sample.context if sample.tokens and sample.last_engine != engine else 0
        sample.state, sample.engine = SampleState.RUNNING, engine
        sample.last_engine = engine
        sample.group.engines.add(engine)
        sample.lease = next(self._lease_numbers)
        self._leases[sample.lease] = sample
        self._shares.count_running(sample.job, 1)
        served = capacity.target_version
        if not sample.tokens:
            sample.target_version = served
        request = sample.group.request
        return Lease(
            sample_id=sample.sample_id,
            engine=engine,
            number=sample.lease,
            prompt_token_ids=(*request.prompt_token_ids, *sample.tokens),
            num_generated=len(sample.tokens) - sample.turn_start,
            seed=sample.seed,
            max_tokens=sample.tokens_left,
            target_version=served,
        )

    def _next_chunk(self, sample: Sample, engine: str) -> Verdict:
        capacity, waiting = self._capacities[engine], self._queue.first()
        if waiting and waiting.failed_at != engine:
            moves = self._displaces(waiting, sample, capacity)
        else:
            moves = self._ends_sooner_elsewhere(sample, engine)
        is_alone = len(capacity.running) == 1
        if not moves and capacity.extend(sample, in_any_case=is_alone and self._fits_nowhere(sample)):
            return "go on"
        self._pause(sample)
        return "stop"

    def _fits_nowhere(self, sample: Sample) -> bool:
        """Whether no engine has the memory for a sample's next chunk. It would wait for ever, so it runs where nothing
        else does; the engine ends or refuses it where its memory does.
        """
        return not any(each.could_hold(sample) for each in self._capacities.values())

    def _displaces(self, waiting: Sample, running: Sample, capacity: EngineCapacity) -> bool:
        """Whether a running sample gives its slot or memory to a waiting one; not where enough is free.

        For memory several may have to leave, and nothing else begins until then: only a more urgent sample is worth
        that.
        """
        if not capacity.could_hold(waiting):
            return False
        if capacity.free_slots == 0:
            if waiting.job != running.job and urgency(waiting) == urgency(running):
                jobs = ((one.job, one.group.request.weight) for one in (waiting, running))
                return self._shares.displaces(*jobs)
            return self._policy.order.displaces(waiting, running)
        return urgency(waiting) < urgency(running) and not capacity.fits(waiting, capacity.room())

    def _relative_cost(self, engine: str) -> Callable[[Sample], int]:
        """A function of a sample: how much of this engine's time it takes, relative to others. Below 0 it is better
        off here. Rounded, so that about equal samples keep their order.
        """
        if len(self._capacities) == 1:
            return lambda _: 0
        capacity = self._capacities[engine]
        batch = max(len(capacity.running) + capacity.free_slots, 1)
        here, pool = ((self.prefill.at(name), self.decode.at(name, batch) / batch) for name in (engine, None))

        def cost(sample: Sample) -> int:
            reads, decodes = self._work_left(sample)
            this = (sample.unread_at(engine) + reads) * here[0] + decodes * here[1]
            other = (sample.unread_elsewhere(engine) + reads) * pool[0] + decodes * pool[1]
            return round(_STEPS * math.log2(this / other))

        return cost

    def _is_left(self, sample: Sample, engine: str) -> bool:
        """Whether a sample waits for another engine: this one has failed on it, or would end it clearly later."""
        if sample.failed_at == engine:
            others = [each for name, each in self._capacities.items() if name != engine]
            return any((each.running or each.free_slots > 0) and each.could_hold(sample) for each in others)
        return self._ends_sooner_elsewhere(sample, engine)

    def _ends_sooner_elsewhere(self, sample: Sample, engine: str) -> bool:
        """Whether an engine with a free slot would end a sample clearly sooner, all that it has to read included."""
        # One that has failed on it would leave it to this engine.
        free = [
            (name, capacity)
            for name, capacity in self._capacities.items()
            if capacity.free_slots > 0 and name not in (engine, sample.failed_at)
        ]
        most_s = _GAIN * self._expected_s(sample, engine) if free else 0.0
        return any(
            self._expected_s(sample, name) < most_s and capacity.fits(sample, capacity.room())
            for name, capacity in free
        )

    def _expected_s(self, sample: Sample, engine: str) -> float:
        """Seconds until a sample has ended, if it goes on at an engine with a slot for it."""
        unread = 0 if sample.engine == engine else sample.unread_at(engine)
        batch = len(self._capacities[engine].running) + (sample.engine != engine)
        reads, decodes = self._work_left(sample)
        return (unread + reads) * self.prefill.at(engine) + decodes * self.decode.at(engine, batch)

    def _work_left(self, sample: Sample) -> tuple[float, float]:
        """Tokens that a sample will yet read of its environment, and decode: as its group's finished ones, or those of
        its job, else as many again as it has. (`Order.remaining` is the most that it may need.)
        """
        group, num = sample.group, len(sample.tokens)
        most = group.request.max_tokens - num
        length = group.longest_finished or self._mean_lengths.get(sample.job, math.inf)
        left = max(min(length - num if length > num else num, most), 1.0)
        said = group.num_said / (group.num_said + group.num_decoded + 1)
        return left * said, left * (1 - said)

    def _pause(self, sample: Sample) -> None:
        self._detach(sample)
        self._to_queue(sample)

    def _detach(self, sample: Sample) -> None:
        """Take a sample off the engine on which it runs."""
        engine = sample.engine
        assert engine is not None
        self._capacities[engine].remove(sample)
        sample.num_seen = len(sample.tokens)
        del self._leases[sample.lease]
        self._shares.count_running(sample.job, -1)

    def _to_queue(self, sample: Sample) -> None:
        sample.state = SampleState.PAUSED if sample.tokens else SampleState.WAITING
        sample.engine = None
        self._enqueue(sample)

    def _enqueue(self, sample: Sample) -> None:
        reads, decodes = self._work_left(sample)
        shape = round(math.log2((sample.context + reads) / decodes))
        self._queue.put(sample, self._policy.order.rank(sample), max(-_MAX_SHAPE, min(shape, _MAX_SHAPE)))

    def _end_stale(self, sample: Sample) -> SampleEnd:
        returns = sample.group.request.when_stale == "return"
        return self._end(sample, SampleState.STALE if returns else SampleState.ABORTED, "stale")

    def _end_finished(self, sample: Sample, reason: EndReason) -> SampleEnd:
        ended = self._end(sample, SampleState.FINISHED, reason)
        group = sample.group
        group.num_finished += 1
        if len(self._mean_lengths) > MOST_JOBS:
            self._mean_lengths.clear()
        mean = self._mean_lengths.setdefault(sample.job, len(sample.tokens))
        self._mean_lengths[sample.job] = mean + _NEWEST * (len(sample.tokens) - mean)
        if group.longest_finished is None or len(sample.tokens) > group.longest_finished:
            group.longest_finished = len(sample.tokens)
            for sibling in group.samples:
                if sibling in self._queue:
                    self._enqueue(sibling)
        return ended

    def _end(self, sample: Sample, state: SampleState, reason: EndReason) -> SampleEnd:
        stop = None
        if sample.state is SampleState.RUNNING:
            self._detach(sample)
            stop = None if state is SampleState.FINISHED else sample.lease
        self._queue.discard(sample)
        self._shares.sample_ended(sample.job)
        sample.state, sample.engine = state, None
        return SampleEnd(sample_id=sample.sample_id, state=state, reason=reason, stop=stop)


def is_stale(sample: Sample, newest_version: int) -> bool:
    """Whether a sample was begun more than α versions ago; one that was never begun is not old."""
    limit = sample.group.request.max_staleness
    return limit is not None and sample.target_version is not None and newest_version - sample.target_version > limit


_MAX_SHAPE = 4
"""A shape is the logarithm of what is read over what is decoded, from minus to plus this."""
_NEWEST = 0.02
"""Weight of a sample's length in the mean of its job."""
_STEPS = 7
"""Steps of `_relative_cost` in a factor of 2."""
_GAIN = 0.8
"""A sample moves to an engine that needs at most this share of the time."""

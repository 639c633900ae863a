"""Whatever engines, callers and trainers do, in any order: nothing is lost, nothing is generated twice."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from serving.rollout.order import ContextAware, Fifo
from serving.rollout.samples import GroupRequest, Lease, SampleEnd, SampleId, SampleState
from serving.rollout.scheduler import Policy, Scheduler

ENGINES = ("x", "y", "z")
NAMES = ("a", "b", "c", "d", "e", "f")
SLOTS, MEMORY, PROMPT = 3, 120, 5
POLICIES = {
    "fifo": Policy(order=Fifo(), chunk_tokens=8),
    "context-aware": Policy(order=ContextAware(), chunk_tokens=8),
}


class SchedulerMachine(RuleBasedStateMachine):
    """Engines generate the numbers 0, 1, 2, … of each sample. The model knows every lease that was ever given, those
    that engines work on, and what each sample reported.
    """

    policy = POLICIES["context-aware"]

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(self.policy)
        self.requests: dict[str, GroupRequest] = {}
        self.given: list[Lease] = []
        self.running: dict[SampleId, Lease] = {}
        self.reported: dict[SampleId, list[int]] = {}
        self.ended: dict[SampleId, SampleEnd] = {}
        self.turn_starts: dict[SampleId, int] = {}
        self.awaiting: set[SampleId] = set()
        self.version, self.now_s = 0, 0.0

    # -- what callers do ----------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.requests) < len(NAMES))
    @rule(
        samples=st.integers(1, 8),
        max_tokens=st.integers(1, 40),
        priority=st.integers(0, 1),
        due_s=st.none() | st.integers(1, 4),
        staleness=st.none() | st.integers(0, 2),
        when_stale=st.sampled_from(["return", "abort"]),
        turn=st.none() | st.integers(1, 12),
        redundant=st.integers(0, 3),
        job=st.sampled_from(["", "a", "b"]),
        weight=st.sampled_from([0.5, 1.0, 4.0]),
        prompt=st.sampled_from([PROMPT, PROMPT, MEMORY - 10, MEMORY + 1]),
    )
    def submit(  # type: ignore[no-untyped-def]
        self, samples, max_tokens, priority, due_s, staleness, when_stale, turn, redundant, job, weight, prompt
    ) -> None:
        name = next(name for name in NAMES if name not in self.requests)  # also of one that was forgotten
        request = GroupRequest(
            group_id=name,
            prompt_token_ids=(0,) * prompt,
            seeds=tuple(range(samples)),
            max_tokens=max_tokens,
            priority=priority,
            deadline_s=None if due_s is None else self.now_s + due_s,
            max_staleness=staleness,
            when_stale=when_stale,
            turn_tokens=turn,
            num_needed=max(samples - redundant, 1),
            job=job,
            weight=weight,
        )
        self.scheduler.submit(request)
        self.requests[name] = request
        self.reported |= {SampleId(name, index): [] for index in range(samples)}

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.over(self.scheduler.cancel(name))
        self.scheduler.forget(name)
        del self.requests[name]
        for sample_id in [key for key in self.reported if key.group_id == name]:
            assert sample_id in self.ended
            del self.reported[sample_id], self.ended[sample_id]
            self.turn_starts.pop(sample_id, None)

    @rule()
    def new_target(self) -> None:
        self.version += 1
        self.over(self.scheduler.announce_target(self.version, ENGINES))

    @rule()
    def time_passes(self) -> None:
        self.now_s += 1
        self.over(self.scheduler.expire(self.now_s))

    # -- what engines do ----------------------------------------------------------------------------------------------

    @rule(engine=st.sampled_from(ENGINES))
    def ask(self, engine: str) -> None:
        mine = [lease for lease in self.running.values() if lease.engine == engine]
        free = MEMORY - (self.scheduler.reserved_tokens(engine) if mine else 0)
        leases = self.scheduler.next_for(engine, SLOTS - len(mine), free)
        assert len(leases) <= SLOTS - len(mine)
        for lease in leases:
            assert lease.sample_id not in self.running, "it runs already"
            assert lease.sample_id not in self.ended, "it has ended"
            known = self.reported[lease.sample_id]
            assert lease.prompt_token_ids == (*self.requests[lease.sample_id.group_id].prompt_token_ids, *known)
            assert lease.num_generated == len(known) - self.turn_starts.get(lease.sample_id, 0)
            self.running[lease.sample_id] = lease
            self.given.append(lease)
        if mine or leases:
            assert self.scheduler.reserved_tokens(engine) <= MEMORY or len(mine) + len(leases) == 1

    def left(self, lease: Lease) -> int:
        """Tokens that this lease may have yet."""
        begun = self.turn_starts.get(lease.sample_id, 0)
        return lease.max_tokens + lease.num_generated - (len(self.reported[lease.sample_id]) - begun)

    def lease(self, data: st.DataObject) -> Lease:
        return self.running[data.draw(st.sampled_from(sorted(self.running)))]

    def more(self, lease: Lease, count: int) -> tuple[int, ...]:
        known = self.reported[lease.sample_id]
        tokens = tuple(range(len(known), len(known) + count))
        known.extend(tokens)
        return tokens

    @rule(count=st.integers(1, 12))
    def work(self, count: int) -> None:
        """A round of every engine: beyond the end of a chunk where it ends there, but not to the end of a sample."""
        for engine in ENGINES:
            self.ask(engine)
        for lease in list(self.running.values()):
            if self.scheduler.progressed(lease, self.more(lease, min(count, self.left(lease) - 1))) == "stop":
                del self.running[lease.sample_id]
            self.everything_is_accounted_for()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 8))
    def finish(self, data: st.DataObject, count: int) -> None:
        lease = self.lease(data)
        self.end_lease(lease, min(count, self.left(lease)))

    def end_lease(self, lease: Lease, count: int) -> None:
        left, tokens = self.left(lease), self.more(lease, count)
        request = self.requests[lease.sample_id.group_id]
        if self.scheduler.turn_ended(lease, tokens):
            assert request.turn_tokens is not None
            assert count <= request.turn_tokens
            del self.running[lease.sample_id]
            self.awaiting.add(lease.sample_id)
            return
        assert request.turn_tokens is None
        ended = self.scheduler.finished(lease, tokens, "length" if count == left else "stop")
        assert ended is not None
        self.over([ended])
        self.over(self.scheduler.redundant(lease.sample_id.group_id))

    @precondition(lambda self: self.awaiting)
    @rule(data=st.data(), says=st.integers(0, 10) | st.sampled_from(["done", "failed"]))
    def answer(self, data: st.DataObject, says: int | str) -> None:
        """An environment, whose samples hold no slot meanwhile."""
        sample_id = data.draw(st.sampled_from(sorted(self.awaiting)))
        self.awaiting.discard(sample_id)
        if says == "done":
            self.over([self.scheduler.done(sample_id)])
        elif says == "failed":
            self.over([self.scheduler.failed(sample_id)])
        else:
            assert isinstance(says, int)
            known = self.reported[sample_id]
            tokens = tuple(range(len(known), len(known) + says))
            room = self.requests[sample_id.group_id].max_tokens - len(known)
            known.extend(tokens[:room])
            ended = self.scheduler.observed(sample_id, tokens)
            assert (ended is not None) == (says >= room)
            self.turn_starts[sample_id] = len(known)
            self.over([] if ended is None else [ended])
        self.over(self.scheduler.redundant(sample_id.group_id))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), has_failed=st.booleans())
    def preempt(self, data: st.DataObject, has_failed: bool) -> None:
        lease = self.lease(data)
        self.scheduler.preempted(lease, has_failed=has_failed)
        del self.running[lease.sample_id]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        lease = self.lease(data)
        refused = self.scheduler.refuse(lease.sample_id)
        assert lease.sample_id in [one.sample_id for one in refused]
        assert not self.reported[lease.sample_id] or len(refused) == 1
        self.over(refused)

    @rule(engine=st.sampled_from(ENGINES))
    def die(self, engine: str) -> None:
        lost = self.scheduler.engine_lost(engine)
        assert sorted(lost) == sorted(key for key, lease in self.running.items() if lease.engine == engine)
        for sample_id in lost:
            del self.running[sample_id]

    @rule()
    def speak_from_the_grave(self) -> None:
        """Reports of leases that are over change nothing."""
        for lease in self.given:
            if self.running.get(lease.sample_id) is not lease:
                assert self.scheduler.progressed(lease, (99,)) == "stop"
                assert self.scheduler.finished(lease, (99,), "stop") is None
                self.scheduler.preempted(lease)

    def over(self, ended: list[SampleEnd]) -> None:
        for one in ended:
            assert one.sample_id not in self.ended, "it ended twice"
            self.ended[one.sample_id] = one
            self.awaiting.discard(one.sample_id)
            lease = self.running.pop(one.sample_id, None)
            if one.state is not SampleState.FINISHED:
                assert one.stop == (None if lease is None else lease.number)

    # -- what holds at any time ---------------------------------------------------------------------------------------

    @invariant()
    def everything_is_accounted_for(self) -> None:
        self.scheduler.check()
        assert sum(self.scheduler.counts().values()) == len(self.reported)
        for sample_id, tokens in self.reported.items():
            sample = self.scheduler.sample(sample_id)
            assert sample.tokens == tokens
            assert (sample.state is SampleState.RUNNING) == (sample_id in self.running)
            assert (sample.state is SampleState.AWAITING) == (sample_id in self.awaiting)
            assert all(start < end for start, end in sample.turns) or not sample.turns
            assert sample.state.has_ended == (sample_id in self.ended)
        for engine in {lease.engine for lease in self.running.values()}:
            assert self.scheduler.free_tokens(engine) + self.scheduler.reserved_tokens(engine) == MEMORY

    def teardown(self) -> None:
        """Whatever happened, one engine that goes on brings everything that has not ended to its end."""
        for engine in ENGINES:
            self.die(engine)
        while True:
            for sample_id in sorted(self.awaiting):
                if sample_id in self.awaiting:
                    self.awaiting.discard(sample_id)
                    self.over([self.scheduler.done(sample_id)])
                    self.over(self.scheduler.redundant(sample_id.group_id))
            leases = self.scheduler.next_for("w", SLOTS, MEMORY)
            if not leases:
                break
            for lease in leases:
                if lease.sample_id not in self.ended:
                    self.running[lease.sample_id] = lease
            for lease in leases:
                if lease.sample_id in self.running:
                    self.end_lease(lease, self.left(lease))
        assert set(self.reported) == set(self.ended)
        self.everything_is_accounted_for()


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_lost_and_nothing_generated_twice(policy: str) -> None:
    machine = type("Machine", (SchedulerMachine,), {"policy": POLICIES[policy]})
    run_state_machine_as_test(machine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))

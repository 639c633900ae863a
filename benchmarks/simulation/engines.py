"""Simulated engines and clock for benchmarks/rollout_sim.py, with the real scheduler and a table of measured costs.

Between two events that matter to the scheduler an engine runs some rounds of the same batch. A round takes what the
table says for so many requests, tokens each and keys; every request gets the tokens that a verification commits on
average, in whole numbers with the rest carried on. A sample that comes to an engine is read there first, while the
engine's others wait, as in the local engine. An engine keeps the contexts that it used last, up to half of its memory:
it reads only what is new of a sample that comes back, and the prompt of a group once.

Engines may be slower than the table says, each by its own factors for prefill and decoding. A sample may be a
conversation, whose environment answers after a while. A job may have steps, with time to train between them.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import json
import random
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.simulation.draft_depth import Claim, best_depth, committed_tokens
from serving.rollout.engine_costs import Cost
from serving.rollout.samples import GroupRequest, Lease, SampleId
from serving.rollout.scheduler import Policy, Scheduler

MAX_ROUNDS = 8
"""Most rounds before a busy engine fills its free slots and chooses its draft depths again."""


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Suffix proposals at one moment; length 0: none."""

    share: float
    length: float
    acceptance: float


class Costs:
    """Seconds and acceptance from the table of measured costs (`rollout_costs.json`), linear between its points."""

    def __init__(self, table: dict[str, Any]) -> None:
        self._widths = [float(width) for width in table["widths"]]
        self._contexts = sorted(float(context) for context in table["round_ms"])
        by_context = [table["round_ms"][f"{context:.0f}"] for context in self._contexts]
        self._batches = sorted(float(batch) for batch in by_context[0])
        self._rounds_s = [[[ms / 1000 for ms in rows[f"{b:.0f}"]] for b in self._batches] for rows in by_context]
        self._prefill_s: list[float] = [
            table["prefill_ms_a_token"][f"{context:.0f}"] / 1000 for context in self._contexts
        ]
        self._siblings = sorted(int(count) for count in table["suffixes"])
        self._chains = [
            [Chain(**each) for each in table["suffixes"][str(count)]["classes"]] for count in self._siblings
        ]
        self.propose_s = table["propose_us"] / 1e6
        self._known: dict[tuple[int, int], tuple[float, float]] = {}

    @classmethod
    def read(cls, path: Path) -> Costs:
        return cls(json.loads(path.read_text()))

    def round_s(self, batch: int, width: int, context: float) -> float:
        """A verification of `width` tokens for each of `batch` requests of this mean context."""
        if (batch, width) not in self._known:
            ends = [
                _linear(self._batches, [_linear(self._widths, row, width) for row in rows], batch)
                for rows in (self._rounds_s[0], self._rounds_s[-1])
            ]
            self._known[batch, width] = ends[0], ends[1]
        low, high = self._known[batch, width]
        return low + self._place(context) * (high - low)

    def read_s(self, num_tokens: int) -> float:
        """Seconds to prefill a context: the cost of a token at its middle, times the number of tokens."""
        low, high = self._prefill_s[0], self._prefill_s[-1]
        return num_tokens * (low + self._place(num_tokens / 2) * (high - low))

    def draw_chain(self, siblings: int, rng: random.Random) -> Chain:
        """Draw the suffix proposals of a request with so many finished siblings."""
        right = bisect_left(self._siblings, siblings)
        if 0 < right < len(self._siblings):
            low, high = self._siblings[right - 1], self._siblings[right]
            right -= rng.random() * (high - low) > siblings - low
        chains = self._chains[min(right, len(self._chains) - 1)]
        return rng.choices(chains, [chain.share for chain in chains])[0]

    def _place(self, context: float) -> float:
        low, high = self._contexts[0], self._contexts[-1]
        return max((context - low) / (high - low), -low / (high - low))


def _linear(points: Sequence[float], values: Sequence[float], at: float) -> float:
    """Linear interpolation between the points; beyond them the value of the last."""
    right = bisect_left(points, at)
    if right == 0:
        return values[0]
    if right == len(points):
        return values[-1]
    left = right - 1
    weight = (at - points[left]) / (points[right] - points[left])
    return values[left] + weight * (values[right] - values[left])


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """How the simulated engines draft. Depths are those of benchmarks/simulation/draft_depth.py."""

    text: Literal["engine", "pool"] = "pool"
    """What the suffix index holds beside the request's own text: the group's samples that have ended on this engine, or
    on any.
    """


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Times of an engine as multiples of those in the table."""

    prefill: float = 1.0
    decode: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The simulated machines and their settings."""

    costs: Costs
    num_engines: int
    slots: int
    memory_tokens: int
    drafting: Drafting | None = None
    speeds: Sequence[Speed] = (Speed(),)
    """Of the engines in turn."""
    is_blind: bool = False
    """Whether all engines count as equally fast, with the mean costs that were measured."""


@dataclass(frozen=True, kw_only=True)
class TurnPlan:
    """One turn of the model, and what its environment says then: known to the simulation, not to the scheduler."""

    length: int
    latency_s: float = 0.0
    observation: int = 0
    """Tokens."""


@dataclass(kw_only=True)
class Job:
    """Steps of a job, each submitted once the one before has ended and `train_s` have passed."""

    steps: list[list[GroupRequest]]
    turns: dict[SampleId, Sequence[TurnPlan]]
    train_s: float = 0.0
    begins_s: float = 0.0
    """When its first step is submitted."""

    @property
    def num_samples(self) -> int:
        return sum(len(group.seeds) for step in self.steps for group in step)


@dataclass
class Outcome:
    """Times and counts of a simulated rollout."""

    num_tokens: int = 0
    """Tokens that the model has decoded."""
    ends_s: list[float] = field(default_factory=list)
    """End of every sample, in order."""
    tokens_read: int = 0
    """Prefilled tokens: prompts, and contexts of samples that moved."""

    def add(self, other: Outcome) -> None:
        """Add another rollout that ran at the same time on other engines."""
        self.num_tokens += other.num_tokens
        self.tokens_read += other.tokens_read
        self.ends_s = sorted(self.ends_s + other.ends_s)

    @property
    def makespan_s(self) -> float:
        return self.ends_s[-1]

    @property
    def tokens_a_second(self) -> float:
        return self.num_tokens / self.makespan_s

    @property
    def tail_s(self) -> float:
        """From the end of nine tenths of the samples to the end of the last."""
        return self.makespan_s - self.ends_s[(9 * len(self.ends_s) + 9) // 10 - 1]


@dataclass
class _Run:
    lease: Lease
    length: int
    """Tokens of the whole turn: known to the simulation, not to the scheduler."""
    done: int
    """Tokens of this turn."""
    boundary: int
    """Number of tokens at which the engine reports to the scheduler: the end of the turn or of a chunk."""
    unread: int
    """Tokens that the engine must prefill before the next round."""
    carry: float = 0.0
    depth: int = 0
    committed: float = 1.0
    """Tokens that a round commits."""


class _Cache:
    """Contexts that an engine still has, the one used last at the end."""

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens, self._num_tokens = most_tokens, 0
        self._kept: OrderedDict[str | SampleId, int] = OrderedDict()

    def use(self, key: str | SampleId) -> int:
        """Tokens that are kept of a group's prompt or of a sample."""
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key, 0)

    def keep(self, key: str | SampleId, num_tokens: int) -> None:
        self._num_tokens += num_tokens - self._kept.pop(key, 0)
        self._kept[key] = num_tokens
        while self._num_tokens > self._most_tokens:
            self._num_tokens -= self._kept.popitem(last=False)[1]


class _Blind(Cost):
    """The mean cost for all engines."""

    def measured(self, engine: str, num_tokens: int, seconds: float, *, batch: int = 0) -> None:
        super().measured("", num_tokens, seconds, batch=batch)


class _World:
    """What the engines of a simulation share: the scheduler, the plans, the clock's events."""

    def __init__(self, jobs: Sequence[Job], policy: Policy) -> None:
        self.scheduler, self.outcome = Scheduler(policy), Outcome()
        self._steps = {id(job): iter(job.steps) for job in jobs}
        self._job_of: dict[str, Job] = {group.group_id: job for job in jobs for step in job.steps for group in step}
        self._num_left: dict[int, int] = {}
        self.now_s = 0.0
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        for job in jobs:
            first = next(self._steps[id(job)])
            self._num_left[id(job)] = sum(len(group.seeds) for group in first)
            self.at(job.begins_s, functools.partial(self._submit, first))

    def at(self, time_s: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), event))

    def run_next(self) -> bool:
        """Run the next event; False where there is none."""
        if not self._events:
            return False
        self.now_s, _, event = heapq.heappop(self._events)
        event(self.now_s)
        return True

    def turn_of(self, sample_id: SampleId) -> TurnPlan:
        """The plan of the turn that a sample is in."""
        plans = self._job_of[sample_id.group_id].turns[sample_id]
        return plans[len(self.scheduler.sample(sample_id).turns)]

    def end_turn(self, lease: Lease, num_tokens: int, now_s: float) -> bool:
        """Report the last tokens of a turn; returns whether it was the sample's last. Else its environment answers
        later.
        """
        sample_id = lease.sample_id
        plan, sample = self.turn_of(sample_id), self.scheduler.sample(sample_id)
        is_last = len(sample.turns) + 1 == len(self._job_of[sample_id.group_id].turns[sample_id])
        self.outcome.num_tokens += plan.length
        tokens = (0,) * num_tokens
        if not is_last:
            assert self.scheduler.turn_ended(lease, tokens), "the limit has no room for the conversation"
            self.at(now_s + plan.latency_s, lambda _: self._observe(sample_id, plan.observation))
            return False
        is_cut = len(sample.tokens) + num_tokens == sample.group.request.max_tokens
        self.scheduler.finished(lease, tokens, "length" if is_cut else "stop")
        job = self._job_of[sample_id.group_id]
        self.outcome.ends_s.append(now_s)
        self._num_left[id(job)] -= 1
        if not self._num_left[id(job)] and (step := next(self._steps[id(job)], None)) is not None:
            self._num_left[id(job)] = sum(len(group.seeds) for group in step)
            self.at(now_s + job.train_s, functools.partial(self._submit, step))
        return True

    def _submit(self, step: Sequence[GroupRequest], _now_s: float) -> None:
        for group in step:
            self.scheduler.submit(group)

    def _observe(self, sample_id: SampleId, num_tokens: int) -> None:
        assert self.scheduler.observed(sample_id, (0,) * num_tokens) is None


class _Engine:
    """One simulated engine: advances its running samples from event to event."""

    def __init__(self, number: int, setup: Setup, world: _World) -> None:
        self.name, self._setup, self._world = f"engine-{number}", setup, world
        self._scheduler, self._speed = world.scheduler, setup.speeds[number % len(setup.speeds)]
        self.runs: list[_Run] = []
        self._cache = _Cache(setup.memory_tokens // 2)
        self._num_rounds = 0
        self._reading_s = self._decoding_s = 0.0
        self._num_ended: Counter[str] = Counter()
        """Samples that ended here, by group."""
        self._rng = random.Random(self.name)

    def go_on(self, now_s: float) -> None:
        """Take work for free slots, and begin the next rounds if there is any."""
        self._admit()
        if self.runs:
            self._world.at(now_s + self._start(), self._finish)

    def _admit(self) -> None:
        free_slots = self._setup.slots - len(self.runs)
        if free_slots:
            reserved = self._scheduler.reserved_tokens(self.name) if self.runs else 0
            leases = self._scheduler.next_for(self.name, free_slots, self._setup.memory_tokens - reserved)
            for lease in leases:
                self._begin(lease)

    def _begin(self, lease: Lease) -> None:
        length = self._world.turn_of(lease.sample_id).length
        prompt = len(self._scheduler.sample(lease.sample_id).group.request.prompt_token_ids)
        cached = max(self._cache.use(lease.sample_id.group_id), self._cache.use(lease.sample_id))
        self._cache.keep(lease.sample_id.group_id, prompt)
        run = _Run(lease, length, lease.num_generated, length, unread=len(lease.prompt_token_ids) - cached)
        self._set_boundary(run)
        self.runs.append(run)

    def _set_boundary(self, run: _Run) -> None:
        sample = self._scheduler.sample(run.lease.sample_id)
        run.boundary = min(sample.chunk_end - sample.turn_start, run.length)

    def _start(self) -> float:
        """Begin the next rounds; returns the seconds until they end."""
        self._choose_depths()
        costs = self._setup.costs
        self._reading_s = self._speed.prefill * sum(costs.read_s(run.unread) for run in self.runs)
        self._world.outcome.tokens_read += sum(run.unread for run in self.runs)
        batch, width = len(self.runs), max(run.depth for run in self.runs) + 1
        needed = min(-(-(run.boundary - run.done - run.carry) // run.committed) for run in self.runs)
        self._num_rounds = max(1, min(int(needed), MAX_ROUNDS))
        context = sum(self._context(run) for run in self.runs) / batch
        drafting_s = batch * costs.propose_s if width > 1 else 0.0
        round_s = self._speed.decode * costs.round_s(batch, width, context) + drafting_s
        self._decoding_s = self._num_rounds * round_s
        return self._reading_s + self._decoding_s

    def _finish(self, now_s: float) -> None:
        """End the rounds, report to the scheduler and go on."""
        for run in list(self.runs):
            exact = run.carry + self._num_rounds * run.committed
            tokens = min(int(exact), run.boundary - run.done)
            run.carry = exact - int(exact)
            # As a driver sees it: the first token comes when all has been read, and then the others do.
            first = 1 if run.unread and tokens > 1 else 0
            self._scheduler.measure(run.lease, first, self._reading_s + self._decoding_s / max(tokens, 1))
            self._scheduler.measure(run.lease, tokens - first, self._decoding_s + (0.0 if first else self._reading_s))
            run.unread = 0
            run.done += tokens
            if run.done == run.length:
                self._num_ended[run.lease.sample_id.group_id] += self._world.end_turn(run.lease, tokens, now_s)
                self._leave(run)
            elif self._scheduler.progressed(run.lease, (0,) * tokens) == "stop":
                self._leave(run)
            else:
                self._set_boundary(run)
        self.go_on(now_s)

    def _leave(self, run: _Run) -> None:
        self._cache.keep(run.lease.sample_id, self._context(run))
        self.runs.remove(run)

    def _context(self, run: _Run) -> int:
        return len(run.lease.prompt_token_ids) - run.lease.num_generated + run.done

    def _choose_depths(self) -> None:
        drafting, costs = self._setup.drafting, self._setup.costs
        if drafting is None:
            return
        claims = [self._claim(run, drafting) for run in self.runs]
        batch, context = len(self.runs), sum(self._context(run) for run in self.runs) / len(self.runs)
        depth = best_depth(
            claims, lambda depth: costs.round_s(batch, depth + 1, context) + (batch * costs.propose_s if depth else 0)
        )
        for run, claim in zip(self.runs, claims, strict=True):
            run.depth = min(claim.most, depth)
            run.committed = committed_tokens(claim.acceptance, run.depth)

    def _claim(self, run: _Run, drafting: Drafting) -> Claim:
        sample = self._scheduler.sample(run.lease.sample_id)
        group = sample.group
        num_known = self._num_ended[group.request.group_id] if drafting.text == "engine" else group.num_finished
        chain = self._setup.costs.draw_chain(num_known, self._rng)
        return Claim(acceptance=chain.acceptance, most=round(chain.length))


def simulate(jobs: Sequence[Job], policy: Policy, setup: Setup) -> Outcome:
    """Simulate rollouts of these jobs to the end of the last."""
    world = _World(jobs, policy)
    if setup.is_blind:
        world.scheduler.prefill, world.scheduler.decode = _Blind(0.001), _Blind(0.01)
    engines = [_Engine(number, setup, world) for number in range(setup.num_engines)]
    is_going = True
    while is_going:
        for engine in engines:
            if not engine.runs:
                engine.go_on(world.now_s)
        is_going = world.run_next()
    world.scheduler.check()
    assert len(world.outcome.ends_s) == sum(job.num_samples for job in jobs), "a sample was lost"
    return world.outcome

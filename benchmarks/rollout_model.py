"""Simulated engines and clock for benchmarks/rollout_sim.py, with the real scheduler and a table of measured costs.

Between two events that matter to the scheduler an engine runs some rounds of the same batch. A round takes what the
table says for so many requests, tokens each and keys; every request gets the tokens that a verification commits on
average, in whole numbers with the rest carried on. A sample that comes to an engine is read there first, while the
engine's others wait, as in the local engine.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.rollout_drafting import Claim, best_depth, committed_tokens
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

    @cached_property
    def max_batch(self) -> int:
        return int(self._batches[-1])

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
    """How the simulated engines draft. Depths are those of benchmarks/rollout_drafting.py."""

    grouped: bool = True
    """Whether the suffix index holds the group's finished samples, or the request's own text alone."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The simulated machines and their settings."""

    costs: Costs
    num_engines: int
    slots: int
    memory_tokens: int
    drafting: Drafting | None = None


@dataclass
class Outcome:
    """Times and counts of a simulated rollout."""

    num_tokens: int = 0
    ends_s: list[float] = field(default_factory=list)
    """End of every sample, in order."""
    ends_by_job_s: dict[str, float] = field(default_factory=dict)
    """End of the last sample of each job."""
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
    """Tokens of the whole answer: known to the simulation, not to the scheduler."""
    done: int
    boundary: int
    """Number of tokens at which the engine reports to the scheduler: the end of the answer or of a chunk."""
    unread: int
    """Tokens that the engine must prefill before the next round."""
    carry: float = 0.0
    depth: int = 0
    committed: float = 1.0
    """Tokens that a round commits."""


class _Engine:
    """One simulated engine: advances its running samples from event to event."""

    def __init__(self, name: str, setup: Setup, scheduler: Scheduler, lengths: dict[SampleId, int]) -> None:
        self.name, self._setup, self._scheduler, self._lengths = name, setup, scheduler, lengths
        self.runs: list[_Run] = []
        self._num_rounds = 0
        self._rng = random.Random(name)

    def admit(self) -> None:
        free_slots = self._setup.slots - len(self.runs)
        if free_slots:
            promised = self._scheduler.reserved_tokens(self.name) if self.runs else 0
            leases = self._scheduler.next_for(self.name, free_slots, self._setup.memory_tokens - promised)
            for lease in leases:
                self._begin(lease)

    def _begin(self, lease: Lease) -> None:
        length = self._lengths[lease.sample_id]
        run = _Run(lease, length, lease.num_generated, length, unread=len(lease.prompt_token_ids))
        self._set_boundary(run)
        self.runs.append(run)

    def _set_boundary(self, run: _Run) -> None:
        run.boundary = min(self._scheduler.sample(run.lease.sample_id).chunk_end, run.length)

    def start(self, outcome: Outcome) -> float:
        """Begin the next rounds; returns the seconds until they end. Needs a running sample."""
        self._choose_depths()
        seconds = sum(self._setup.costs.read_s(run.unread) for run in self.runs)
        for run in self.runs:
            outcome.tokens_read += run.unread
            run.unread = 0
        batch, width = len(self.runs), max(run.depth for run in self.runs) + 1
        needed = min(-(-(run.boundary - run.done - run.carry) // run.committed) for run in self.runs)
        self._num_rounds = max(1, min(int(needed), MAX_ROUNDS))
        context = sum(self._context(run) for run in self.runs) / batch
        drafting_s = batch * self._setup.costs.propose_s if width > 1 else 0.0
        return seconds + self._num_rounds * (self._setup.costs.round_s(batch, width, context) + drafting_s)

    def finish(self, now_s: float, outcome: Outcome) -> None:
        """End the rounds and report to the scheduler."""
        for run in list(self.runs):
            exact = run.carry + self._num_rounds * run.committed
            tokens = min(int(exact), run.boundary - run.done)
            run.carry = exact - int(exact)
            run.done += tokens
            if run.done == run.length:
                request = self._scheduler.sample(run.lease.sample_id).group.request
                limit = request.max_tokens
                self._scheduler.finished(run.lease, (0,) * tokens, "length" if run.length == limit else "stop")
                outcome.ends_s.append(now_s)
                outcome.ends_by_job_s[request.job] = now_s
                outcome.num_tokens += run.length
                self.runs.remove(run)
            elif self._scheduler.progressed(run.lease, (0,) * tokens) == "stop":
                self.runs.remove(run)
            else:
                self._set_boundary(run)

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
        chain = self._setup.costs.draw_chain(sample.group.num_finished if drafting.grouped else 0, self._rng)
        return Claim(acceptance=chain.acceptance, most=round(chain.length))


def simulate(groups: Sequence[GroupRequest], lengths: dict[SampleId, int], policy: Policy, setup: Setup) -> Outcome:
    """Simulate a rollout of these groups, all submitted at once; each sample ends at its known length."""
    scheduler, outcome = Scheduler(policy), Outcome()
    for group in groups:
        scheduler.submit(group)
    engines = [_Engine(f"engine-{number}", setup, scheduler, lengths) for number in range(setup.num_engines)]
    idle, numbers = set(range(len(engines))), itertools.count()
    events: list[tuple[float, int, int]] = []
    now_s = 0.0
    while True:
        for number in sorted(idle):
            engines[number].admit()
            if engines[number].runs:
                idle.discard(number)
                heapq.heappush(events, (now_s + engines[number].start(outcome), next(numbers), number))
        if not events:
            break
        now_s, _, number = heapq.heappop(events)
        engines[number].finish(now_s, outcome)
        engines[number].admit()
        if engines[number].runs:
            heapq.heappush(events, (now_s + engines[number].start(outcome), next(numbers), number))
        else:
            idle.add(number)
    scheduler.check()
    assert len(outcome.ends_s) == len(lengths), "a sample was lost"
    return outcome

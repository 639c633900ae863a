"""What the ways of benchmarks/rollouts.py take by the table of measured costs: where the time goes, and what bounds it.

    python -m benchmarks.rollouts --answers FILE.jsonl …
    python -m benchmarks.rollout_bounds FILE.jsonl [--slots 4 8 16] [--copies 1] …

Nothing decodes here. Recorded answers go through the real scheduler and the real suffix drafter; a round takes what
benchmarks/rollout_costs.py measured on an otherwise idle machine for so many requests, tokens each and keys, and
verifies as many proposals as earn most by that. Engines side by side do not slow each other, and see each other's text
at once. Missing: the planner's errors, the learned head, everything that is not the target's own time but `--sample-ms`
for each token that is sampled.

`--copies` takes every group so many times, as tokens of another vocabulary: as many groups as a rollout has, from fewer
that were recorded. What groups could find in each other is left out thereby.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.common import finish, parser
from benchmarks.rollout_model import Costs
from benchmarks.rollout_sim import TABLE
from benchmarks.rollout_ways import Way, dealt_batches, ways
from benchmarks.suffix import MAX_PROPOSALS, NOTHING, Answer, read_answers
from serving.rollout.scheduler import Scheduler
from serving.rollout.work import GroupRequest, Lease, SampleId
from speculator.suffix import SuffixDrafter, SuffixRequest
from speculator.tree import DraftTree

_OTHER_VOCABULARY = 1 << 20


@dataclass
class _Run:
    """A sample on the engine."""

    lease: Lease
    text: Sequence[int]
    """The whole answer."""
    suffix: SuffixRequest | None

    def __post_init__(self) -> None:
        self.done = self.lease.num_generated

    @property
    def context(self) -> int:
        return len(self.lease.prompt_token_ids) - self.lease.num_generated + self.done

    def next_tokens(self, proposed: DraftTree) -> list[int]:
        """What a verification of these proposals commits."""
        rest = self.text[self.done :]
        _, path = proposed.walk(lambda _, depth: rest[depth] if depth < len(rest) else NOTHING)
        return list(rest[: len(path) + 1])

    def commit(self, tokens: Sequence[int]) -> None:
        self.done += len(tokens)
        if self.suffix is not None:
            self.suffix.commit(tokens)

    def propose(self) -> DraftTree:
        if self.suffix is None:
            return DraftTree()
        num_left = self.lease.max_tokens + self.lease.num_generated - self.done
        return self.suffix.propose(min(MAX_PROPOSALS, num_left - 1)).tree


@dataclass
class Spent:
    """Seconds of a rollout, and what the rounds of all engines did."""

    reading_s: float = 0.0
    num_rounds: int = 0
    num_rows: int = 0
    num_accepted: int = 0
    ends_s: list[float] = field(default_factory=list)
    """Of the samples."""

    @property
    def total_s(self) -> float:
        return max(self.ends_s)

    @property
    def tail_s(self) -> float:
        return self.total_s - sorted(self.ends_s)[(9 * len(self.ends_s) + 9) // 10 - 1]

    def to_dict(self) -> dict[str, float]:
        return {
            "total_s": round(self.total_s, 2),
            "reading_s": round(self.reading_s, 2),
            "tail_s": round(self.tail_s, 2),
            "requests_a_round": round(self.num_rows / self.num_rounds, 3),
            "accepted_a_verification": round(self.num_accepted / self.num_rows, 4),
        }


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The engines, what they serve, and what that takes."""

    num_engines: int
    slots: int
    costs: Costs
    sample_s: float
    texts: dict[SampleId, list[int]]


class _Engine:
    """One engine and its clock: rounds of what it runs, one after another."""

    def __init__(self, name: str, way: Way, setup: Setup, drafter: SuffixDrafter, spent: Spent) -> None:
        self.name, self._way, self._setup, self._drafter, self._spent = name, way, setup, drafter, spent
        self._running: list[_Run] = []
        self._committed: list[list[int]] = []
        """What the round under way will commit, by request."""
        self.ends_s: float | None = None
        """Of the round under way."""

    def begin(self, scheduler: Scheduler, now_s: float) -> None:
        """Fill the free slots; a round, if anything runs."""
        free = self._setup.slots - len(self._running)
        for lease in scheduler.next_for(self.name, free, 1 << 30) if free else ():
            seconds = self._setup.costs.read_s(self._unread(lease))
            now_s += seconds
            self._spent.reading_s += seconds
            self._running.append(_Run(lease, self._setup.texts[lease.sample_id], self._suffix(lease)))
        if self._running:
            self.ends_s = now_s + self._round_s()

    def _unread(self, lease: Lease) -> int:
        group_id = lease.sample_id.group_id
        if self._way.copies_prompts and any(one.lease.sample_id.group_id == group_id for one in self._running):
            return lease.num_generated
        return len(lease.prompt_token_ids)

    def _suffix(self, lease: Lease) -> SuffixRequest | None:
        if not self._way.drafts:
            return None
        group_id = lease.sample_id.group_id if self._way.is_grouped else ""
        return self._drafter.start(lease.prompt_token_ids, tenant="t", group_id=group_id, shared=self._way.is_grouped)

    def _round_s(self) -> float:
        proposals = [one.propose() for one in self._running]
        width, verify_s = self._best_width(proposals)
        pairs = zip(self._running, proposals, strict=True)
        self._committed = [one.next_tokens(proposal.first(width)) for one, proposal in pairs]
        return verify_s + self._setup.sample_s * sum(map(len, self._committed))

    def finish(self, scheduler: Scheduler) -> None:
        """The round under way is over: tell the scheduler."""
        assert self.ends_s is not None
        self._spent.num_rounds += 1
        self._spent.num_rows += len(self._running)
        for one, tokens in zip(list(self._running), self._committed, strict=True):
            one.commit(tokens)
            self._spent.num_accepted += len(tokens) - 1
            if one.done == len(one.text):
                scheduler.finished(one.lease, tokens, "stop")
                self._spent.ends_s.append(self.ends_s)
                self._running.remove(one)
            elif scheduler.progressed(one.lease, tokens) == "stop":
                self._running.remove(one)
        self.ends_s = None

    def _best_width(self, proposals: Sequence[DraftTree]) -> tuple[int, float]:
        """Proposals of each request whose round commits most a second, and what verifying them takes."""
        batch = len(self._running)
        context = sum(one.context for one in self._running) / batch
        gains = [sum(column) for column in itertools.zip_longest(*(one.reaches for one in proposals), fillvalue=0.0)]
        rates = {}
        for width, tokens in enumerate(itertools.accumulate(gains, initial=float(batch))):
            verify_s = self._setup.costs.round_s(batch, width + 1, context)
            rates[tokens / (verify_s + self._setup.sample_s * tokens)] = width, verify_s
        return rates[max(rates)]


def _run(scheduler: Scheduler, engines: Sequence[_Engine], groups: Sequence[GroupRequest], now_s: float) -> float:
    """These groups, to the end of the last sample: when that is."""
    for group in groups:
        scheduler.submit(group)
    while True:
        for engine in engines:
            if engine.ends_s is None:
                engine.begin(scheduler, now_s)
        busy = [(engine.ends_s, number) for number, engine in enumerate(engines) if engine.ends_s is not None]
        if not busy:
            scheduler.check()
            return now_s
        now_s, first = min(busy)
        engines[first].finish(scheduler)


def read_groups(path: Path, copies: int) -> list[list[Answer]]:
    """The answers of each group, in an order of their own."""
    found: dict[str, list[Answer]] = {}
    for answer in read_answers(path):
        for copy in range(copies):
            away, name = copy * _OTHER_VOCABULARY, f"{answer.group}/{copy}"
            moved = replace(
                answer,
                prompt=[token + away for token in answer.prompt],
                tokens=[token + away for token in answer.tokens],
                group=name,
            )
            found.setdefault(name, []).append(moved)
    groups = list(found.values())
    random.Random(0).shuffle(groups)
    return groups


def spent(groups: Sequence[Sequence[Answer]], way: Way, setup: Setup) -> Spent:
    """What a rollout of these groups takes. With a barrier, every engine has its share of them, and its own batches."""
    requests = [_request(group) for group in groups]
    found, drafter = Spent(), SuffixDrafter()
    engines = [_Engine(f"engine-{number}", way, setup, drafter, found) for number in range(setup.num_engines)]
    if not way.has_barrier:
        _run(Scheduler(way.policy), engines, requests, 0.0)
        return found
    for engine, batches in zip(engines, dealt_batches(requests, setup.num_engines, setup.slots), strict=True):
        now_s = 0.0
        for batch in batches:
            now_s = _run(Scheduler(way.policy), [engine], batch, now_s)
    return found


def _request(group: Sequence[Answer]) -> GroupRequest:
    first = group[0]
    seeds = tuple(range(len(group)))
    return GroupRequest(group_id=first.group, prompt_token_ids=tuple(first.prompt), seeds=seeds, max_tokens=first.limit)


def main() -> None:
    options = parser(__doc__.splitlines()[0], has_prompts=False, has_model=False)
    options.add_argument("answers", type=Path, help="of benchmarks.rollouts --answers")
    options.add_argument("--costs", type=Path, default=TABLE, metavar="FILE.json", help="of benchmarks.rollout_costs")
    options.add_argument("--engines", type=int, default=1, help="each on a core of its own, with text in common")
    options.add_argument("--slots", type=int, nargs="+", default=[4, 8, 16], help="of each engine")
    options.add_argument("--copies", type=int, default=1)
    options.add_argument("--groups", type=int, help="of all copies; all where it is left out")
    options.add_argument("--chunk", type=int, default=128, help="tokens of a chunk")
    options.add_argument("--sample-ms", type=float, default=0.4, help="to sample a token, beside the target's round")
    arguments = options.parse_args()
    groups = read_groups(arguments.answers, arguments.copies)[: arguments.groups]
    costs = Costs.read(arguments.costs)
    lengths = sorted(len(answer.tokens) for group in groups for answer in group)
    rows: list[tuple[str, object]] = [
        (
            f"{len(groups)} groups, {sum(lengths)} tokens",
            f"{lengths[0]} … {lengths[len(lengths) // 2]} … {lengths[-1]}",
        ),
        ("COMPUTED", "s, ÷ fifo, requests a round, accepted a verification, s of reading, s of the last tenth"),
    ]
    document: dict[str, Any] = {"arguments": {name: str(value) for name, value in vars(arguments).items()}}
    texts = {SampleId(group[0].group, row): answer.tokens for group in groups for row, answer in enumerate(group)}
    for slots in arguments.slots:
        setup = Setup(
            num_engines=arguments.engines,
            slots=slots,
            costs=costs,
            sample_s=arguments.sample_ms / 1000,
            texts=texts,
        )
        found = {
            name: spent(groups, way, setup) for name, way in ways(arguments.chunk, costs).items() if not way.uses_head
        }
        for name, one in found.items():
            figures = one.to_dict()
            document[f"{slots}_slots_{name}"] = figures
            rows.append(
                (
                    f"{slots} slots, {name}",
                    f"{one.total_s:7.1f}   {found['fifo'].total_s / one.total_s:.2f} ×   "
                    f"{figures['requests_a_round']:5.2f}   {figures['accepted_a_verification']:.3f}   "
                    f"{one.reading_s:5.1f}   {one.tail_s:5.1f}",
                )
            )
    finish(rows, [], document, arguments.json)


if __name__ == "__main__":
    main()

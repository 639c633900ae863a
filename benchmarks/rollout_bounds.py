"""What the ways of benchmarks/rollouts.py take by the table of measured costs: where the time goes, and what bounds it.

    python -m benchmarks.rollouts --answers FILE.jsonl …
    python -m benchmarks.rollout_bounds FILE.jsonl [--slots 4 8 16] [--copies 1] …

Nothing decodes here. Recorded answers go through the real scheduler and the real suffix drafter; a round takes what
benchmarks/rollout_costs.py measured on an otherwise idle machine for so many requests, tokens each and keys, and
verifies as many proposals as earn most by that. Missing: the planner's errors, the learned head, everything that is not
the target's own time but `--sample-ms` for each token that is sampled.

`--copies` takes every group so many times, as tokens of another vocabulary: as many groups as a rollout has, from fewer
that were recorded. What groups could find in each other is left out thereby.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.common import finish, parser
from benchmarks.rollout_model import Costs
from benchmarks.rollout_sim import TABLE
from benchmarks.rollout_ways import Way, ways
from benchmarks.suffix import MAX_PROPOSALS, Answer, count_accepted
from serving.rollout.scheduler import Scheduler
from serving.rollout.work import GroupRequest, Lease, SampleId
from speculator.suffix import SuffixDrafter, SuffixProposal, SuffixRequest

_ENGINE = "engine"
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

    def propose(self) -> SuffixProposal:
        if self.suffix is None:
            return SuffixProposal()
        num_left = self.lease.max_tokens + self.lease.num_generated - self.done
        return self.suffix.propose(min(MAX_PROPOSALS, num_left - 1))


@dataclass
class Spent:
    """Seconds of a rollout, and what its rounds did."""

    total_s: float = 0.0
    reading_s: float = 0.0
    num_rounds: int = 0
    num_rows: int = 0
    num_accepted: int = 0
    ends_s: tuple[float, ...] = ()

    @property
    def tail_s(self) -> float:
        return self.total_s - self.ends_s[(9 * len(self.ends_s) + 9) // 10 - 1]

    def to_dict(self) -> dict[str, float]:
        return {
            "total_s": round(self.total_s, 2),
            "reading_s": round(self.reading_s, 2),
            "tail_s": round(self.tail_s, 2),
            "requests_a_round": round(self.num_rows / self.num_rounds, 3),
            "accepted_a_verification": round(self.num_accepted / self.num_rows, 4),
        }


class _Engine:
    def __init__(
        self, way: Way, texts: dict[SampleId, list[int]], costs: Costs, *, slots: int, sample_s: float
    ) -> None:
        self.scheduler, self.spent = Scheduler(way.policy), Spent()
        self._way, self._texts, self._costs, self._slots, self._sample_s = way, texts, costs, slots, sample_s
        self._drafter = SuffixDrafter()
        self._running: list[_Run] = []

    def run(self, groups: Sequence[GroupRequest]) -> None:
        for group in groups:
            self.scheduler.submit(group)
        self._admit()
        while self._running:
            self._round()
            self._admit()

    def _admit(self) -> None:
        free = self._slots - len(self._running)
        for lease in self.scheduler.next_for(_ENGINE, free, 1 << 30) if free else ():
            group_id, unread = lease.sample_id.group_id, len(lease.prompt_token_ids)
            if self._way.copies_prompts and any(one.lease.sample_id.group_id == group_id for one in self._running):
                unread = lease.num_generated
            seconds = self._costs.read_s(unread)
            self.spent.total_s += seconds
            self.spent.reading_s += seconds
            self._running.append(_Run(lease, self._texts[lease.sample_id], self._suffix(lease)))

    def _suffix(self, lease: Lease) -> SuffixRequest | None:
        if not self._way.drafts:
            return None
        group_id = lease.sample_id.group_id if self._way.is_grouped else ""
        return self._drafter.start(lease.prompt_token_ids, tenant="t", group_id=group_id, shared=self._way.is_grouped)

    def _round(self) -> None:
        proposals = [one.propose() for one in self._running]
        width, verify_s = self._best_width(proposals)
        committed = [
            self._commit(one, proposal.tokens[:width]) for one, proposal in zip(self._running, proposals, strict=True)
        ]
        self.spent.num_rounds += 1
        self.spent.num_rows += len(self._running)
        self.spent.num_accepted += sum(map(len, committed)) - len(committed)
        self.spent.total_s += verify_s + self._sample_s * sum(map(len, committed))
        for one, tokens in zip(list(self._running), committed, strict=True):
            if one.done == len(one.text):
                self.scheduler.finished(one.lease, tokens, "stop")
                self.spent.ends_s += (self.spent.total_s,)
                self._running.remove(one)
            elif self.scheduler.progressed(one.lease, tokens) == "stop":
                self._running.remove(one)

    def _best_width(self, proposals: Sequence[SuffixProposal]) -> tuple[int, float]:
        """Proposals of each request whose round commits most a second, and what verifying them takes."""
        batch = len(self._running)
        context = sum(one.context for one in self._running) / batch
        gains = [sum(column) for column in itertools.zip_longest(*(one.reaches for one in proposals), fillvalue=0.0)]
        rates = {}
        for width, tokens in enumerate(itertools.accumulate(gains, initial=float(batch))):
            verify_s = self._costs.round_s(batch, width + 1, context)
            rates[tokens / (verify_s + self._sample_s * tokens)] = width, verify_s
        return rates[max(rates)]

    @staticmethod
    def _commit(one: _Run, proposed: Sequence[int]) -> list[int]:
        num_accepted = count_accepted(proposed, one.text[one.done :])
        tokens = list(one.text[one.done : one.done + num_accepted + 1])
        one.done += len(tokens)
        if one.suffix is not None:
            one.suffix.commit(tokens)
        return tokens


def read_groups(path: Path, copies: int) -> list[list[Answer]]:
    """The answers of each group, in an order of their own."""
    found: dict[str, list[Answer]] = {}
    for line in path.read_bytes().splitlines():
        answer = msgspec.json.decode(line, type=Answer)
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


def spent(groups: Sequence[Sequence[Answer]], way: Way, costs: Costs, *, slots: int, sample_s: float) -> Spent:
    """What a rollout of these groups takes on one engine."""
    requests, texts = [], dict[SampleId, list[int]]()
    for group in groups:
        first = group[0]
        request = GroupRequest(
            group_id=first.group,
            prompt_token_ids=tuple(first.prompt),
            seeds=tuple(range(len(group))),
            max_tokens=first.limit,
        )
        requests.append(request)
        texts |= {SampleId(first.group, index): answer.tokens for index, answer in enumerate(group)}
    engine = _Engine(way, texts, costs, slots=slots, sample_s=sample_s)
    batch = max(1, slots // len(groups[0])) if way.has_barrier else len(requests)
    for start in range(0, len(requests), batch):
        engine.run(requests[start : start + batch])
    engine.scheduler.check()
    return engine.spent


def main() -> None:
    options = parser(__doc__.splitlines()[0], has_prompts=False, has_model=False)
    options.add_argument("answers", type=Path, help="of benchmarks.rollouts --answers")
    options.add_argument("--costs", type=Path, default=TABLE, metavar="FILE.json", help="of benchmarks.rollout_costs")
    options.add_argument("--slots", type=int, nargs="+", default=[4, 8, 16])
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
    for slots in arguments.slots:
        found = {
            name: spent(groups, way, costs, slots=slots, sample_s=arguments.sample_ms / 1000)
            for name, way in ways(arguments.chunk).items()
            if not way.uses_head
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

"""Simulate rollouts on many engines: the real scheduler, with engines modelled by tables of measured costs.

    python -m benchmarks.rollout_sim [--quick] [--json FILE] [--engines 1 4 16 64] [--costs FILE.json] …

Nothing decodes here. serving/rollout/ decides what runs where, as it does in service; a round, reading a prompt and
what a verification commits take what was measured on the local engine (rollout_costs.json; how is in
benchmarks/results/rollout_sim.md). Every engine of the simulation is such an engine on a machine of its own. Moving a
sample costs reading its context again: there is no shared pool of keys and values.

The workload has the shape of Seer's (arXiv 2511.14617): 400 prompts of 8 samples for 32 GPUs, so 100 samples for each
engine; a limit that a few samples reach; lengths alike within a group. Log-lengths are normal, the group having the
share `--correlation` of their variance, and lengths are cut at the limit. It is one step of synchronous RL: everything
is submitted at once, and the rollout ends with its last sample.

    fifo                 whole groups dealt to engines in turn, samples in order, no chunks: a synchronous rollout
    fifo + drafting      fifo with suffix drafts from the group
    divided              chunks on any engine, samples in order
    context-aware        … one probe of each group first, then the longest expected first
    everything           … and suffix drafts from the group
    own suffixes         everything, but a request drafts from its own text alone
    oracle               everything, but the order is the longest first by true lengths

Two jobs, each with the work of half of the engines, run on those halves, and together on all of them, both with
"everything": how much sooner the later of the two is done, and each of them.

Tail: from the end of the first nine tenths of the samples to the end of the last. Medians over seeds (least … most).
Targets, at the last number of engines: everything against fifo, throughput + 44% and tail − 72%; and within 10% of the
oracle's throughput; two jobs on one pool 1.2 times as fast as on its halves.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common.report import Spread, Target, fill_in, finish, parser
from benchmarks.rollout_model import Costs, Drafting, Outcome, Setup, simulate
from serving.rollout.order import ContextAware, Fifo, Rank, urgency
from serving.rollout.samples import GroupRequest, Sample, SampleId
from serving.rollout.scheduler import Policy

TABLE = Path(__file__).with_name("rollout_costs.json")


@dataclass(frozen=True, kw_only=True)
class Workload:
    groups: list[GroupRequest]
    lengths: dict[SampleId, int]

    @classmethod
    def draw(cls, arguments: argparse.Namespace, num_engines: int, seed: int) -> Workload:
        rng = random.Random(f"{seed} {num_engines}")
        num_groups = max(1, round(arguments.samples_per_engine * num_engines / arguments.group_size))
        between, within = (
            arguments.sigma * math.sqrt(share) for share in (arguments.correlation, 1 - arguments.correlation)
        )
        groups, lengths = [], dict[SampleId, int]()
        for number in range(num_groups):
            group = GroupRequest(
                group_id=str(number),
                prompt_token_ids=(0,) * rng.randint(arguments.prompt // 2, 3 * arguments.prompt // 2),
                seeds=tuple(range(arguments.group_size)),
                max_tokens=arguments.limit,
            )
            groups.append(group)
            centre = math.log(arguments.median) + rng.gauss(0, between)
            for index in range(arguments.group_size):
                drawn = round(math.exp(centre + rng.gauss(0, within)))
                lengths[SampleId(group.group_id, index)] = min(max(drawn, 1), arguments.limit)
        return cls(groups=groups, lengths=lengths)

    def of_job(self, job: str) -> Workload:
        """The same workload under names that are unique to the job."""
        groups = [replace(group, group_id=f"{job}-{group.group_id}", job=job) for group in self.groups]
        return Workload(
            groups=groups, lengths={SampleId(f"{job}-{i}", n): length for (i, n), length in self.lengths.items()}
        )


class Oracle:
    """A policy that knows the length of every sample; the longest remaining goes first."""

    def __init__(self, lengths: dict[SampleId, int]) -> None:
        self._lengths = lengths

    def rank(self, sample: Sample) -> Rank:
        return (*urgency(sample), -self.remaining(sample), sample.group.number, sample.index)

    def displaces(self, waiting: Sample, running: Sample) -> bool:
        return self.remaining(waiting) > self.remaining(running) + running.context

    def remaining(self, sample: Sample) -> int:
        return self._lengths[sample.sample_id] - len(sample.tokens)


@dataclass(frozen=True, kw_only=True)
class Way:
    """A policy, how its engines draft, and whether whole groups are dealt to engines before anything runs."""

    policy: Policy
    drafting: Drafting | None = None
    is_dealt: bool = False

    def run(self, work: Workload, setup: Setup) -> Outcome:
        setup = replace(setup, drafting=self.drafting)
        if not self.is_dealt:
            return simulate(work.groups, work.lengths, self.policy, setup)
        whole = Outcome()
        for number in range(setup.num_engines):
            groups = work.groups[number :: setup.num_engines]
            ids = [SampleId(group.group_id, index) for group in groups for index in range(len(group.seeds))]
            lengths = {sample_id: work.lengths[sample_id] for sample_id in ids}
            whole.add(simulate(groups, lengths, self.policy, replace(setup, num_engines=1)))
        return whole


def ways(work: Workload, chunk_tokens: int) -> dict[str, Way]:
    """All ways, by the names in this module's docstring."""
    fifo = Policy(order=Fifo(), chunk_tokens=max(group.max_tokens for group in work.groups))
    aware = Policy(order=ContextAware(), chunk_tokens=chunk_tokens)
    oracle = Policy(order=Oracle(work.lengths), chunk_tokens=chunk_tokens)
    return {
        "fifo": Way(policy=fifo, is_dealt=True),
        "fifo + drafting": Way(policy=fifo, drafting=Drafting(), is_dealt=True),
        "divided": Way(policy=Policy(order=Fifo(), chunk_tokens=chunk_tokens)),
        "context-aware": Way(policy=aware),
        "everything": Way(policy=aware, drafting=Drafting()),
        "own suffixes": Way(policy=aware, drafting=Drafting(grouped=False)),
        "oracle": Way(policy=oracle, drafting=Drafting()),
    }


def run_all(arguments: argparse.Namespace, costs: Costs, num_engines: int) -> dict[str, list[Outcome]]:
    """Outcomes of every way on the same workloads, by name and seed."""
    outcomes: dict[str, list[Outcome]] = {}
    for seed in range(arguments.seeds):
        work = Workload.draw(arguments, num_engines, seed)
        setup = Setup(
            costs=costs, num_engines=num_engines, slots=arguments.slots, memory_tokens=arguments.memory_tokens
        )
        for name, way in ways(work, arguments.chunk).items():
            outcomes.setdefault(name, []).append(way.run(work, setup))
    return outcomes


def two_jobs(arguments: argparse.Namespace, costs: Costs, num_engines: int, seed: int) -> dict[str, float]:
    """How many times sooner the last sample of both jobs, and on average of each, ends on one pool than on halves."""
    half = num_engines // 2
    policy = Policy(order=ContextAware(), chunk_tokens=arguments.chunk)
    setup = Setup(
        costs=costs,
        num_engines=half,
        slots=arguments.slots,
        memory_tokens=arguments.memory_tokens,
        drafting=Drafting(),
    )
    jobs = [Workload.draw(arguments, half, 1000 + 2 * seed + number).of_job(str(number)) for number in range(2)]
    apart = [simulate(job.groups, job.lengths, policy, setup).makespan_s for job in jobs]
    together = simulate(
        [group for pair in zip(*(job.groups for job in jobs), strict=True) for group in pair],
        jobs[0].lengths | jobs[1].lengths,
        policy,
        replace(setup, num_engines=2 * half),
    )
    each = [alone / together.ends_by_job_s[str(number)] for number, alone in enumerate(apart)]
    return {"both": max(apart) / together.makespan_s, "each": statistics.mean(each)}


def _ratios(these: Sequence[Outcome], those: Sequence[Outcome]) -> tuple[Spread, Spread]:
    """Throughput and tail of these over those, seed by seed."""
    pairs = list(zip(these, those, strict=True))
    return (
        Spread.of([this.tokens_a_second / that.tokens_a_second for this, that in pairs]),
        Spread.of([this.tail_s / that.tail_s for this, that in pairs]),
    )


def _figures(these: Sequence[Outcome], fifo: Sequence[Outcome]) -> dict[str, Any]:
    throughput, tail = _ratios(these, fifo)
    return {
        "tokens_a_second": Spread.of([one.tokens_a_second for one in these]).to_dict(),
        "makespan_s": Spread.of([one.makespan_s for one in these]).to_dict(),
        "tail_s": Spread.of([one.tail_s for one in these]).to_dict(),
        "throughput_over_fifo": throughput.to_dict(),
        "tail_over_fifo": tail.to_dict(),
        "tokens_read_over_generated": statistics.median(one.tokens_read / one.num_tokens for one in these),
    }


def _row(these: Sequence[Outcome], fifo: Sequence[Outcome]) -> str:
    throughput, tail = _ratios(these, fifo)
    rate = statistics.median(one.tokens_a_second for one in these)
    tail_s = statistics.median(one.tail_s for one in these)
    return (
        f"{rate:8.0f} token/s {throughput.median:5.2f} × ({throughput.low:.2f} … {throughput.high:.2f})"
        f"   tail {tail_s:6.1f} s {tail.median - 1:+5.0%} ({tail.low - 1:+.0%} … {tail.high - 1:+.0%})"
    )


def options() -> argparse.ArgumentParser:
    found = parser("Groups of rollouts on many engines, simulated", has_prompts=False, has_model=False)
    found.add_argument("--costs", type=Path, default=TABLE, metavar="FILE.json", help="a table like rollout_costs.json")
    found.add_argument("--engines", type=int, nargs="+", help="the targets hold at the last of them")
    found.add_argument("--seeds", type=int)
    found.add_argument("--group-size", type=int, default=8)
    found.add_argument("--samples-per-engine", type=int, default=100)
    found.add_argument("--limit", type=int, default=1024, help="most tokens of a sample")
    found.add_argument("--median", type=int, default=180, help="of the lengths")
    found.add_argument("--sigma", type=float, default=1.0, help="deviation of log-lengths")
    found.add_argument("--correlation", type=float, default=0.8, help="the group's share of their variance")
    found.add_argument("--prompt", type=int, default=100, help="mean tokens of a prompt")
    found.add_argument("--slots", type=int, default=8, help="requests that an engine decodes together")
    found.add_argument("--memory-tokens", type=int, default=16_384, help="keys and values that an engine can hold")
    found.add_argument("--chunk", type=int, default=128, help="tokens of a chunk")
    return found


def main() -> None:
    arguments = options().parse_args()
    fill_in(arguments, {"engines": ([1, 8], [1, 4, 16, 64]), "seeds": (3, 5)})
    costs = Costs.read(arguments.costs)
    if arguments.slots > costs.max_batch:
        raise SystemExit(
            f"rounds of {arguments.slots} requests were not measured: set --slots {costs.max_batch} or less"
        )
    rows: list[tuple[str, object]] = [("SIMULATED", f"with the costs of {arguments.costs.name}")]
    document: dict[str, Any] = {"simulated": True, "arguments": {k: str(v) for k, v in vars(arguments).items()}}
    for num_engines in arguments.engines:
        outcomes = run_all(arguments, costs, num_engines)
        fifo = outcomes["fifo"]
        rows += [(f"{num_engines:>2} engines: {name}", _row(these, fifo)) for name, these in outcomes.items()]
        document[f"{num_engines}_engines"] = {name: _figures(these, fifo) for name, these in outcomes.items()}
        if num_engines > 1:
            ratios = [two_jobs(arguments, costs, num_engines, seed) for seed in range(arguments.seeds)]
            spreads = {name: Spread.of([ratio[name] for ratio in ratios]) for name in ("both", "each")}
            document[f"{num_engines}_engines"]["two_jobs"] = {name: one.to_dict() for name, one in spreads.items()}
            both, each = spreads["both"], spreads["each"]
            rows.append(
                (
                    f"{num_engines:>2} engines: two jobs, one pool over its halves",
                    f"{both.median:5.2f} × ({both.low:.2f} … {both.high:.2f}) for both, {each.median:.2f} × for each",
                )
            )
    throughput, tail = _ratios(outcomes["everything"], fifo)
    of_oracle, _ = _ratios(outcomes["everything"], outcomes["oracle"])
    targets = [
        Target("throughput_over_fifo", throughput.median, 1.44),
        Target("tail_over_fifo", tail.median, 0.28, at_least=False),
        Target("throughput_over_oracle", of_oracle.median, 0.9),
    ]
    if arguments.engines[-1] > 1:
        targets.append(Target("two_jobs", spreads["both"].median, 1.2))
    finish(rows, targets, document, arguments.json)


if __name__ == "__main__":
    main()

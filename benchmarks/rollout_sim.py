"""Simulate rollouts on many engines: the real scheduler, with engines modelled by tables of measured costs.

    python -m benchmarks.rollout_sim [--quick] [--json FILE] [--engines 1 4 16 64] [--seeds 3]

Nothing decodes here. serving/rollout/ decides what runs where, as it does in service; a round and reading a prompt take
what was measured on SGLang (rollout_costs.json, by benchmarks/sglang_rollout_costs.py), and text proposes and a
verification commits what it did on the answers of a real model. Every engine of the simulation is such an engine on a
machine of its own. Moving a sample costs reading its context again: there is no shared pool of keys and values.

The workload has the shape of Seer's (arXiv 2511.14617): 400 prompts of 8 samples for 32 GPUs, so 100 samples for each
engine; a limit that a few samples reach; lengths alike within a group. Log-lengths are normal, the group having the
share `CORRELATION` of their variance, and lengths are cut at the limit. It is one step of synchronous RL: everything
is submitted at once, and the rollout ends with its last sample.

    fifo                 whole groups dealt to engines in turn, samples in order, no chunks: a synchronous rollout
    divided              chunks on any engine, samples in order
    context-aware        … one probe of each group first, then the longest expected first
    everything           … and suffix drafts from the group
    not shared           everything, but a request drafts from samples that ended on its engine alone
    oracle               everything, but the order is the longest first by true lengths

Two jobs, each with the work of half of the engines, run on those halves, and together on all of them: how much sooner
the later of the two is done. Each has `STEPS` steps, and trains between them for `TRAIN` of a rollout's time on a half;
the second job begins so much later.

Engines of two speeds: in turn, one decodes half as fast as the table says, and one reads half as fast. Placement by
each engine's measured costs is compared with placement by the mean costs of all: for the workload above ("answers"),
for conversations of four turns ("turns"), and for conversations with long observations and short turns beside long
answers ("agents and reasoning"). These engines keep more contexts (`MIXED_MEMORY_TOKENS`).

Tail: from the end of the first nine tenths of the samples to the end of the last. Medians over seeds (least … most).
Targets, at the last number of engines: everything against fifo, throughput + 44% and tail − 72%; and within 10% of the
oracle's throughput; two jobs on one pool 1.2 times as fast as on its halves; agents and reasoning on engines of two
speeds 1.15 times as fast as without regard to speed.
"""

from __future__ import annotations

import functools
import math
import operator
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common.report import Spread, Target, fill_in, finish, parser
from benchmarks.simulation.engines import Costs, Drafting, Job, Outcome, Setup, Speed, TurnPlan, simulate
from serving.rollout.order import ContextAware, Fifo, Rank, urgency
from serving.rollout.samples import GroupRequest, Sample, SampleId
from serving.rollout.scheduler import Policy

TABLE = Path(__file__).with_name("rollout_costs.json")
GROUP_SIZE, SAMPLES_PER_ENGINE = 8, 100
LIMIT = 1024
"""Most tokens of a turn."""
SIGMA, CORRELATION = 1.0, 0.8
"""Deviation of log-lengths, and the group's share of their variance."""
SLOTS, CHUNK_TOKENS = 8, 128
MEMORY_TOKENS, MIXED_MEMORY_TOKENS = 16_384, 262_144
"""Keys and values that an engine can hold, and one of two speeds."""
STEPS, TRAIN = 3, 0.5
"""Of each of two jobs; training takes so much of the time of its rollout on a half."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How long the prompts and answers of a workload are."""

    prompt: int
    """Mean tokens, evenly from half to one and a half of it."""
    median: int
    """Median tokens of a turn."""
    num_turns: int = 1
    observation: int = 0
    """Mean tokens of what the environment says."""


_PLAIN = Shape(prompt=100, median=180)


def draw_job(shapes: Sequence[Shape], num_engines: int, seed: int, name: str = "") -> Job:
    """A job with one step, whose groups have these shapes in turn."""
    rng = random.Random(f"{seed} {num_engines}")
    num_groups = max(1, round(SAMPLES_PER_ENGINE * num_engines / GROUP_SIZE))
    between, within = (SIGMA * math.sqrt(share) for share in (CORRELATION, 1 - CORRELATION))
    groups, turns = [], dict[SampleId, Sequence[TurnPlan]]()
    for number in range(num_groups):
        shape = shapes[number % len(shapes)]
        is_talk = shape.num_turns > 1
        group = GroupRequest(
            group_id=f"{name}{number}",
            prompt_token_ids=(0,) * rng.randint(shape.prompt // 2, 3 * shape.prompt // 2),
            seeds=tuple(range(GROUP_SIZE)),
            max_tokens=(LIMIT + 2 * shape.observation) * shape.num_turns,
            turn_tokens=LIMIT if is_talk else None,
            job=name,
        )
        groups.append(group)
        centre = math.log(shape.median) + rng.gauss(0, between)
        for index in range(GROUP_SIZE):
            plans: list[TurnPlan] = []
            turns[SampleId(group.group_id, index)] = plans
            for _ in range(shape.num_turns):
                drawn = round(math.exp(centre + rng.gauss(0, within)))
                plans.append(TurnPlan(length=min(max(drawn, 1), LIMIT)))
            for at in range(shape.num_turns - 1):
                said = rng.randint(shape.observation // 2, 3 * shape.observation // 2)
                latency_s = min(_SHORTEST_S * rng.paretovariate(_ALPHA), _LONGEST_S)
                plans[at] = replace(plans[at], observation=said, latency_s=latency_s)
    return Job(steps=[groups], turns=turns)


_SHORTEST_S, _LONGEST_S, _ALPHA = 0.1, 5.0, 1.1
"""Environments answer after 0.1 to 5 s with a heavy tail, as in benchmarks/rollout_environments.py."""


class Oracle:
    """A policy that knows the length of every sample; the longest remaining goes first."""

    def __init__(self, turns: Mapping[SampleId, Sequence[TurnPlan]]) -> None:
        self._lengths = {sample_id: plans[0].length for sample_id, plans in turns.items()}

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

    def run(self, job: Job, setup: Setup) -> Outcome:
        setup = replace(setup, drafting=self.drafting)
        if not self.is_dealt:
            return simulate([job], self.policy, setup)
        whole = Outcome()
        for number in range(setup.num_engines):
            dealt = replace(job, steps=[groups[number :: setup.num_engines] for groups in job.steps])
            alone = replace(setup, num_engines=1, speeds=[setup.speeds[number % len(setup.speeds)]])
            whole.add(simulate([dealt], self.policy, alone))
        return whole


def ways(work: Job) -> dict[str, Way]:
    """All ways, by the names in this module's docstring."""
    fifo = Policy(order=Fifo(), chunk_tokens=max(group.max_tokens for group in work.steps[0]))
    aware = Policy(order=ContextAware(), chunk_tokens=CHUNK_TOKENS)
    oracle = Policy(order=Oracle(work.turns), chunk_tokens=CHUNK_TOKENS)
    return {
        "fifo": Way(policy=fifo, is_dealt=True),
        "divided": Way(policy=Policy(order=Fifo(), chunk_tokens=CHUNK_TOKENS)),
        "context-aware": Way(policy=aware),
        "everything": Way(policy=aware, drafting=Drafting()),
        "not shared": Way(policy=aware, drafting=Drafting(text="engine")),
        "oracle": Way(policy=oracle, drafting=Drafting()),
    }


def run_all(costs: Costs, num_engines: int, num_seeds: int) -> dict[str, list[Outcome]]:
    """Outcomes of every way on the same workloads, by name and seed."""
    outcomes: dict[str, list[Outcome]] = {}
    for seed in range(num_seeds):
        work, setup = draw_job([_PLAIN], num_engines, seed), _setup(costs, num_engines)
        for name, way in ways(work).items():
            outcomes.setdefault(name, []).append(way.run(work, setup))
    return outcomes


def _setup(costs: Costs, num_engines: int) -> Setup:
    return Setup(costs=costs, num_engines=num_engines, slots=SLOTS, memory_tokens=MEMORY_TOKENS, drafting=Drafting())


def two_jobs(costs: Costs, num_engines: int, seed: int) -> float:
    """How many times sooner the last sample of two jobs ends on one pool than on its halves.

    Each trains for a while between its steps; the second begins so much later than the first.
    """
    half = num_engines // 2
    policy = Policy(order=ContextAware(), chunk_tokens=CHUNK_TOKENS)
    setup = _setup(costs, half)
    apart, jobs = [], []
    for number in range(2):
        steps = [
            draw_job([_PLAIN], half, 1000 + 100 * seed + 10 * number + step, f"{number}-{step}-")
            for step in range(STEPS)
        ]
        first_s = simulate(steps[:1], policy, setup).makespan_s
        job = Job(
            steps=[[replace(group, job=str(number)) for group in one.steps[0]] for one in steps],
            turns=functools.reduce(operator.or_, (one.turns for one in steps)),
            train_s=TRAIN * first_s,
            begins_s=number * TRAIN * first_s,
        )
        jobs.append(job)
        apart.append(simulate([job], policy, setup).makespan_s)
    return max(apart) / simulate(jobs, policy, replace(setup, num_engines=2 * half)).makespan_s


SPEEDS = (Speed(decode=2.0), Speed(prefill=2.0))
"""Engines in turn: one decodes half as fast as in the table, the next one reads half as fast."""
MIXES = {
    "answers": [_PLAIN],
    "turns": [Shape(prompt=200, median=60, num_turns=4, observation=100)],
    "agents and reasoning": [
        Shape(prompt=200, median=25, num_turns=4, observation=400),
        Shape(prompt=100, median=360),
    ],
}


def two_speeds(costs: Costs, num_engines: int, seed: int, mix: str) -> float:
    """Throughput on engines of two speeds over that of placement that is blind to them."""
    policy = Policy(order=ContextAware(), chunk_tokens=CHUNK_TOKENS)
    setup = replace(_setup(costs, num_engines), speeds=SPEEDS, memory_tokens=MIXED_MEMORY_TOKENS)
    job = draw_job(MIXES[mix], num_engines, 2000 + seed)
    blind, measured = (simulate([job], policy, replace(setup, is_blind=is_blind)) for is_blind in (True, False))
    return measured.tokens_a_second / blind.tokens_a_second


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


def _pools(
    costs: Costs, num_engines: int, num_seeds: int, rows: list[tuple[str, object]]
) -> dict[str, dict[str, float]]:
    """Figures of two jobs and of engines of two speeds, where there are two engines."""
    if num_engines == 1:
        return {}
    ways = {"two_jobs": two_jobs}
    ways |= {f"two_speeds: {mix}": functools.partial(two_speeds, mix=mix) for mix in MIXES}
    found = {}
    for name, way in ways.items():
        spread = Spread.of([way(costs, num_engines, seed) for seed in range(num_seeds)])
        found[name] = spread.to_dict()
        rows.append(
            (f"{num_engines:>2} engines: {name}", f"{spread.median:5.2f} × ({spread.low:.2f} … {spread.high:.2f})")
        )
    return found


def _row(these: Sequence[Outcome], fifo: Sequence[Outcome]) -> str:
    throughput, tail = _ratios(these, fifo)
    rate = statistics.median(one.tokens_a_second for one in these)
    tail_s = statistics.median(one.tail_s for one in these)
    return (
        f"{rate:8.0f} token/s {throughput.median:5.2f} × ({throughput.low:.2f} … {throughput.high:.2f})"
        f"   tail {tail_s:6.1f} s {tail.median - 1:+5.0%} ({tail.low - 1:+.0%} … {tail.high - 1:+.0%})"
    )


def main() -> None:
    options = parser("Groups of rollouts on many engines, simulated", has_prompts=False, has_model=False)
    options.add_argument("--engines", type=int, nargs="+", help="the targets hold at the last of them")
    options.add_argument("--seeds", type=int)
    arguments = options.parse_args()
    fill_in(arguments, {"engines": ([4], [1, 4, 16]), "seeds": (1, 3)})
    costs = Costs.read(TABLE)
    rows: list[tuple[str, object]] = [("SIMULATED", f"with the costs of {TABLE.name}")]
    document: dict[str, Any] = {"simulated": True, "arguments": {k: str(v) for k, v in vars(arguments).items()}}
    for num_engines in arguments.engines:
        outcomes = run_all(costs, num_engines, arguments.seeds)
        fifo = outcomes["fifo"]
        rows += [(f"{num_engines:>2} engines: {name}", _row(these, fifo)) for name, these in outcomes.items()]
        document[f"{num_engines}_engines"] = {name: _figures(these, fifo) for name, these in outcomes.items()}
        document[f"{num_engines}_engines"] |= _pools(costs, num_engines, arguments.seeds, rows)
    throughput, tail = _ratios(outcomes["everything"], fifo)
    of_oracle, _ = _ratios(outcomes["everything"], outcomes["oracle"])
    targets = [
        Target("throughput_over_fifo", throughput.median, 1.44),
        Target("tail_over_fifo", tail.median, 0.28, at_least=False),
        Target("throughput_over_oracle", of_oracle.median, 0.9),
    ]
    pools = document[f"{arguments.engines[-1]}_engines"]
    if "two_jobs" in pools:
        targets.append(Target("two_jobs", pools["two_jobs"]["median"], 1.2))
        targets.append(Target("two_speeds", pools["two_speeds: agents and reasoning"]["median"], 1.15))
    finish(rows, targets, document, arguments.json)


if __name__ == "__main__":
    main()

"""One engine that answers with different sources of proposals, one after the other.

Two engines in one process differ by up to 4% for minutes while they do the same: their memory lies elsewhere. So the
same weights at the same addresses answer in every way that is compared:

    plain    without drafts; the head does not read the prompt, either
    head     planned rounds with the learned draft alone
    suffix   … with suffixes of earlier text alone
    hybrid   … with both, as it is served

Each way has a planner of its own, and a tenant, since one way's answer must not be the next one's suffix.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.common.engines import engine_with
from benchmarks.common.equal_cost import Round
from benchmarks.common.workloads import Work
from serving.engine import CapturePolicy, GenerateRequest
from serving.local.config import LocalEngineConfig
from serving.local.engine import LocalEngine
from speculator.draft.eagle3 import Eagle3Draft
from speculator.draft.sampling_params import SamplingParams
from speculator.proposals.planner import ChainRule, HeadVerdict, Plan, RoundPlanner

WAYS = ("plain", "head", "suffix", "hybrid")


@dataclass(frozen=True)
class Run:
    """The tokens of one piece of work and what they took. `cpu_s` is of this process, in which nothing else runs."""

    num_tokens: int
    wall_s: float
    cpu_s: float
    rounds: tuple[Round, ...] = ()
    planning_s: float = 0.0
    """Part of it that the planner took."""


@dataclass
class _Planners(RoundPlanner):
    """A planner for each way, of which the current way's is used."""

    max_depth: int
    way: str = "hybrid"
    plans: dict[str, RoundPlanner] = field(init=False)
    planned: str = "plain"
    """The way of the running round, which may still run when the last chunk of its answer has come."""
    rounds: list[Round] = field(default_factory=list)
    """Rounds of the running answers."""
    planning_s: float = 0.0
    """Planning time of all rounds so far."""

    def __post_init__(self) -> None:
        super().__init__(max_depth=self.max_depth)
        self.plans = {way: RoundPlanner(max_depth=self.max_depth) for way in WAYS}

    @property
    def _current(self) -> RoundPlanner:
        return self.plans[self.planned]

    def plan(
        self,
        domains: Sequence[str],
        num_keys: int,
        suffixes: Sequence[Sequence[float]],
        *,
        head_depth: int,
        unread: Sequence[int],
    ) -> Plan:
        self.planned = self.way
        if self.way == "head":
            suffixes = [()] * len(suffixes)
        depth = 0 if self.planned == "suffix" else head_depth
        with self._timed():
            return self._current.plan(domains, num_keys, suffixes, head_depth=depth, unread=unread)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        started_s = time.perf_counter()
        yield
        self.planning_s += time.perf_counter() - started_s

    def head_probability(self, step: int, probability: float) -> float:
        return self._current.head_probability(step, probability)

    def is_worth_verifying(self, plan: Plan, num_proposals: int, reach: float, of_suffixes: float = 0.0) -> bool:
        return self._current.is_worth_verifying(plan, num_proposals, reach, of_suffixes)

    def chain_rule(self, plan: Plan, of_suffixes: Sequence[float]) -> ChainRule:
        return self._current.chain_rule(plan, of_suffixes)

    def observe(
        self, plan: Plan, *, num_proposals: int, num_steps: int, num_pairs: int, draft_s: float, verify_s: float | None
    ) -> None:
        self.rounds.append(Round(plan.batch, num_proposals, num_steps, num_pairs, verify_s, draft_s))
        with self._timed():
            self._current.observe(
                plan,
                num_proposals=num_proposals,
                num_steps=num_steps,
                num_pairs=num_pairs,
                draft_s=draft_s,
                verify_s=verify_s,
            )

    def observe_head(self, verdicts: Iterable[HeadVerdict]) -> None:
        if self.planned == "head":  # without suffix drafts there are no rounds that they would have saved
            verdicts = [replace(verdict, rounds_saved=None) for verdict in verdicts]
        with self._timed():
            self._current.observe_head(verdicts)

    def renew(self) -> None:
        for planner in self.plans.values():
            planner.renew()

    @property
    def is_awake(self) -> bool:
        return self.way != "plain" and self.plans[self.way].is_awake


class Ways:
    """Answers in any of `WAYS`; made by `all_ways`."""

    def __init__(self, engine: LocalEngine, planners: _Planners) -> None:
        self._engine, self._planners = engine, planners

    def run(self, way: str, work: Work, name: str) -> Run:
        """Answer all samples of a work at the same time, in this way."""
        # Safe without a lock: no request runs, and the engine's thread waits for one.
        self._planners.way = way
        rounds = self._planners.rounds = []
        started_s, cpu_s, planned_s = time.perf_counter(), time.process_time(), self._planners.planning_s
        num_tokens = asyncio.run(answer(self._engine, work, name, tenant=way, drafts=way != "plain"))
        wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
        return Run(num_tokens, wall_s, cpu_s, tuple(rounds), self._planners.planning_s - planned_s)


@contextlib.contextmanager
def all_ways(model_dir: Path, draft: Eagle3Draft, threads: int, *, suffixes: bool = True) -> Iterator[Ways]:
    """Start an engine that answers in all ways; without `suffixes` no suffix drafts are searched."""
    settings: dict[str, Any] = {"control_share": 0.0, "capture": False}
    if not suffixes:
        settings["suffix_depth"] = 0
    planners = _Planners(LocalEngineConfig.max_depth)
    with engine_with(model_dir, copy.deepcopy(draft), threads, settings=settings, planner=planners) as engine:
        yield Ways(engine, planners)


async def answer(engine: LocalEngine, work: Work, name: str, *, tenant: str = "default", drafts: bool = True) -> int:
    """Answer all samples of a work at the same time; returns the number of tokens."""

    async def one(sample: int) -> int:
        request = GenerateRequest(
            request_id=f"{name}-{tenant}-{sample}",
            prompt_token_ids=work.prompt,
            max_tokens=work.limit,
            drafts=drafts,
            sampling=SamplingParams(temperature=0.8 if work.num_samples > 1 else 0.0),
            seed=sample,
            policy=CapturePolicy(tenant=tenant, domain=work.workload, group_id=name if work.num_samples > 1 else ""),
        )
        return sum([len(chunk.token_ids) async for chunk in engine.generate(request)])

    return sum(await asyncio.gather(*(one(sample) for sample in range(work.num_samples))))

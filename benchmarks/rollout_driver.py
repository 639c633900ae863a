"""Local engines driven by the real scheduler, for benchmarks/rollouts.py: asks for leases, runs them, reports."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from serving.engine import CapturePolicy, GenerateRequest
from serving.local.engine import LocalEngine
from serving.rollout.scheduler import Policy, Scheduler
from serving.rollout.work import GroupRequest, Lease, SampleId
from speculator.sampling import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all requests of a rollout have in common."""

    sampling: SamplingParams
    tenant: str
    names_groups: bool
    """Whether engines are told which samples are of one group."""
    slots: int
    """Of each engine."""


@dataclass
class Rollout:
    """What a rollout gave and took."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    """Of this process."""
    ends_s: list[float] = field(default_factory=list)
    """Of the samples, in the order in which they ended."""
    texts: dict[SampleId, list[int]] = field(default_factory=dict)
    num_leases: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.texts.values()))

    @property
    def tail_s(self) -> float:
        """From the end of nine tenths of the samples to the end of the last."""
        return self.wall_s - self.ends_s[(9 * len(self.ends_s) + 9) // 10 - 1]


@dataclass(frozen=True, kw_only=True)
class Share:
    """Engines, and the batches that they answer one after another."""

    engines: Mapping[str, LocalEngine]
    batches: Sequence[Sequence[GroupRequest]]


class _Driver:
    def __init__(self, share: Share, policy: Policy, setting: Setting, outcome: Rollout, started_s: float) -> None:
        self.scheduler = Scheduler(policy)
        self._engines, self._setting = share.engines, setting
        self._running: dict[str, set[asyncio.Task[None]]] = {name: set() for name in share.engines}
        self._outcome, self._started_s = outcome, started_s

    async def run(self, groups: Sequence[GroupRequest]) -> None:
        """Until all of these have ended."""
        for group in groups:
            self.scheduler.submit(group)
        self._admit()
        while tasks := [task for running in self._running.values() for task in running]:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        self.scheduler.check()
        for group in groups:
            for index in range(len(group.seeds)):
                sample = self.scheduler.sample(SampleId(group.group_id, index))
                assert sample.state.has_ended, f"{sample.sample_id} was left over"
                self._outcome.texts[sample.sample_id] = list(sample.tokens)

    def _admit(self) -> None:
        for name, engine in self._engines.items():
            running = self._running[name]
            slots, length = self._setting.slots, engine.info.context_length
            promised = self.scheduler.promised_tokens(name) if running else 0
            for lease in self.scheduler.next_for(name, slots - len(running), slots * length - promised):
                task = asyncio.create_task(self._serve(engine, lease))
                running.add(task)

    async def _serve(self, engine: LocalEngine, lease: Lease) -> None:
        self._outcome.num_leases += 1
        group_id = lease.sample_id.group_id if self._setting.names_groups else ""
        request = GenerateRequest(
            request_id=f"{self._setting.tenant}-{lease.number}",
            prompt_token_ids=lease.prompt_token_ids,
            max_tokens=lease.max_tokens,
            sampling=self._setting.sampling,
            seed=lease.seed,
            policy=CapturePolicy(tenant=self._setting.tenant, group_id=group_id),
        )
        async with contextlib.aclosing(engine.generate(request)) as chunks:
            async for chunk in chunks:
                if chunk.finish_reason is not None:
                    reason = "stop" if chunk.finish_reason == "stop" else "length"
                    self.scheduler.finished(lease, chunk.token_ids, reason)
                    self._outcome.ends_s.append(time.perf_counter() - self._started_s)
                elif self.scheduler.progressed(lease, chunk.token_ids) == "stop":
                    break
        current = asyncio.current_task()
        assert current is not None
        self._running[lease.engine].discard(current)
        self._admit()


def drive(shares: Sequence[Share], policy: Policy, setting: Setting) -> Rollout:
    """All shares side by side; in each, every batch begins when the one before has ended."""

    async def one(share: Share, outcome: Rollout, started_s: float) -> None:
        driver = _Driver(share, policy, setting, outcome, started_s)
        for batch in share.batches:
            await driver.run(batch)

    async def run() -> Rollout:
        outcome, started_s, cpu_s = Rollout(), time.perf_counter(), time.process_time()
        await asyncio.gather(*(one(share, outcome, started_s) for share in shares))
        outcome.wall_s = time.perf_counter() - started_s
        outcome.cpu_s = time.process_time() - cpu_s
        outcome.ends_s.sort()
        return outcome

    return asyncio.run(run())

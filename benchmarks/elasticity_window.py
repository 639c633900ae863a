"""One window of benchmarks/elasticity.py: an engine answers bursts of requests, and what that took is counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import psutil

from benchmarks.elasticity_trainer import Trainer
from benchmarks.engines import stream
from serving.local.engine import LocalEngine
from speculator.pulse import RING, PulseBoard

# Its page remembers RING steps, and none takes less than 10 ms.
_LOOK_EVERY_S = 0.005 * RING


@dataclass(frozen=True)
class Arrival:
    due_s: float
    prompt: Sequence[int]
    num_tokens: int


class Step(NamedTuple):
    """One of the engine's; those of about the same batch and number of new tokens have the same shape."""

    shape: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Window:
    """What was measured while one variant ran."""

    gaps_ms: list[float]
    latencies_ms: list[float]
    steps: list[Step]
    idle_s: float
    trainer_s: float
    """CPU time of the trainer."""
    others_s: float
    """CPU time of what belongs to none of us."""
    learnt_tokens: float
    waited_s: float
    """That the trainer waited for the engine."""

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Self:
        """From JSON of `asdict`."""
        return cls(**{**fields, "steps": [Step(*step) for step in fields["steps"]]})


@dataclass(frozen=True)
class Measured:
    """The windows of each variant, round by round, and how many tokens the yielding trainer learnt from in a second
    of its own, before and after them.
    """

    windows: dict[str, list[Window]]
    alone_per_s: list[float]

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Self:
        """From JSON of `asdict`."""
        windows = {name: [Window.read(one) for one in every] for name, every in fields["windows"].items()}
        return cls(windows, fields["alone_per_s"])

    def __add__(self, more: Self) -> Self:
        """The rounds of both; the variants are the same."""
        windows = {name: every + more.windows[name] for name, every in self.windows.items()}
        return type(self)(windows, self.alone_per_s + more.alone_per_s)


class Scene:
    """What all windows have in common: the engine, its page, and the cores of all of it."""

    def __init__(self, engine: LocalEngine, board: PulseBoard, cores: Sequence[int]) -> None:
        self._engine, self._board, self._cores = engine, board, cores

    def window(self, trace: Sequence[Arrival], trainer: Trainer | None, least_s: float) -> Window:
        """Answer these requests, beside a trainer that otherwise stands still. A pause makes it `least_s` long."""
        learnt = waited_s = before_s = 0.0
        if trainer is not None:
            trainer.go_on()
            time.sleep(1.0)
            learnt, waited_s = trainer.progress()
            before_s = trainer.cpu_s()
        own, machine, started_s = time.process_time(), self._idle_s(), time.monotonic()
        gaps_ms, latencies_ms, steps = asyncio.run(self._serve(trace, least_s))
        wall_s = time.monotonic() - started_s
        idle_s = self._idle_s() - machine
        own_s = time.process_time() - own
        trainer_s = 0.0
        if trainer is not None:
            trainer_s = trainer.cpu_s() - before_s
            learnt_after, waited_after_s = trainer.progress()
            learnt, waited_s = learnt_after - learnt, waited_after_s - waited_s
            trainer.stand_still()
        return Window(
            gaps_ms=gaps_ms,
            latencies_ms=latencies_ms,
            steps=steps,
            idle_s=idle_s,
            trainer_s=trainer_s,
            others_s=len(self._cores) * wall_s - idle_s - own_s - trainer_s,
            learnt_tokens=learnt,
            waited_s=waited_s,
        )

    def _idle_s(self) -> float:
        """Idle seconds of the cores so far."""
        times = psutil.cpu_times(percpu=True)
        return float(sum(times[core].idle + times[core].iowait for core in self._cores))

    async def _serve(self, trace: Sequence[Arrival], least_s: float) -> tuple[list[float], list[float], list[Step]]:
        """Gaps, latencies and steps."""
        gaps_ms: list[float] = []
        latencies_ms: list[float] = []
        self._new_steps()
        steps: list[Step] = []
        started_s = time.monotonic() + 0.5

        async def answer(number: int, arrival: Arrival) -> None:
            due_s = started_s + arrival.due_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            last_s: float | None = None
            async for _ in stream(self._engine, str(number), arrival.prompt, arrival.num_tokens):
                now_s = time.monotonic()
                if last_s is not None:
                    gaps_ms.append(1000 * (now_s - last_s))
                last_s = now_s
            latencies_ms.append(1000 * (time.monotonic() - due_s))

        async def watch() -> None:
            while True:
                steps.extend(self._new_steps())
                await asyncio.sleep(_LOOK_EVERY_S)

        async with asyncio.TaskGroup() as watching:
            watcher = watching.create_task(watch())
            async with asyncio.TaskGroup() as group:
                for number, arrival in enumerate(trace):
                    group.create_task(answer(number, arrival))
            # The pause after the last burst belongs to the window.
            await asyncio.sleep(max(0.0, started_s + least_s - time.monotonic()))
            watcher.cancel()
        return gaps_ms, latencies_ms, steps + self._new_steps()

    def _new_steps(self) -> list[Step]:
        """Those that have ended since the last call."""
        self._board.look()
        return [Step(step.shape, (step.end_ns - step.begin_ns) / 1e9) for step in self._board.steps()]

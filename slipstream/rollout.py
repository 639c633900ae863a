"""Rollouts with environments: the model generates a turn of a sample, its environment answers, until either ends it.

    class Adder:
        async def reset(self, sample: SampleKey) -> None: ...
        async def step(self, text: str) -> Step:
            return Step(reward=float("4" in text), done=True)

    async with AsyncRollouts(url) as rollouts:
        played = Conversations(rollouts, [Group(prompt="2 + 2 =", n=8, redundant=2, max_tokens=64)], lambda _: Adder())
        async for sample in played:
            print(sample.key, played.rewards.get(sample.key))

Environments run in this client process. While one works, its sample holds no slot of an engine. A step that raises or
takes too long is tried again up to `retries` times, on the same environment; then the sample is aborted, and the others
go on.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, SupportsFloat

import msgspec

from slipstream.client import AsyncRollouts, Group, Sample, SampleKey, Turn
from speculator.errors import ConfigError, SlipstreamError, type_and_place

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Step:
    """An environment's answer to a turn. A text observation is appended to the sample as it is, messages by the model's
    chat template. With `done` the sample ends, without an observation. Rewards of a sample add up.
    """

    observation: str | Messages | None = None
    reward: float = 0.0
    done: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.reward, SupportsFloat) or not math.isfinite(self.reward):
            raise ValueError(f"reward is {self.reward!r}, not a number")
        object.__setattr__(self, "reward", float(self.reward))  # of NumPy or PyTorch, too
        if self.done == (self.observation is not None):
            raise ValueError("a Step needs either an observation or done=True")
        is_text = self.observation is None or isinstance(self.observation, str)
        if not is_text and not (isinstance(self.observation, Sequence) and self.observation):
            raise ValueError(f"observation is of {type(self.observation).__name__}, not a text or messages")


class Environment(Protocol):
    """Answers the turns of one sample. If it has `async def close(self)`, that is called once its sample has ended."""

    async def reset(self, sample: SampleKey) -> None:
        """Called before the first turn."""

    async def step(self, text: str) -> Step:
        """Answer a turn in which the model generated `text`."""


Factory = Callable[[SampleKey], Environment]


@dataclass
class Conversations:
    """One rollout; iterating it, once, gives its samples as they end. Raises as `AsyncRollout` does."""

    rollouts: AsyncRollouts
    groups: Sequence[Group | Mapping[str, Any]]
    make: Factory
    name: str = "environment"
    """The environment's name, as sent to the server."""
    step_timeout_s: float = 60.0
    retries: int = 0
    """Further attempts at a step that raised or took too long."""
    logprobs: bool = True
    places: Sequence[str] = ()
    """As in `AsyncRollouts.start`."""
    rewards: dict[SampleKey, float] = field(default_factory=dict)
    """Sum of each sample's rewards so far."""
    failures: dict[SampleKey, str] = field(default_factory=dict)
    """Why a sample's environment failed for good, or was not closed."""
    _environments: dict[SampleKey, Environment] = field(default_factory=dict)
    _finished: set[SampleKey] = field(default_factory=set)

    async def __aiter__(self) -> AsyncIterator[Sample]:
        groups = [_with_environment(group, self.name) for group in self.groups]
        self._rollout = self.rollouts.start(groups, logprobs=self.logprobs, places=self.places)
        samples: asyncio.Queue[Sample | None] = asyncio.Queue()
        reading = asyncio.create_task(self._read(samples))
        try:
            while (sample := await samples.get()) is not None:
                if sample.state == "finished":
                    self._finished.add(sample.key)
                yield sample
            await reading
        except BaseException:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            # Without this client nothing answers the samples' turns.
            with suppress(SlipstreamError):
                await self._rollout.cancel()
            raise

    async def cancel(self, groups: Iterable[str] | None = None) -> None:
        """As `AsyncRollout.cancel`; call after iteration began."""
        await self._rollout.cancel(groups)

    async def send_rewards(self) -> None:
        """Send the rewards of finished samples, so that the draft learns more from the better ones."""
        if rewards := {key: reward for key, reward in self.rewards.items() if key in self._finished}:
            await self._rollout.reward(rewards)

    async def _read(self, samples: asyncio.Queue[Sample | None]) -> None:
        answers: dict[SampleKey, asyncio.Task[None]] = {}
        try:
            async with asyncio.TaskGroup() as answering:
                async for said in self._rollout.samples_and_turns():
                    if isinstance(said, Turn):
                        answers[said.key] = answering.create_task(self._answer(said))
                    else:
                        if (answer := answers.pop(said.key, None)) is not None:
                            # The sample ended without this answer: it is redundant, stale, or past its deadline.
                            answer.cancel()
                        answering.create_task(self._close(said.key, answer))
                        samples.put_nowait(said)
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            samples.put_nowait(None)
            await asyncio.gather(*(self._close(key) for key in [*self._environments]))

    async def _close(self, key: SampleKey, answer: asyncio.Task[None] | None = None) -> None:
        """Close a sample's environment, if it can be closed, once `answer` no longer uses it."""
        if answer is not None:
            await asyncio.wait([answer])
        close = getattr(self._environments.pop(key, None), "close", None)
        try:
            async with asyncio.timeout(self.step_timeout_s):
                await close() if close is not None else None
        except (Exception, asyncio.CancelledError) as error:
            if _is_given_up(error):
                raise
            self.failures.setdefault(key, f"it was not closed: {type_and_place(error)}")

    async def _answer(self, turn: Turn) -> None:
        try:
            step = await self._step(turn)
        except (Exception, asyncio.CancelledError) as error:
            if _is_given_up(error):
                raise
            await self._fail(turn, "too slow" if isinstance(error, TimeoutError) else type_and_place(error))
            return
        self.rewards[turn.key] = self.rewards.get(turn.key, 0.0) + step.reward
        try:
            await self._rollout.observe(turn, step.observation)
        except ConfigError as refused:
            # It is too long, or the chat template refuses it. If the server has lost the rollout, `_fail` raises, too.
            await self._fail(turn, str(refused))
        except (TypeError, ValueError) as error:
            await self._fail(turn, f"its observation is no JSON: {type_and_place(error)}")

    async def _fail(self, turn: Turn, why: str) -> None:
        self.failures[turn.key] = why
        await self._rollout.observe(turn, failure=f"the environment failed: {why}")

    async def _step(self, turn: Turn) -> Step:
        for attempt in range(self.retries + 1):
            is_ready = turn.key in self._environments
            try:
                async with asyncio.timeout(self.step_timeout_s):
                    if not is_ready:
                        self._environments[turn.key] = self.make(turn.key)
                        await self._environments[turn.key].reset(turn.key)
                        is_ready = True
                    step = await self._environments[turn.key].step(turn.text)
                if not isinstance(step, Step):
                    raise TypeError(f"the environment's step returned {type(step).__name__}, not a Step")
                return step
            except (Exception, asyncio.CancelledError) as error:
                if not is_ready and not _is_given_up(error):
                    await self._close(turn.key)
                if attempt == self.retries or _is_given_up(error):
                    raise
        raise AssertionError("one attempt at least")


def _is_given_up(error: BaseException) -> bool:
    """Whether this task was cancelled. An environment may raise CancelledError by itself, which a task group would take
    for an end in order: its sample would wait for ever.
    """
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def _with_environment(group: Group | Mapping[str, Any], name: str) -> dict[str, Any]:
    named: dict[str, Any] = msgspec.to_builtins(group) if isinstance(group, Group) else dict(group)
    if named.setdefault("environment", name) != name:
        raise ConfigError(f"a group names the environment {named['environment']!r}, but this one is named {name!r}")
    return named

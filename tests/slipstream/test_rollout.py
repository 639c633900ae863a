"""Conversations with environments: none of them holds a slot, and every sample is accounted for."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from serving.gateway.app import create_app
from serving.gateway.config import GatewaySettings
from slipstream.cli.main import app
from slipstream.client import AsyncRollout, AsyncRollouts, Group, Rollouts, Sample, SampleKey
from slipstream.rollout import Conversations, Step
from speculator.errors import ConfigError, EngineError
from speculator.redis.trace_stream import GroupRewards
from tests.fixtures.doubles import DoubleEngine
from tests.hostile.api import running

NEVER_S = 60.0


@pytest.fixture
def engine() -> DoubleEngine:
    """One slot for rollouts."""
    return DoubleEngine(num_slots=1, context_length=4096)


@pytest.fixture
def rewarded() -> list[GroupRewards]:
    return []


@pytest.fixture
def url(engine: DoubleEngine, rewarded: list[GroupRewards]) -> Iterator[str]:
    gateway = create_app(engine, settings=GatewaySettings(), registry=CollectorRegistry(), send_rewards=rewarded.extend)
    with running(gateway) as site:
        yield site.url


class Talker:
    """Answers two turns and ends with the third; `does` may change what becomes of a step."""

    def __init__(self, does: Callable[[SampleKey, int], Awaitable[Step | None]] | None = None) -> None:
        self._does, self._turns = does, 0
        self.heard: list[str] = []
        self.key: SampleKey | None = None

    async def reset(self, sample: SampleKey) -> None:
        self.key = sample

    async def step(self, text: str) -> Step:
        assert self.key is not None, "it was reset before"
        self.heard.append(text)
        self._turns += 1
        if self._does is not None and (step := await self._does(self.key, self._turns)) is not None:
            return step
        return Step(reward=1.0, done=True) if self._turns == 3 else Step(observation="so?", reward=0.25)


def play(
    url: str, groups: list[Group], make: Callable[[SampleKey], Talker], **how: Any
) -> tuple[dict[SampleKey, Sample], Conversations]:
    async def run() -> tuple[dict[SampleKey, Sample], Conversations]:
        async with AsyncRollouts(url) as rollouts:
            played = Conversations(rollouts, groups, make, **how)
            samples = {sample.key: sample async for sample in played}
            await played.send_rewards()
            return samples, played

    return asyncio.run(asyncio.wait_for(run(), 30))


def test_a_sample_is_its_turns_and_what_came_between(
    engine: DoubleEngine, url: str, rewarded: list[GroupRewards]
) -> None:
    made: dict[SampleKey, Talker] = {}

    def make(key: SampleKey) -> Talker:
        made[key] = Talker()
        return made[key]

    samples, played = play(url, [Group(id="g", prompt="Say it.", n=3, max_tokens=100, turn_tokens=9)], make)
    assert len(samples) == 3
    for key, sample in samples.items():
        assert (sample.state, sample.finish_reason) == ("finished", "done")
        said = bytes(sample.tokens)
        assert sample.turns is not None
        assert [said[start:end].decode(errors="ignore") for start, end in sample.turns] == made[key].heard
        (first, second, third) = sample.turns
        assert said[first[1] : second[0]] == said[second[1] : third[0]] == b"so?"
        assert third[1] == len(said)
    assert set(played.rewards.values()) == {1.5}
    assert [group.rewards for group in rewarded] == [{0: 1.5, 1: 1.5, 2: 1.5}]
    prompts = Counter(len(request.prompt_token_ids) for request in engine.requests)
    assert prompts == {7: 3, 7 + 12: 3, 7 + 24: 3}, "each turn begins behind what was said before"


def test_messages_are_put_into_the_models_template(engine: DoubleEngine, url: str) -> None:
    async def once(_: SampleKey, turn: int) -> Step | None:
        return Step(observation=[{"role": "user", "content": "why?"}]) if turn == 1 else Step(done=True)

    group = Group(messages=[{"role": "user", "content": "hello"}], max_tokens=100, turn_tokens=8)
    samples, _ = play(url, [group], lambda _: Talker(once))
    (sample,) = samples.values()
    assert sample.turns is not None
    (first, second) = sample.turns
    assert bytes(sample.tokens[first[1] : second[0]]) == b"\n<user>why?\n<assistant>"


def test_an_environment_that_thinks_holds_no_slot(engine: DoubleEngine, url: str) -> None:
    """The slow one goes on when all others have ended: there is one slot."""
    others_ended = asyncio.Event()
    order: list[SampleKey] = []

    async def slow(key: SampleKey, turn: int) -> Step | None:
        if key.sample == 0 and turn == 1:
            await others_ended.wait()
        if turn == 3:
            order.append(key)
            if len(order) == 5:
                others_ended.set()
        return None

    samples, _ = play(url, [Group(prompt="Say.", n=6, max_tokens=60, turn_tokens=6)], lambda _: Talker(slow))
    assert {sample.finish_reason for sample in samples.values()} == {"done"}
    assert order[-1].sample == 0


async def _raises(key: SampleKey, turn: int) -> Step | None:
    raise OSError("the tool broke")


async def _hangs(key: SampleKey, turn: int) -> Step | None:
    await asyncio.sleep(NEVER_S)
    return None


async def _cancels_itself(key: SampleKey, turn: int) -> Step | None:
    """As a client library does that cancels its own work."""
    asyncio.get_running_loop().call_soon((work := asyncio.ensure_future(asyncio.sleep(NEVER_S))).cancel)
    await work
    return None


async def _is_no_step(key: SampleKey, turn: int) -> Step | None:
    return "an observation"  # type: ignore[return-value]


async def _has_no_reward(key: SampleKey, turn: int) -> Step | None:
    return Step(done=True, reward=math.nan)


def _observes(observation: Any) -> Callable[[SampleKey, int], Awaitable[Step | None]]:
    async def step(key: SampleKey, turn: int) -> Step | None:
        return Step(observation=observation)

    return step


@pytest.mark.parametrize(
    ("does", "why"),
    [
        (_observes("half a character: \ud800"), "UnicodeEncodeError"),
        (_observes([{"role": "user", "content": b"bytes"}]), "TypeError"),
        (_observes([{"role": "assistant", "content": "mine"}]), "starts with the assistant"),
        (_observes("x" * 5_000_000), "bytes"),
        (_raises, "OSError"),
        (_hangs, "too slow"),
        (_cancels_itself, "CancelledError"),
        (_is_no_step, "TypeError"),
        (_has_no_reward, "ValueError"),
    ],
)
def test_an_environment_that_fails_ends_its_sample_alone(
    url: str, does: Callable[[SampleKey, int], Awaitable[Step | None]], why: str
) -> None:
    def make(key: SampleKey) -> Talker:
        return Talker(does if key.sample == 1 else None)

    groups = [Group(id="g", prompt="Say.", n=3, max_tokens=60, turn_tokens=6)]
    samples, played = play(url, groups, make, step_timeout_s=0.3)
    bad = samples.pop(SampleKey("g", 1))
    assert (bad.state, bad.finish_reason) == ("aborted", "environment")
    assert why in (bad.detail or "")
    assert why in played.failures[bad.key]
    assert {sample.finish_reason for sample in samples.values()} == {"done"}


@pytest.mark.parametrize("error", [OSError("not yet"), asyncio.CancelledError()])
def test_a_step_may_be_tried_again(url: str, error: BaseException) -> None:
    tries: Counter[SampleKey] = Counter()

    async def flaky(key: SampleKey, turn: int) -> Step | None:
        tries[key] += 1
        if tries[key] == 1:
            raise error
        return Step(done=True, reward=2.0)

    groups = [Group(prompt="Say.", n=2, max_tokens=60, turn_tokens=6)]
    samples, played = play(url, groups, lambda _: Talker(flaky), retries=1)
    assert {sample.finish_reason for sample in samples.values()} == {"done"}
    assert not played.failures
    assert set(tries.values()) == {2}


def test_redundant_environments_are_given_up_once_enough_have_ended(url: str, rewarded: list[GroupRewards]) -> None:
    async def never(key: SampleKey, turn: int) -> Step | None:
        if key.sample in (0, 2) and turn == 2:
            await asyncio.sleep(NEVER_S)
        return None

    groups = [Group(id="g", prompt="Say.", n=3, redundant=2, max_tokens=60, turn_tokens=6)]
    samples, _ = play(url, groups, lambda _: Talker(never))
    reasons = {key.sample: sample.finish_reason for key, sample in samples.items()}
    assert reasons == {0: "redundant", 1: "done", 2: "redundant", 3: "done", 4: "done"}
    assert [sorted(group.rewards) for group in rewarded] == [[1, 3, 4]]


def test_redundant_samples_do_not_make_the_command_fail(url: str, tmp_path: Path) -> None:
    file = tmp_path / "groups.jsonl"
    file.write_text('{"prompt": "Say.", "n": 2, "redundant": 3, "max_tokens": 20}\n')
    ended = CliRunner().invoke(app, ["rollout", str(file), "--url", url])
    assert ended.exit_code == 0, ended.output
    assert "2 finished, 3 redundant" in ended.output


@pytest.mark.parametrize("more", [{"n": 2}, {"seeds": [1, 2, 3, 4, 5]}, {"n": 2, "seeds": [1, 2, 3, 4, 5]}])
def test_redundant_samples_without_an_environment(url: str, more: dict[str, Any]) -> None:
    with Rollouts(url) as rollouts:
        samples = list(rollouts.start([{"prompt": "Say.", "redundant": 3, "max_tokens": 20, **more}]))
    assert Counter(sample.finish_reason for sample in samples) == {"length": 2, "redundant": 3}


def test_groups_are_for_the_environment_that_they_name(url: str) -> None:
    group = Group(prompt="Say.", max_tokens=60, turn_tokens=6, environment="chess")
    samples, _ = play(url, [group], lambda _: Talker(), name="chess")
    assert [sample.finish_reason for sample in samples.values()] == ["done"]
    with pytest.raises(ConfigError, match="names the environment 'chess', but this one is named 'go'"):
        play(url, [group], lambda _: Talker(), name="go")


def test_what_has_no_room_ends_the_sample(url: str) -> None:
    async def long(key: SampleKey, turn: int) -> Step | None:
        return Step(observation="x" * 200)

    samples, _ = play(url, [Group(prompt="Say.", max_tokens=60, turn_tokens=6)], lambda _: Talker(long))
    (sample,) = samples.values()
    assert (sample.finish_reason, len(sample.tokens)) == ("length", 60)
    assert sample.turns == ((0, 6),)


def test_an_answer_that_fills_the_sample_is_rewarded(url: str, rewarded: list[GroupRewards]) -> None:
    async def judge(key: SampleKey, turn: int) -> Step | None:
        return Step(reward=np.float32(0.5), done=True) if key.sample else Step(reward=0.25, observation="And?")

    samples, played = play(url, [Group(id="g", prompt="Say.", n=2, max_tokens=20)], lambda _: Talker(judge))
    assert {(sample.finish_reason, sample.turns) for sample in samples.values()} == {("length", ((0, 20),))}
    assert played.rewards == {("g", 0): 0.25, ("g", 1): 0.5}
    assert [group.rewards for group in rewarded] == [{0: 0.25, 1: 0.5}]


def test_observations_that_cannot_be(url: str) -> None:
    with httpx.Client(base_url=url, trust_env=False) as http, Rollouts(url) as rollouts:
        groups = [Group(id="plain", prompt="a", max_tokens=3)]
        list(rollouts.start(groups, rollout_id="r"))

        def print_status(**one: Any) -> httpx.Response:
            observation = {"group_id": "plain", "sample": 0, "turn": 0, **one}
            return http.post("/v1/rollouts/r/observations", json={"observations": [observation]})

        assert print_status(text="a").status_code == 409
        assert print_status(text="a", sample=3).status_code == 404
        assert print_status(text="a", group_id="no").status_code == 404
        for wrong in ({}, {"text": "a", "done": True}, {"text": 3}, {"text": "a", "turn": -1}, {"text": "a", "x": 1}):
            assert print_status(**wrong).status_code == 400, wrong
        with pytest.raises(ConfigError, match="environment"):
            list(rollouts.start([Group(prompt="a", max_tokens=9, turn_tokens=3)]))
        with pytest.raises(ConfigError, match="waits for an environment"):
            list(rollouts.start([Group(prompt="a", max_tokens=30, turn_tokens=3, environment="e")]))


def test_an_observation_counts_once(engine: DoubleEngine, url: str) -> None:
    async def run() -> None:
        async with AsyncRollouts(url) as rollouts:
            rollout = rollouts.start([Group(prompt="a", max_tokens=30, turn_tokens=4, environment="e")])
            turns = 0
            async for said in rollout.samples_and_turns():
                if isinstance(said, Sample):
                    assert said.turns == ((0, 4), (5, 9))
                    continue
                turns += 1
                for _ in range(3):
                    await rollout.observe(said, "!" if turns == 1 else None)
            assert turns == 2

    asyncio.run(asyncio.wait_for(run(), 20))


def test_the_reason_of_a_failure_may_be_long(url: str) -> None:
    async def run() -> str | None:
        async with AsyncRollouts(url) as rollouts:
            rollout = rollouts.start([Group(prompt="a", max_tokens=30, turn_tokens=4, environment="e")])
            async for said in rollout.samples_and_turns():
                if isinstance(said, Sample):
                    return said.detail
                await rollout.observe(said, failure="why " * 1000)
        return None

    assert "why why" in (asyncio.run(asyncio.wait_for(run(), 20)) or "")


class Closable(Talker):
    """Talks, fails to start or hangs, and counts what is open."""

    def __init__(self, kind: str, open_now: Counter[str]) -> None:
        super().__init__(_hangs if kind == "hangs" else None)
        self._kind, self._open = kind, open_now
        open_now["now"] += 1

    async def reset(self, sample: SampleKey) -> None:
        if self._kind == "fails to start":
            raise OSError("no container")
        await super().reset(sample)

    async def close(self) -> None:
        self._open["now"] -= 1
        self._open["closed"] += 1
        if self._kind == "fails to close":
            raise OSError("it hangs on")


async def _hangs(key: SampleKey, turn: int) -> Step | None:
    await asyncio.sleep(60)
    return None


@pytest.mark.parametrize(
    ("kind", "num_opened"), [("talks", 3), ("fails to start", 6), ("fails to close", 3), ("hangs", 3)]
)
def test_an_environment_is_closed_once_its_sample_has_ended(
    engine: DoubleEngine, url: str, kind: str, num_opened: int
) -> None:
    open_now = Counter[str]()
    group = Group(prompt="Say.", n=3, max_tokens=60, turn_tokens=6)
    samples, played = play(url, [group], lambda _: Closable(kind, open_now), retries=1, step_timeout_s=0.3)
    assert len(samples) == 3
    assert open_now == {"now": 0, "closed": num_opened}
    why = {"talks": "", "fails to start": "OSError", "fails to close": "not closed: OSError", "hangs": "too slow"}[kind]
    assert all(why in reason for reason in played.failures.values())
    assert len(played.failures) == (0 if kind == "talks" else 3)


def test_an_environment_is_not_closed_under_its_step(url: str) -> None:
    order: list[str] = []
    begun = asyncio.Event()

    class Working(Talker):
        async def step(self, text: str) -> Step:
            assert self.key is not None
            if self.key.sample == 0:
                await begun.wait()
                return Step(done=True)
            begun.set()
            try:
                await asyncio.sleep(NEVER_S)
            finally:
                await asyncio.sleep(0)
                order.append("left")
            return Step(done=True)

        async def close(self) -> None:
            if self.key is not None and self.key.sample == 1:
                order.append("closed")

    play(url, [Group(prompt="Say.", n=1, redundant=1, max_tokens=60, turn_tokens=6)], lambda _: Working())
    assert order == ["left", "closed"]


def test_environments_are_closed_where_the_client_leaves(engine: DoubleEngine, url: str) -> None:
    open_now = Counter[str]()

    async def run() -> None:
        async with AsyncRollouts(url) as rollouts:
            group = Group(prompt="Say.", n=4, max_tokens=60, turn_tokens=6)

            def make(key: SampleKey) -> Closable:
                return Closable("talks" if key.sample == 0 else "hangs", open_now)

            async with aclosing(cast(AsyncGenerator[Sample], aiter(Conversations(rollouts, [group], make)))) as played:
                await anext(played)

    asyncio.run(asyncio.wait_for(run(), 30))
    assert open_now["now"] == 0
    assert open_now["closed"] > 0


def test_a_rollout_whose_answers_are_refused_is_cancelled(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*_: object, **__: object) -> None:
        raise ConfigError("the key was revoked")

    async def run() -> Any:
        async with AsyncRollouts(url) as rollouts:
            group = Group(prompt="Say.", n=3, max_tokens=60, turn_tokens=6)
            played = Conversations(rollouts, [group], lambda _: Talker())
            with pytest.raises(ConfigError, match="revoked"):
                async for _ in played:
                    pass
            return (await rollouts.http.get(f"/v1/rollouts/{played._rollout.rollout_id}")).json()

    monkeypatch.setattr(AsyncRollout, "observe", refused)
    assert asyncio.run(asyncio.wait_for(run(), 30))["state"] == "cancelled"


def test_why_a_rollout_ends_is_told_where_it_cannot_even_be_cancelled(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_: object, **__: object) -> None:
        raise ConfigError("the key was revoked")

    async def away(*_: object) -> None:
        raise EngineError("nobody answers")

    monkeypatch.setattr(AsyncRollout, "observe", refused)
    monkeypatch.setattr(AsyncRollout, "cancel", away)
    with pytest.raises(ConfigError, match="revoked"):
        play(url, [Group(prompt="Say.", max_tokens=60, turn_tokens=6)], lambda _: Talker())

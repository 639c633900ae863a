"""Which groups are kept, given up and learnt from again: by themselves, and against a gateway."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from serving.gateway.app import create_app
from serving.gateway.config import GatewaySettings
from slipstream.client import AsyncRollouts, Group, Rollouts, Sample, SampleKey
from slipstream.rollout import Conversations, Step
from slipstream.selection import GroupReplayBuffer, RewardedGroup, Selection
from speculator.errors import ConfigError
from tests.fixtures.doubles import DoubleEngine
from tests.hostile.api import running


@pytest.fixture
def url() -> Iterator[str]:
    app = create_app(DoubleEngine(), settings=GatewaySettings(), registry=CollectorRegistry())
    with running(app) as site:
        yield site.url


def sample(name: str, number: int, *, state: str = "finished", version: int = 0) -> Sample:
    return Sample(
        number=0,
        group_id=name,
        sample=number,
        seed=0,
        state=state,  # type: ignore[arg-type]
        finish_reason="stop",
        tokens=(1,),
        text="",
        logprobs=None,
        target_version=version,
        engine=None,
        num_leases=1,
    )


def test_a_group_teaches_where_its_rewards_differ() -> None:
    selection = Selection([Group(id="a", prompt="p", n=2), {"prompt": "p", "seeds": [1, 2]}])
    assert selection.add(sample("a", 0), 1.0) is None
    assert selection.add(sample("1", 0), 0.5) is None
    kept = selection.add(sample("a", 1), 0.0)
    assert kept is not None
    assert (kept.group_id, kept.rewards, [one.sample for one in kept.samples]) == ("a", (1.0, 0.0), [0, 1])
    assert selection.add(sample("1", 1), 0.5) is None
    assert selection.counts == {"kept": 1, "equal": 1}
    assert selection.take_cancelled() == []


def test_a_group_whose_first_samples_are_equal_is_given_up() -> None:
    selection = Selection([Group(id="a", prompt="p", n=5)], give_up_after=3)
    for number in range(3):
        selection.add(sample("a", number), 0.0)
        assert selection.take_cancelled() == (["a"] if number == 2 else [])
    assert selection.add(sample("a", 3, state="aborted"), None) is None
    assert selection.add(sample("a", 4, state="aborted"), None) is None
    assert selection.counts == {"given up": 1}


def test_a_group_that_ends_before_it_is_cancelled_is_as_good_as_another() -> None:
    selection = Selection([Group(id="a", prompt="p", n=3)], give_up_after=2)
    selection.add(sample("a", 0), 0.0)
    selection.add(sample("a", 1), 0.0)
    assert selection.take_cancelled() == ["a"]
    assert selection.add(sample("a", 2), 1.0) is not None


def test_once_enough_are_kept_the_others_are_cancelled() -> None:
    selection = Selection([Group(id=name, prompt="p", n=2) for name in "abc"], needed=1)
    selection.add(sample("b", 0), 0.0)
    selection.add(sample("c", 0), 0.0)
    assert selection.add(sample("b", 1), 1.0) is not None
    assert sorted(selection.take_cancelled()) == ["a", "c"]
    assert selection.add(sample("c", 1), 1.0) is None, "one was needed"
    for number in range(2):
        assert selection.add(sample("a", number, state="aborted"), None) is None
    assert selection.counts == {"kept": 1, "not needed": 2}


def test_a_group_is_cancelled_once_and_counted_by_the_first_reason() -> None:
    selection = Selection([Group(id=name, prompt="p", n=3) for name in "ab"], needed=1, give_up_after=2)
    selection.add(sample("b", 0), 0.0)
    for number in range(3):
        selection.add(sample("a", number), float(number))
    assert selection.take_cancelled() == ["b"]
    selection.add(sample("b", 1), 0.0)
    selection.add(sample("b", 2, state="aborted"), None)
    assert selection.take_cancelled() == []
    assert selection.counts == {"kept": 1, "not needed": 1}


def test_redundant_samples_are_awaited_too() -> None:
    selection = Selection([Group(id="a", prompt="p", n=2, redundant=1)])
    assert selection.add(sample("a", 0), 0.0) is None
    assert selection.add(sample("a", 2), 1.0) is None
    kept = selection.add(sample("a", 1, state="aborted"), None)
    assert kept is not None
    assert kept.rewards == (0.0, 1.0)


@pytest.mark.parametrize("reward", [math.nan, math.inf, None])
def test_a_reward_that_is_no_number(reward: float | None) -> None:
    with pytest.raises(ValueError, match="sample 0 of group a"):
        Selection([Group(id="a", prompt="p")]).add(sample("a", 0), reward)


def test_a_policy_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="at least one group"):
        Selection([], needed=0)
    with pytest.raises(ConfigError, match="two rewards"):
        Selection([], give_up_after=1)


@given(
    st.lists(st.lists(st.sampled_from([0.0, 1.0, None]), min_size=1, max_size=5), max_size=6),
    st.none() | st.integers(1, 3),
    st.none() | st.integers(2, 4),
    st.randoms(use_true_random=False),
)
def test_every_group_is_counted_once_in_whatever_order_samples_end(
    rewards: list[list[float | None]], needed: int | None, give_up_after: int | None, order: object
) -> None:
    groups = [Group(id=str(number), prompt="p", n=len(one)) for number, one in enumerate(rewards)]
    selection = Selection(groups, needed=needed, give_up_after=give_up_after)
    ends = [(name, number, reward) for name, one in enumerate(rewards) for number, reward in enumerate(one)]
    order.shuffle(ends)  # type: ignore[attr-defined]
    kept, cancelled = [], []
    for name, number, reward in ends:
        end = sample(str(name), number, state="aborted" if reward is None else "finished")
        if (group := selection.add(end, reward)) is not None:
            assert len({*group.rewards}) > 1
            kept.append(group)
        cancelled += selection.take_cancelled()
    assert selection.counts.total() == len(rewards)
    assert selection.counts["kept"] == len(kept) <= (needed or len(rewards))
    assert len({*cancelled}) == len(cancelled)


def test_what_is_too_old_is_not_learnt_from_again() -> None:
    replay = GroupReplayBuffer(capacity=3, max_staleness=1)
    for version in range(4):
        one = RewardedGroup(group_id=str(version), samples=(sample("g", 0, version=version),), rewards=(1.0,))
        replay.add(one)
    assert len(replay) == 3, "the oldest left for want of room"
    assert {one.group_id for one in replay.draw(9, target_version=3)} == {"2", "3"}
    assert len(replay.draw(1, target_version=3)) == 1
    assert [one.group_id for one in replay.draw(9, target_version=4)] == ["3"]
    assert len(replay) == 1


def test_a_group_is_as_old_as_its_oldest_sample() -> None:
    samples = (sample("g", 0, version=3), sample("g", 1, version=1))
    group = RewardedGroup(group_id="g", samples=samples, rewards=(0.0, 1.0))
    assert group.target_version == 1


def test_a_replay_buffer_has_room_for_no_more_after_it_was_drawn_from() -> None:
    replay = GroupReplayBuffer(capacity=2, max_staleness=1)
    for number in range(5):
        replay.add(RewardedGroup(group_id=str(number), samples=(sample("g", 0),), rewards=(1.0,)))
        replay.draw(1, target_version=0)
    assert {one.group_id for one in replay.draw(9, target_version=0)} == {"3", "4"}


def test_a_group_that_is_not_of_the_rollout_is_not_cancelled(url: str) -> None:
    with Rollouts(url) as rollouts:
        rollout = rollouts.start([Group(id="a", prompt="p", max_tokens=4)])
        assert len(list(rollout)) == 1
        rollout.cancel([])
        with pytest.raises(ConfigError, match="no group x"):
            rollout.cancel(["a", "x"])


def test_what_is_given_up_ends_and_the_others_go_on(url: str) -> None:
    """Two samples of a have the same reward; its others would never end."""

    class Judge:
        async def reset(self, sample: SampleKey) -> None:
            self.sample = sample

        async def step(self, _: str) -> Step:
            if self.sample.group_id == "a":
                if self.sample.sample > 1:
                    await asyncio.Event().wait()
                return Step(reward=1.0, done=True)
            return Step(reward=float(self.sample.sample), done=True)

    groups = [Group(id=name, prompt="p", n=4, max_tokens=20, turn_tokens=4) for name in "abc"]

    async def run() -> tuple[list[RewardedGroup], list[Sample], Selection]:
        async with AsyncRollouts(url) as rollouts:
            selection, kept, ends = Selection(groups, give_up_after=2), [], []
            played = Conversations(rollouts, groups, lambda _: Judge())
            async for one in played:
                ends.append(one)
                if (group := selection.add(one, played.rewards.get(one.key))) is not None:
                    kept.append(group)
                await played.cancel(selection.take_cancelled())
            return kept, ends, selection

    kept, ends, selection = asyncio.run(asyncio.wait_for(run(), 30))
    assert {group.group_id: sorted(group.rewards) for group in kept} == {name: [0.0, 1.0, 2.0, 3.0] for name in "bc"}
    assert selection.counts == {"kept": 2, "given up": 1}
    assert {one.key for one in ends if one.finish_reason == "cancelled"} == {("a", 2), ("a", 3)}
    assert len(ends) == 12

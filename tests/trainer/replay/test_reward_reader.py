"""What rewards do: a trace that was worth more than its siblings is drawn more often."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import redis
from prometheus_client import CollectorRegistry

from speculator.redis.client import RedisKeys
from speculator.redis.trace_stream import MAX_GROUPS, GroupRewards, RewardStream
from tests.trainer.stored import stored_of
from trainer.metrics import TrainerMetrics
from trainer.replay.buffer import ReplayBuffer, RewardWeights, reward_weights


@pytest.fixture
def stream(redis_client: redis.Redis) -> RewardStream:
    return RewardStream(redis_client, "toy")


class Reader(RewardWeights):
    """With a clock of its own."""

    def __init__(self, stream: RewardStream, bound: float = 2.0) -> None:
        self.now_s, self.registry = 0.0, CollectorRegistry()
        super().__init__(stream, bound=bound, metrics=TrainerMetrics(self.registry), clock=lambda: self.now_s)

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"slipstream_trainer_{name}", labels)


def group(group_id: str, *rewards: float, tenant: str = "t") -> GroupRewards:
    return GroupRewards(tenant=tenant, group_id=group_id, rewards=dict(enumerate(rewards)))


def weight(weights: RewardWeights, request_id: str, tenant: str = "t") -> float:
    return weights.weight(stored_of("x", tenant=tenant, request_id=request_id).provenance)


def test_weights_compare_samples_with_their_siblings() -> None:
    assert reward_weights({0: 1.0, 1: 0.0}, bound=2.0) == {0: 2.0, 1: 0.5}
    assert reward_weights({0: 1001.0, 1: 1000.0}, bound=2.0) == {0: 2.0, 1: 0.5}, "rewards have no common scale"
    assert reward_weights({0: 1.0, 1: 1.0}, bound=2.0) == {0: 1.0, 1: 1.0}
    assert reward_weights({3: 5.0}, bound=2.0) == {3: 1.0}
    found = reward_weights({0: 0.0, 1: 0.0, 2: 0.0, 3: 100.0, 4: 1.0}, bound=3.0)
    assert (found[3], found[0]) == (3.0, pytest.approx(3 ** ((0 - 20.2) / 39.9), rel=1e-3))


def test_rewards_are_read_once_and_later_ones_take_the_place_of_earlier_ones(stream: RewardStream) -> None:
    weights = Reader(stream)
    stream.append([group("k/a", 1, 0), group("k/b", 0, 0)])
    weights.poll()
    assert [weight(weights, f"k/a/{number}") for number in (0, 1, 2)] == [2.0, 0.5, 1.0]
    assert weight(weights, "k/b/0") == 1.0
    assert weight(weights, "k/a/0", tenant="other") == 1.0, "nobody rewards another's traces"
    assert [weight(weights, name) for name in ("k/a", "k/a/", "k/a/x", "k/a/²", "")] == [1.0] * 5
    stream.append([GroupRewards(tenant="t", group_id="k/a", rewards={1: 2.0})])
    weights.now_s += 10
    weights.poll()
    assert [weight(weights, f"k/a/{number}") for number in (0, 1)] == [0.5, 2.0]
    assert weights.metric("rewarded_samples_total") == 5, "each of them once"


def test_who_starts_again_reads_what_is_kept_and_passes_over_what_is_no_reward(
    stream: RewardStream, redis_client: redis.Redis
) -> None:
    key = RedisKeys(model_key="toy").rewards
    of_group = b'{"tenant":"t","group_id":"a","rewards":%s}'
    too_large = of_group % b'{"0":1.7e308,"1":1.7e308}'
    for payload in (b"", b"\xff", b"{}", of_group % b"{}", b'{"rewards":{"x":1}}', too_large):
        redis_client.xadd(key, {"rewards": payload})
    redis_client.xadd(key, {"other": b"1"})
    stream.append([group("a", 1, 0)])
    for weights in (Reader(stream), Reader(stream)):
        weights.poll()
        assert weight(weights, "a/0") == 2.0


def test_with_a_bound_of_one_nothing_is_read(stream: RewardStream) -> None:
    stream.append([group("a", 1, 0)])
    weights = Reader(stream, bound=1.0)
    weights.poll()
    assert weight(weights, "a/0") == 1.0


def test_the_oldest_groups_are_forgotten(stream: RewardStream, redis_client: redis.Redis) -> None:
    weights, first = Reader(stream), 2
    for numbers in (range(first), range(first, MAX_GROUPS + first)):
        stream.append([group(str(number), 1, 0) for number in numbers])
        weights.now_s += 10
        weights.poll()
    assert redis_client.xlen(RedisKeys(model_key="toy").rewards) == MAX_GROUPS
    assert [weight(weights, f"{number}/0") for number in (0, 1, 2, MAX_GROUPS)] == [1.0, 1.0, 2.0, 2.0]


def test_a_tenants_rewards_are_removed_and_what_may_be_its(stream: RewardStream, redis_client: redis.Redis) -> None:
    stream.append([group("a", 1, 0), group("b", 1, 0, tenant="other")])
    redis_client.xadd(RedisKeys(model_key="toy").rewards, {"rewards": b"unreadable"})
    assert stream.remove("t", dry_run=True) == 2
    assert stream.remove("t") == 2
    assert stream.remove("t") == 0
    assert [one.tenant for one in stream.read("0", 10)[0]] == ["other"]


def test_without_redis_nothing_is_lost_but_time(redis_client: redis.Redis, stream: RewardStream) -> None:
    redis_client.set(RedisKeys(model_key="toy").rewards, "somebody else's")
    weights = Reader(stream)
    weights.poll()
    assert weights.metric("stream_errors_total", operation="rewards") == 1
    redis_client.flushall()
    stream.append([group("a", 1, 0)])
    weights.poll()
    assert weight(weights, "a/0") == 1.0, "not at once again"
    weights.now_s += 10
    weights.poll()
    assert weight(weights, "a/0") == 2.0


def test_the_replay_draws_by_reward(stream: RewardStream) -> None:
    weights = Reader(stream)
    stream.append([group("g", 1, 0, tenant="default")])
    weights.poll()
    replay = ReplayBuffer(
        max_bytes=10**8,
        max_waiting=8,
        recent_share=0.5,
        max_tenant_share=0.6,
        rng=random.Random(0),
        reward_weight=weights.weight,
    )
    for number in range(2):
        replay.restore(stored_of(f"{number}", request_id=f"g/{number}"), domain="")
    drawn = Counter(replay.draw(1).batch[0].trace_id for _ in range(1000))
    assert 750 < drawn["0"] < 850, "four times as often: 800 of 1,000, give or take four standard deviations"

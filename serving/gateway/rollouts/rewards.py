"""What a client says its samples were worth, found again in the rollout that they are of."""

from __future__ import annotations

from collections import defaultdict

from serving.gateway.errors import ApiError
from serving.gateway.rollouts.rollout import Rollout
from serving.gateway.rollouts.schema import RewardsBody
from serving.rollout.nouns import State
from speculator.errors import RequestError
from speculator.redis.trace_stream import GroupRewards


def rewards_of(rollout: Rollout, body: RewardsBody) -> list[GroupRewards]:
    """By group. Raises ApiError (404, 409) or RequestError where one of them cannot be."""
    rewards: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for at, one in enumerate(body.rewards):
        param = f"rewards[{at}]"
        work = rollout.groups.get(one.group_id)
        if work is None or one.sample >= len(work.request.seeds):
            message = f"This rollout has no sample {one.sample} of a group {one.group_id}."
            raise ApiError(404, message, code="sample_not_found", param=param)
        if not work.policy.capture:
            message = "Nothing was recorded of this rollout, so rewards have no effect."
            raise ApiError(409, message, code="nothing_recorded", param=param)
        state = rollout.ends.get((one.group_id, one.sample))
        if state not in (State.FINISHED, State.STALE):
            message = f"Sample {one.sample} of group {one.group_id} has not finished."
            raise ApiError(409, message, code="sample_not_finished", param=param)
        if one.sample in rewards[one.group_id]:
            message = f"two rewards for sample {one.sample} of group {one.group_id}"
            raise RequestError(message, param=param, code="duplicate")
        rewards[one.group_id][one.sample] = one.reward
    return [
        GroupRewards(tenant=rollout.tenant, group_id=rollout.groups[name].request.group_id, rewards=of_group)
        for name, of_group in rewards.items()
    ]

"""What answers were worth, and how much more often those that were worth more are drawn.

Reinforcement learning moves the target towards what it rewards, so that is where the draft has to be good next: ReSpec
(arXiv 2510.26475) weights the draft's distillation by the reward of the rollout. Here the replay draws a trace by its
weight, which is the same in expectation and costs nothing for what counts little:

    weight = B^z,  z = (reward − mean of its group) / deviation of its group, cut to ±1

Only the place in the group counts, as in GRPO's advantage: rewards have no common scale, and a prompt that every answer
solves says nothing. A trace whose group has no rewards, or only equal ones, weighs 1.
"""

from __future__ import annotations

import statistics
import time
from collections import OrderedDict
from collections.abc import Mapping

import structlog

from speculator.errors import StreamError
from speculator.redis.trace_stream import MAX_GROUPS, START, GroupRewards, RewardStream
from trainer.ingest.trace_source import RETRY_S
from trainer.metrics import TrainerMetrics
from trainer.replay.provenance import Provenance

log = structlog.get_logger()

_LOOK_EVERY_S = 1.0
_CHUNK = 100


def reward_weights(rewards: Mapping[int, float], *, bound: float) -> dict[int, float]:
    """Of the samples of a group by number, each in [1/bound, bound]."""
    mean, deviation = statistics.fmean(rewards.values()), statistics.pstdev(rewards.values())
    if deviation <= 0:
        return dict.fromkeys(rewards, 1.0)
    return {
        number: float(bound ** max(-1.0, min(1.0, (reward - mean) / deviation))) for number, reward in rewards.items()
    }


class RewardWeights:
    """Reads the rewards as they come; the groups rewarded longest ago are forgotten. Owned by the training loop."""

    def __init__(self, stream: RewardStream, *, bound: float, metrics: TrainerMetrics) -> None:
        """With a `bound` of 1 rewards have no effect, and nothing is read."""
        self._stream, self._bound, self._metrics = stream, bound, metrics
        self._last_id = START
        self._next_look_s = 0.0
        # By tenant and group, the newest last.
        self._rewards: OrderedDict[tuple[str, str], dict[int, float]] = OrderedDict()
        self._weights: dict[tuple[str, str], dict[int, float]] = {}

    def look(self) -> None:
        """Take what came since, now and then. Redis being away is no error here."""
        if self._bound == 1 or time.monotonic() < self._next_look_s:
            return
        self._next_look_s = time.monotonic() + _LOOK_EVERY_S
        try:
            while True:
                groups, last_id = self._stream.read(self._last_id, _CHUNK)
                for group in groups:
                    self._take(group)
                if last_id == self._last_id:
                    return
                self._last_id = last_id
        except StreamError as error:
            self._metrics.stream_errors.labels("rewards").inc()
            self._next_look_s = time.monotonic() + RETRY_S
            log.warning("rewards not read", error=str(error), retry_s=RETRY_S)

    def weight(self, provenance: Provenance) -> float:
        """How much more often than others the trace is drawn."""
        group_id, _, number = provenance.request_id.rpartition("/")
        of_group = self._weights.get((provenance.tenant, group_id))
        return of_group.get(int(number), 1.0) if of_group and number.isdigit() and number.isascii() else 1.0

    def _take(self, group: GroupRewards) -> None:
        key = group.tenant, group.group_id
        self._rewards[key] = self._rewards.pop(key, {}) | group.rewards
        self._weights[key] = reward_weights(self._rewards[key], bound=self._bound)
        self._metrics.rewards.inc(len(group.rewards))
        while len(self._rewards) > MAX_GROUPS:
            oldest, _ = self._rewards.popitem(last=False)
            del self._weights[oldest]

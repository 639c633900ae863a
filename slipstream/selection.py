"""Select the groups of a rollout that a policy learns from: those whose rewards differ, and earlier ones again. No I/O.

    selection = Selection(groups, needed=4, give_up_after=6)
    for sample in rollout:
        if (group := selection.add(sample, reward(sample))) is not None:
            learn(group)
        rollout.cancel(selection.take_cancelled())

Where all rewards of a group are equal every advantage of GRPO is 0, and the group teaches nothing. It is dropped, and
further groups of the rollout replace it (dynamic sampling, DAPO, arXiv 2503.14476). A group whose first samples all
have one reward will most likely end so: it is given up early. Kept groups may be learnt from again while their target
version is recent enough (`GroupReplayBuffer`; the bound is ROLL Flash's α, arXiv 2510.11345).
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from slipstream.client import Group, Sample
from speculator.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RewardedGroup:
    """The finished samples of a group, with a reward each."""

    group_id: str
    samples: tuple[Sample, ...]
    rewards: tuple[float, ...]

    @property
    def target_version(self) -> int:
        """Target version of the oldest sample."""
        return min(sample.target_version or 0 for sample in self.samples)


class Selection:
    """Selects groups of one rollout; pass each sample to `add` once, as it ends."""

    def __init__(
        self,
        groups: Sequence[Group | Mapping[str, Any]],
        *,
        needed: int | None = None,
        give_up_after: int | None = None,
    ) -> None:
        """`groups` as the rollout was started with. Once `needed` groups are kept the others are cancelled. A group is
        given up once `give_up_after` (at least 2) of its samples have finished with one reward. Raises ConfigError.
        """
        if (needed is not None and needed < 1) or (give_up_after is not None and give_up_after < 2):
            raise ConfigError("`needed` must be at least one group, and `give_up_after` at least two rewards")
        self._needed, self._give_up_after = needed, give_up_after
        named = [msgspec.to_builtins(group) if isinstance(group, Group) else group for group in groups]
        self._num_left = {group.get("id") or str(number): _num_samples(group) for number, group in enumerate(named)}
        self._heard: dict[str, list[tuple[Sample, float]]] = {name: [] for name in self._num_left}
        self._over: dict[str, Literal["given up", "not needed"]] = {}
        self._cancelled: list[str] = []
        self.counts: Counter[Literal["kept", "equal", "given up", "not needed"]] = Counter()
        """Number of ended groups by outcome."""

    def add(self, sample: Sample, reward: float | None) -> RewardedGroup | None:
        """Take a sample that has ended, with its reward if it has finished; returns its group once that is complete, if
        the policy should learn from it. Raises ValueError where the reward is missing or not finite.
        """
        name = sample.group_id
        if sample.state == "finished":
            if reward is None or not math.isfinite(reward):
                raise ValueError(f"sample {sample.sample} of group {name} has finished with the reward {reward}")
            self._heard[name].append((sample, reward))
        self._num_left[name] -= 1
        heard = self._heard[name]
        is_equal = len({reward for _, reward in heard}) < 2
        if self._num_left[name]:
            if is_equal and len(heard) == self._give_up_after and name not in self._over:
                self._cancel(name, "given up")
            return None
        del self._heard[name]
        # A group that completed before it could be cancelled is as good as another.
        if is_equal or self.counts["kept"] == self._needed:
            self.counts[self._over.get(name, "equal" if is_equal else "not needed")] += 1
            return None
        self.counts["kept"] += 1
        if self.counts["kept"] == self._needed:
            for other in self._heard:
                if other not in self._over:
                    self._cancel(other, "not needed")
        return RewardedGroup(group_id=name, samples=tuple(one for one, _ in heard), rewards=tuple(r for _, r in heard))

    def take_cancelled(self) -> list[str]:
        """Groups to cancel; each is returned once."""
        cancelled, self._cancelled = self._cancelled, []
        return cancelled

    def _cancel(self, name: str, why: Literal["given up", "not needed"]) -> None:
        self._over[name] = why
        self._cancelled.append(name)


def _num_samples(group: Mapping[str, Any]) -> int:
    """Number of samples that the server starts for a group."""
    return len(group.get("seeds") or ()) or (group.get("n") or 1) + (group.get("redundant") or 0)


class GroupReplayBuffer:
    """Kept groups to learn from again: the newest `capacity`, at most `max_staleness` target versions old."""

    def __init__(self, *, capacity: int, max_staleness: int, seed: int = 0) -> None:
        self._groups: deque[RewardedGroup] = deque(maxlen=capacity)
        self._max_staleness, self._random = max_staleness, random.Random(seed)

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: RewardedGroup) -> None:
        self._groups.append(group)

    def draw(self, count: int, *, target_version: int) -> list[RewardedGroup]:
        """At most `count` different random groups; groups too old for `target_version` are dropped for good."""
        fresh = [one for one in self._groups if target_version - one.target_version <= self._max_staleness]
        self._groups = deque(fresh, maxlen=self._groups.maxlen)
        return self._random.sample(fresh, min(count, len(fresh)))

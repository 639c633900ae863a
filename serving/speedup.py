"""The speedup over plain decoding: measured from control rounds, and estimated from a cost model.

Measured: a small share of rounds runs at depth 0 and gives the baseline at the same batch size. The interval is a
jackknife over stretches of time, so that a machine that is slow for some seconds counts as one disturbance and not as
hundreds of slow rounds.

Estimated: committed tokens over what rounds cost. It needs no control round at the moment and follows every change at
once, and knows nothing of what the model leaves out: queues, prefills, interruptions. The two are never mixed.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

BASELINE = "depth0_same_batch"
"""Name of the baseline: plain decoding by the same engine, in the same minutes, at equal batch size."""

_STRETCH_ROUNDS = 48
_SETTLING_ROUNDS = 8
_NUM_BLOCKS = 20
_FEWEST_GROUPS = 5
_MAX_GROUPS = 64
_REST = ("other", "other")
_ENOUGH_TOKENS = 500
"""Tokens of drafting rounds in the window from which on a group's speedup is worth showing."""

Group = tuple[str, str]
"""(tenant, domain) of a request."""


class ControlShare:
    """Decides which rounds decode plainly, for each batch size by itself: rare ones have a baseline too.

    Every batch size collects its share round by round and spends one when it is due. The first is due at a random
    place, so that short visits to a batch size get their share as well, on average.
    """

    def __init__(self, share: float, seed: int = 0) -> None:
        self._share, self._random = share, random.Random(seed)
        self._due: dict[int, float] = {}

    def is_due(self, batch: int) -> bool:
        """What `is_control` will say of the next round of this size."""
        return self._next(batch) >= 1

    def is_control(self, batch: int) -> bool:
        due = self._next(batch)
        self._due[batch] = due - 1 if due >= 1 else due
        return due >= 1

    def _next(self, batch: int) -> float:
        if batch not in self._due:
            self._due[batch] = self._random.random()
        return self._due[batch] + self._share


class HeadArm(NamedTuple):
    """Of one drafting round in the A/B of the learned head beside remembered text."""

    may_ask: bool
    counts: bool
    """False where there is no A/B, and in the first rounds of a stretch."""


class HeadSwitch:
    """Decides in which drafting rounds the planner may ask the learned head: an A/B that measures what the head adds.

    One stretch of rounds in every cycle goes without the head, at a random place. A stretch and not a round: what the
    head proposes in one round changes what the next ones find. The first rounds of a stretch count for neither side,
    since the head then reads what it has missed.
    """

    def __init__(self, off_share: float, seed: int = 0) -> None:
        """`off_share` of the rounds go without the head; 0 is no A/B."""
        self._cycle = round(_STRETCH_ROUNDS / off_share) if off_share else 0
        self._random = random.Random(seed)
        self._place = self._off_from = self._num_since_change = 0
        self._was_on = True

    def next_arm(self) -> HeadArm:
        if not self._cycle:
            return HeadArm(may_ask=True, counts=False)
        if self._place == 0:
            self._off_from = self._random.randint(0, self._cycle - _STRETCH_ROUNDS)
        is_on = not self._off_from <= self._place < self._off_from + _STRETCH_ROUNDS
        self._num_since_change = self._num_since_change + 1 if is_on == self._was_on else 0
        self._was_on = is_on
        self._place = (self._place + 1) % self._cycle
        return HeadArm(is_on, self._num_since_change >= _SETTLING_ROUNDS)


Key = tuple[Hashable, bool]
"""(what rounds are compared by: their batch size, or more; arm: drafted or plain, with or without the head)."""


class Sums:
    """Seconds, tokens and rounds by kind of round and arm."""

    def __init__(self) -> None:
        self.seconds: dict[Key, float] = {}
        self.tokens: dict[Key, int] = {}
        self.rounds: dict[Key, int] = {}

    def add(self, kind: Hashable, drafted: bool, seconds: float, tokens: int, rounds: int = 1) -> None:
        key = kind, drafted
        self.seconds[key] = self.seconds.get(key, 0.0) + seconds
        self.tokens[key] = self.tokens.get(key, 0) + tokens
        self.rounds[key] = self.rounds.get(key, 0) + rounds

    def merge(self, other: Sums, sign: int = 1) -> Sums:
        """Add another's sums, or take them away again, and return this."""
        for key, seconds in other.seconds.items():
            self.add(*key, sign * seconds, sign * other.tokens[key], sign * other.rounds[key])
        return self

    def only(self, is_wanted: Callable[[Key], bool]) -> Sums:
        part = Sums()
        for key in filter(is_wanted, self.rounds):
            part.add(*key, self.seconds[key], self.tokens[key], self.rounds[key])
        return part

    def num_rounds(self, *, drafted: bool) -> int:
        return sum(count for (_, kind), count in self.rounds.items() if kind == drafted)

    @classmethod
    def over(cls, many: Iterable[Sums]) -> Sums:
        total = cls()
        for sums in many:
            total.merge(sums)
        return total


@dataclass(frozen=True)
class Speedup:
    """`ratio` = time a token at depth 0 over time a token with drafting; None until both were seen.

    Compared batch size by batch size and weighted by the time that drafting rounds spent in each. `lower` and `upper`
    bound the 95% interval; None where there is too little to tell.
    """

    ratio: float | None
    baseline_ms_per_token: float | None
    baseline_rounds: int
    speculative_rounds: int
    lower: float | None = None
    upper: float | None = None


@dataclass
class _Block:
    started_s: float
    sums: Sums = field(default_factory=Sums)
    groups: dict[Group, Sums] = field(default_factory=dict)


class SpeedupMeter:
    """Sums up the rounds of the last `window_s` seconds in twenty blocks of time; thread-safe."""

    def __init__(self, window_s: float = 120.0) -> None:
        self._window_s = window_s
        self._blocks: deque[_Block] = deque()
        self._known: set[Group] = set()
        self._num_of: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(
        self,
        *,
        batch: int,
        drafted: bool,
        seconds: float,
        committed: int,
        earned: Sequence[tuple[Group, int]] = (),
    ) -> None:
        """Count a round; `earned` says whose its tokens are. Each of its requests is charged the same time."""
        now = time.monotonic()
        with self._lock:
            block = self._block(now)
            block.sums.add(batch, drafted, seconds, committed)
            for group, tokens in earned if drafted else ():
                name = self._group(group)
                block.groups.setdefault(name, Sums()).add(batch, True, seconds / batch, tokens)

    def measure(self) -> Speedup:
        with self._lock:
            blocks = [Sums().merge(block.sums) for block in self._blocks]
        return measure(blocks)

    def measure_groups(self) -> dict[Group, Speedup]:
        """The speedup of each tenant and domain with enough tokens in the window, against everybody's baseline."""
        with self._lock:
            plain = [block.sums.only(lambda key: not key[1]) for block in self._blocks]
            names = {name for block in self._blocks for name in block.groups}
            blocks = {
                name: [
                    Sums().merge(sums).merge(block.groups.get(name, Sums()))
                    for sums, block in zip(plain, self._blocks, strict=True)
                ]
                for name in names
            }
        measured = {}
        for name, sums in blocks.items():
            tokens = sum(count for part in sums for (_, drafted), count in part.tokens.items() if drafted)
            if tokens >= _ENOUGH_TOKENS:
                measured[name] = measure(sums)
        return measured

    def _block(self, now: float) -> _Block:
        if not self._blocks or now - self._blocks[-1].started_s >= self._window_s / _NUM_BLOCKS:
            self._blocks.append(_Block(now))
        while self._blocks[0].started_s < now - self._window_s:
            self._blocks.popleft()
        return self._blocks[-1]

    def _group(self, group: Group) -> Group:
        """Labels are bounded: who comes late is among the rest. Clients make up domains: a tenant takes no more
        places than it leaves free.
        """
        if group not in self._known:
            if self._num_of[group[0]] >= _MAX_GROUPS - len(self._known):
                return _REST
            self._known.add(group)
            self._num_of[group[0]] += 1
        return group


def speedup(
    seconds: dict[Key, float],
    tokens: dict[Key, int],
    *,
    baseline_rounds: int,
    speculative_rounds: int,
) -> Speedup:
    """Measured speedup from sums keyed by (batch size, drafted?), without an interval.

    With drafting, batch size b took S_b seconds for N_b tokens; without, t_b seconds a token. The same tokens would
    have taken Σ N_b·t_b plainly, so the ratio is Σ N_b·t_b / Σ S_b over the batch sizes that have both.
    """
    both = [b for b, drafted in tokens if drafted and tokens[b, True] and tokens.get((b, False))]
    if not both:
        return Speedup(None, None, baseline_rounds, speculative_rounds)
    plain_s = sum(tokens[b, True] * seconds[b, False] / tokens[b, False] for b in both)
    drafted_tokens = sum(tokens[b, True] for b in both)
    return Speedup(
        ratio=plain_s / sum(seconds[b, True] for b in both),
        baseline_ms_per_token=1000 * plain_s / drafted_tokens,
        baseline_rounds=baseline_rounds,
        speculative_rounds=speculative_rounds,
    )


def measure(blocks: Sequence[Sums]) -> Speedup:
    """The speedup over all blocks, with its 95% interval."""
    total = Sums.over(blocks)
    found = _speedup(total)
    interval = jackknife(blocks, lambda sums: _log(_speedup(sums).ratio))
    if found.ratio is None or interval is None:
        return found
    half = _t95(interval.num_groups - 1) * interval.error
    return Speedup(
        found.ratio,
        found.baseline_ms_per_token,
        found.baseline_rounds,
        found.speculative_rounds,
        lower=found.ratio * math.exp(-half),
        upper=found.ratio * math.exp(half),
    )


@dataclass(frozen=True)
class Estimate:
    value: float
    error: float
    """Standard error."""
    num_groups: int


def jackknife(blocks: Sequence[Sums], statistic: Callable[[Sums], float | None]) -> Estimate | None:
    """A statistic of all blocks and its standard error, from leaving out one group of neighbouring blocks at a time.

    None where the statistic, or that of too many parts, cannot be computed, or where there are fewer than five groups.
    Efron and Tibshirani, "An Introduction to the Bootstrap", chapter 11.
    """
    total = Sums.over(blocks)
    value = statistic(total)
    size = math.ceil(len(blocks) / _NUM_BLOCKS) or 1
    groups = [Sums.over(blocks[first : first + size]) for first in range(0, len(blocks), size)]
    if value is None or len(groups) < _FEWEST_GROUPS:
        return None
    left = [statistic(Sums().merge(total).merge(group, -1)) for group in groups]
    known = [part for part in left if part is not None]
    if len(known) < len(groups) - 1:
        return None
    mean = sum(known) / len(known)
    variance = (len(known) - 1) / len(known) * sum((part - mean) ** 2 for part in known)
    return Estimate(value, math.sqrt(variance), len(groups))


def _t95(df: int) -> float:
    """Student's t for a 95% interval, by its expansion around the normal quantile."""
    return 1.96 + 2.37 / df + 2.82 / df**2


def _speedup(sums: Sums) -> Speedup:
    return speedup(
        sums.seconds,
        sums.tokens,
        baseline_rounds=sums.num_rounds(drafted=False),
        speculative_rounds=sums.num_rounds(drafted=True),
    )


def _log(ratio: float | None) -> float | None:
    return math.log(ratio) if ratio and ratio > 0 else None


PLAN_MODEL = "planned_rounds"
_KEPT_ROUNDS = 2000


class PlannedSpeedup:
    """For rounds that were planned by what they are expected to take. `add` is for the thread that decodes.

    With n_r tokens that round r of batch size b_r committed, its expected time T_r and that of a plain round V_r:

        estimate = Σ n_r · V_r / b_r / Σ T_r
    """

    def __init__(self) -> None:
        self._rounds: deque[tuple[float, float]] = deque(maxlen=_KEPT_ROUNDS)

    def add(self, *, batch: int, committed: int, expected_s: float, plain_s: float) -> None:
        self._rounds.append((committed * plain_s / batch, expected_s))

    def ratio(self) -> float | None:
        """For any thread; None before the first round."""
        rounds = list(self._rounds)
        return sum(plain for plain, _ in rounds) / sum(planned for _, planned in rounds) if rounds else None

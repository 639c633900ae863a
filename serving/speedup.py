"""The speedup over plain decoding: measured from control rounds, and estimated from what rounds should cost.

Measured: a small share of rounds runs at depth 0 and gives the baseline at the same batch size. Whoever compares two
arms, drafting with plain rounds, a client's answers with those of a plain server, or rounds with the draft head and
without it, adds seconds and tokens to one `Sums` for each stretch of time and asks `measure`. The interval is a
jackknife over the stretches, so that a machine that is slow for some seconds counts as one disturbance and not as
hundreds of slow rounds.

Estimated: committed tokens over what rounds cost. It needs no control round at the moment and follows every change at
once, and knows nothing of what the costs leave out: queues, prefills, interruptions. The two are never mixed.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

BASELINE = "depth0_same_batch"
"""Name of the baseline: plain decoding by the same engine, in the same minutes, at equal batch size."""
PLAN_MODEL = "planned_rounds"
"""Name of the cost model behind the estimate: what the planner expects of its rounds."""

_STRETCH_ROUNDS = 48
_SETTLING_ROUNDS = 8
_NUM_BLOCKS = 20
_FEWEST_GROUPS = 5
_MAX_GROUPS = 64
_REST = ("other", "other")
_ENOUGH_TOKENS = 500
"""Tokens of drafting rounds in the window from which on a group's speedup is worth showing."""
_KEPT_ROUNDS = 2000

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


class _Totals(NamedTuple):
    seconds: float = 0.0
    tokens: int = 0
    rounds: int = 0


class Sums:
    """Seconds, tokens and rounds of one stretch of time, by batch size and arm (drafted or plain)."""

    def __init__(self) -> None:
        self._totals: dict[tuple[int, bool], _Totals] = {}

    def add(self, batch: int, drafted: bool, seconds: float, tokens: int, rounds: int = 1) -> None:
        before = self._totals.get((batch, drafted), _Totals())
        self._totals[batch, drafted] = _Totals(before.seconds + seconds, before.tokens + tokens, before.rounds + rounds)

    def merge(self, other: Sums, sign: int = 1) -> Sums:
        """Add another's sums, or take them away again, and return this."""
        for (batch, drafted), totals in other._totals.items():
            self.add(batch, drafted, sign * totals.seconds, sign * totals.tokens, sign * totals.rounds)
        return self

    @classmethod
    def over(cls, many: Iterable[Sums]) -> Sums:
        total = cls()
        for sums in many:
            total.merge(sums)
        return total

    def plain(self) -> Sums:
        """Those of plain rounds alone."""
        part = Sums()
        part._totals = {key: totals for key, totals in self._totals.items() if not key[1]}
        return part

    def num_tokens(self, *, drafted: bool) -> int:
        return sum(totals.tokens for (_, arm), totals in self._totals.items() if arm == drafted)

    def num_rounds(self, *, drafted: bool) -> int:
        return sum(totals.rounds for (_, arm), totals in self._totals.items() if arm == drafted)

    def speedup(self) -> Speedup:
        """Without an interval.

        With drafting, batch size b took S_b seconds for N_b tokens; without, t_b seconds a token. The same tokens would
        have taken Σ N_b·t_b plainly, so the ratio is Σ N_b·t_b / Σ S_b over the batch sizes that have both.
        """
        num_plain, num_drafted = self.num_rounds(drafted=False), self.num_rounds(drafted=True)
        plain_s = drafted_s = 0.0
        num_tokens = 0
        for (batch, drafted), totals in self._totals.items():
            plain = self._totals.get((batch, False))
            if drafted and totals.tokens and plain is not None and plain.tokens:
                plain_s += totals.tokens * plain.seconds / plain.tokens
                drafted_s += totals.seconds
                num_tokens += totals.tokens
        if not num_tokens:
            return Speedup(None, None, num_plain, num_drafted)
        return Speedup(plain_s / drafted_s, 1000 * plain_s / num_tokens, num_plain, num_drafted)


def measure(blocks: Sequence[Sums]) -> Speedup:
    """The speedup over all stretches of time, with its 95% interval.

    The standard error of the logarithm is a jackknife's, which leaves out one group of neighbouring blocks at a time
    (Efron and Tibshirani, "An Introduction to the Bootstrap", chapter 11). There is no interval where there are fewer
    than five groups, or most of the control rounds are in one of them.
    """
    total = Sums.over(blocks)
    found = total.speedup()
    size = math.ceil(len(blocks) / _NUM_BLOCKS) or 1
    groups = [Sums.over(blocks[first : first + size]) for first in range(0, len(blocks), size)]
    ratios = [Sums().merge(total).merge(group, -1).speedup().ratio for group in groups]
    logs = [math.log(ratio) for ratio in ratios if ratio is not None and ratio > 0]
    if not found.ratio or len(groups) < _FEWEST_GROUPS or len(logs) < len(groups) - 1:
        return found
    mean = sum(logs) / len(logs)
    error = math.sqrt((len(logs) - 1) / len(logs) * sum((one - mean) ** 2 for one in logs))
    half = _t95(len(groups) - 1) * error
    return replace(found, lower=found.ratio * math.exp(-half), upper=found.ratio * math.exp(half))


def _t95(df: int) -> float:
    """Student's t for a 95% interval, by its expansion around the normal quantile."""
    return 1.96 + 2.37 / df + 2.82 / df**2


@dataclass
class _Block:
    started_s: float
    sums: Sums = field(default_factory=Sums)
    groups: dict[Group, Sums] = field(default_factory=dict)


class SpeedupMeter:
    """Sums up the rounds of the last `window_s` seconds in twenty blocks of time; thread-safe.

    `clock` gives seconds, of any origin.
    """

    def __init__(self, window_s: float = 120.0, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_s, self._clock = window_s, clock
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
        now_s = self._clock()
        with self._lock:
            block = self._block(now_s)
            block.sums.add(batch, drafted, seconds, committed)
            for group, tokens in earned if drafted else ():
                block.groups.setdefault(self._label(group), Sums()).add(batch, True, seconds / batch, tokens)

    def measure(self) -> Speedup:
        with self._lock:
            blocks = [Sums().merge(block.sums) for block in self._blocks]
        return measure(blocks)

    def measure_groups(self) -> dict[Group, Speedup]:
        """The speedup of each tenant and domain with enough tokens in the window, against everybody's baseline."""
        with self._lock:
            plain = [block.sums.plain() for block in self._blocks]
            names = {name for block in self._blocks for name in block.groups}
            drafted = {name: [Sums().merge(block.groups.get(name, Sums())) for block in self._blocks] for name in names}
        return {
            name: measure([sums.merge(baseline) for sums, baseline in zip(blocks, plain, strict=True)])
            for name, blocks in drafted.items()
            if sum(sums.num_tokens(drafted=True) for sums in blocks) >= _ENOUGH_TOKENS
        }

    def _block(self, now_s: float) -> _Block:
        if not self._blocks or now_s - self._blocks[-1].started_s >= self._window_s / _NUM_BLOCKS:
            self._blocks.append(_Block(now_s))
        while self._blocks[0].started_s < now_s - self._window_s:
            self._blocks.popleft()
        return self._blocks[-1]

    def _label(self, group: Group) -> Group:
        """Labels are bounded: who comes late is among the rest. Clients make up domains: a tenant takes no more
        places than it leaves free.
        """
        if group not in self._known:
            if self._num_of[group[0]] >= _MAX_GROUPS - len(self._known):
                return _REST
            self._known.add(group)
            self._num_of[group[0]] += 1
        return group


class EstimatedSpeedup:
    """The speedup that the costs of rounds suggest. `add` is for the thread that decodes, `ratio` for any.

    With n_r tokens that round r of batch size b_r committed, its expected time T_r and that of a plain round V_r:

        estimate = Σ n_r · V_r / b_r / Σ T_r
    """

    def __init__(self) -> None:
        self._rounds: deque[tuple[float, float]] = deque(maxlen=_KEPT_ROUNDS)

    def add(self, *, batch: int, committed: int, expected_s: float, plain_s: float) -> None:
        """A round that is no control round."""
        self._rounds.append((committed * plain_s / batch, expected_s))

    def ratio(self) -> float | None:
        """None before the first round."""
        rounds = list(self._rounds)
        return sum(plain for plain, _ in rounds) / sum(expected for _, expected in rounds) if rounds else None

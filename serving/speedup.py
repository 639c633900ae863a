"""The speedup over plain decoding: measured from control rounds, and estimated from what rounds should cost.

Measured: a small share of rounds runs at depth 0 and gives the baseline at the same batch size. End to end: in some
stretches of rounds all requests are served plainly, and all time counts. Whoever compares two arms, drafting with plain
rounds, a client's answers with those of a plain server, or rounds with the draft head and without it, adds seconds and
tokens to one `Sums` for each stretch of time and asks `measure`. The interval is a jackknife over the stretches, so
that a machine that is slow for some seconds counts as one disturbance and not as hundreds of slow rounds.

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
SERVED_PLAINLY = "served_plainly"
"""Name of the baseline of the end-to-end speedup: stretches of rounds in which all requests are served plainly."""
SUFFIX_ONLY = "suffix_only"
"""Name of the baseline of the draft head: stretches of rounds with earlier text alone."""
HEAD_AB_ARMS = (SUFFIX_ONLY, "both")
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


class Arm(NamedTuple):
    """Of one round in an A/B."""

    is_on: bool
    counts: bool
    """False where there is no A/B, and in the first rounds of a stretch."""


NO_AB = Arm(is_on=True, counts=False)


class Stretches:
    """Decides in which rounds something is left out: an A/B that measures what it brings.

    One stretch of rounds in every cycle goes without, at a random place. A stretch and not a round: what a round
    proposes, or how long it takes, changes what the next ones find. The first rounds of a stretch count for neither
    side: they still have to do with the one before. Who counts the same rounds decides the same.
    """

    def __init__(self, off_share: float, seed: int = 0) -> None:
        """`off_share` of the rounds go without; 0 is no A/B."""
        self._cycle = round(_STRETCH_ROUNDS / off_share) if off_share else 0
        self._random = random.Random(seed)
        self._place = self._off_from = self._num_since_change = 0
        self._was_on = True
        self.num_cycles = 0
        """That have begun."""

    def next_arm(self) -> Arm:
        if not self._cycle:
            return NO_AB
        if self._place == 0:
            self._off_from = self._random.randint(0, self._cycle - _STRETCH_ROUNDS)
            self.num_cycles += 1
        is_on = not self._off_from <= self._place < self._off_from + _STRETCH_ROUNDS
        self._num_since_change = self._num_since_change + 1 if is_on == self._was_on else 0
        self._was_on = is_on
        self._place = (self._place + 1) % self._cycle
        return Arm(is_on, self._num_since_change >= _SETTLING_ROUNDS)


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


NOTHING_MEASURED = Speedup(None, None, 0, 0)


class _Totals(NamedTuple):
    seconds: float = 0.0
    tokens: int = 0
    rounds: int = 0


class Sums:
    """Seconds, tokens and rounds of one stretch of time, by batch size and arm (drafted or plain)."""

    def __init__(self) -> None:
        self._totals: dict[tuple[int, bool], _Totals] = {}
        self._shared_s = 0.0

    def add(self, batch: int, drafted: bool, seconds: float, tokens: int, rounds: int = 1) -> None:
        before = self._totals.get((batch, drafted), _Totals())
        self._totals[batch, drafted] = _Totals(before.seconds + seconds, before.tokens + tokens, before.rounds + rounds)

    def add_shared(self, seconds: float) -> None:
        """That all tokens need, of whichever arm they are, as for their prompts."""
        self._shared_s += seconds

    def merge(self, other: Sums, sign: int = 1) -> Sums:
        """Add another's sums, or take them away again, and return this."""
        self._shared_s += sign * other._shared_s
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
        have taken Σ N_b·t_b plainly, so the ratio is Σ N_b·t_b / Σ S_b over the batch sizes that have both. What all
        tokens need is added to both sums by these tokens' part in all: it varies too much to be compared.
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
            return replace(NOTHING_MEASURED, baseline_rounds=num_plain, speculative_rounds=num_drafted)
        num_all = self.num_tokens(drafted=False) + self.num_tokens(drafted=True)
        shared_s = self._shared_s * num_tokens / num_all
        ratio = (plain_s + shared_s) / (drafted_s + shared_s)
        return Speedup(ratio, 1000 * (plain_s + shared_s) / num_tokens, num_plain, num_drafted)


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


class StretchSpeedup:
    """An A/B with stretches of rounds in which something is left out: what it speeds up, with a 95% interval.

    End to end, all requests are served plainly in these stretches, and all of the engine's time counts while requests
    are there: decode rounds, what lies between them, what a trainer beside them takes, and the prompts, whose time is
    the same for both arms. It is that of the last twenty cycles, with a stretch in each. `measure` is for any thread,
    the rest for the one that decodes.
    """

    def __init__(self, off_share: float) -> None:
        self._stretches = Stretches(off_share)
        self._cycles: deque[Sums] = deque(maxlen=_NUM_BLOCKS)
        self._num_cycles = 0
        self._lock = threading.Lock()

    def next_arm(self) -> Arm:
        """Of the next round; it is to go without where the arm is not on."""
        return self._stretches.next_arm()

    def add(self, arm: Arm, *, batch: int, seconds: float, committed: int, prompts_s: float) -> None:
        """A round, and the time since the last one in which prompts were read."""
        if not arm.counts:
            return
        with self._lock:
            if self._num_cycles != self._stretches.num_cycles:
                self._num_cycles = self._stretches.num_cycles
                self._cycles.append(Sums())
            self._cycles[-1].add(batch, arm.is_on, seconds, committed)
            self._cycles[-1].add_shared(prompts_s)

    def measure(self) -> Speedup:
        with self._lock:
            cycles = [Sums().merge(cycle) for cycle in self._cycles]
        return measure(cycles)


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

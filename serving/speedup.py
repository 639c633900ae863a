"""The speedup over plain decoding: measured from control rounds, and estimated from the cost model.

Measured: a small share of rounds runs at depth 0 and gives the baseline at the same batch size. End to end: in some
stretches of rounds all requests are served plainly, and all time counts. To compare two arms (drafting and plain
rounds, a client's answers and those of a plain server, rounds with the draft head and without it), a caller adds
seconds and tokens to one `Sums` for each stretch of time and calls `measure`. The interval is a jackknife over the
stretches, so that a machine that is slow for some seconds counts as one disturbance, not as hundreds of slow rounds.

Estimated: committed tokens over the expected time of rounds. It needs no recent control round and follows every change
at once, but ignores what the cost model leaves out: queues, prefills, interruptions. The two are never mixed.
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
"""Name of the baseline of the draft head: stretches of rounds with suffix drafts alone."""
HEAD_AB_ARMS = (SUFFIX_ONLY, "both")
PLAN_MODEL = "planned_rounds"
"""Name of the estimate's cost model: the tokens and times that the planner expects of its rounds."""

_STRETCH_ROUNDS = 48
_SETTLING_ROUNDS = 8
_NUM_BLOCKS = 20
_FEWEST_GROUPS = 5
_MAX_GROUPS = 64
_REST = ("other", "other")
_ENOUGH_TOKENS = 500
"""A group's speedup is shown from so many tokens of drafting rounds in the window on."""
_KEPT_ROUNDS = 2000

Group = tuple[str, str]
"""(tenant, domain) of a request."""


class ControlShare:
    """Decides which rounds are control rounds, for each batch size separately, so that rare sizes have a baseline too.

    Each round adds the share to its batch size's account; at 1 a control round is due. The first is due at a random
    round, so that short runs of a batch size get their share on average.
    """

    def __init__(self, share: float, seed: int = 0) -> None:
        self._share, self._random = share, random.Random(seed)
        self._due: dict[int, float] = {}

    def is_due(self, batch: int) -> bool:
        """What `is_control` will return for the next round of this size."""
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
    """The arm of one round in an A/B test."""

    is_on: bool
    counts: bool
    """False where there is no A/B, and in the first rounds of a stretch."""


NO_AB = Arm(is_on=True, counts=False)


class AbSchedule:
    """Decides in which rounds a feature is off: an A/B test of what the feature gains.

    In every cycle of rounds the feature is off for one stretch, at a random place. Not for single rounds: what a round
    proposes, or how long it takes, affects the next ones. The first rounds after a switch count for neither arm,
    since the other arm still affects them. Processes that count the same rounds decide the same.
    """

    def __init__(self, off_share: float, seed: int = 0) -> None:
        """`off_share` of the rounds have the feature off; 0: no A/B test."""
        self._cycle = round(_STRETCH_ROUNDS / off_share) if off_share else 0
        self._random = random.Random(seed)
        self._place = self._off_from = self._num_since_change = 0
        self._was_on = True
        self.num_cycles = 0
        """Cycles that have begun."""

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
    """Measured speedup: `ratio` = time a token at depth 0 over time a token with drafting; None until both were seen.

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
        """Add time that tokens of both arms need alike, such as the prefill of their prompts."""
        self._shared_s += seconds

    def merge(self, other: Sums, sign: int = 1) -> Sums:
        """Add the sums of `other` (`sign` −1: subtract them) in place; returns self."""
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
        """The sums of plain rounds alone."""
        part = Sums()
        part._totals = {key: totals for key, totals in self._totals.items() if not key[1]}
        return part

    def num_tokens(self, *, drafted: bool) -> int:
        return sum(totals.tokens for (_, arm), totals in self._totals.items() if arm == drafted)

    def num_rounds(self, *, drafted: bool) -> int:
        return sum(totals.rounds for (_, arm), totals in self._totals.items() if arm == drafted)

    def speedup(self) -> Speedup:
        """The speedup without an interval.

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
    than five groups, or where one of them has all rounds of an arm.
    """
    total = Sums.over(blocks)
    found = total.speedup()
    size = math.ceil(len(blocks) / _NUM_BLOCKS) or 1
    groups = [Sums.over(blocks[first : first + size]) for first in range(0, len(blocks), size)]
    ratios = [Sums().merge(total).merge(group, -1).speedup().ratio for group in groups]
    logs = [math.log(ratio) for ratio in ratios if ratio is not None and ratio > 0]
    if not found.ratio or len(groups) < _FEWEST_GROUPS or len(logs) < len(groups):
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
    """Measures the speedup over the rounds of the last `window_s` seconds, in twenty blocks of time; thread-safe.

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
        """Count a round; `earned`: its tokens by group, an entry a request. Each request is charged the same time."""
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
        """The label of a group. Labels are bounded: groups that come late share one. Clients choose domains, so a
        tenant gets no more labels than remain free.
        """
        if group not in self._known:
            if self._num_of[group[0]] >= _MAX_GROUPS - len(self._known):
                return _REST
            self._known.add(group)
            self._num_of[group[0]] += 1
        return group


class AbSpeedup:
    """The speedup by a feature that an A/B test turns off in stretches of rounds (`AbSchedule`), with a 95% interval.

    End to end, the stretches serve all requests plainly, and all of the engine's time counts while it has requests:
    decode rounds, the time between them, what a trainer beside it takes, and the prompts, whose time both arms share.
    Covers the last twenty cycles. `measure` is for any thread, the rest for the one that decodes.
    """

    def __init__(self, off_share: float) -> None:
        self._stretches = AbSchedule(off_share)
        self._cycles: deque[Sums] = deque(maxlen=_NUM_BLOCKS)
        self._num_cycles = 0
        self._lock = threading.Lock()

    def next_arm(self) -> Arm:
        """The arm of the next round: the feature must be off in it unless the arm is on."""
        return self._stretches.next_arm()

    def add(self, arm: Arm, *, batch: int, seconds: float, committed: int, prompts_s: float) -> None:
        """Count a round; `prompts_s` is the time of prefills since the last round."""
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
    """The speedup that the cost model estimates. `add` is for the thread that decodes, `ratio` for any.

    With n_r tokens that round r of batch size b_r committed, its expected time T_r and that of a plain round V_r:

        estimate = Σ n_r · V_r / b_r / Σ T_r
    """

    def __init__(self) -> None:
        self._rounds: deque[tuple[float, float]] = deque(maxlen=_KEPT_ROUNDS)

    def add(self, *, batch: int, committed: int, expected_s: float, plain_s: float) -> None:
        """Count a round that is not a control round."""
        self._rounds.append((committed * plain_s / batch, expected_s))

    def ratio(self) -> float | None:
        """None before the first round."""
        rounds = list(self._rounds)
        return sum(plain for plain, _ in rounds) / sum(expected for _, expected in rounds) if rounds else None

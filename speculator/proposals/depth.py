"""How deep to draft: the depth that commits the most tokens a second, from measured costs and measured acceptance.

With α_i the share of proposals at position i that are accepted when the verification reaches them, and T(b, γ) the
measured time of a round of batch b at depth γ, drafting included:

    E[L](γ) = 1 + Σ_{i=1…γ} Π_{j≤i} α_j            tokens that a verification commits, the bonus included
    depth   = argmax_γ E[L](γ) / T(b, γ)

This is the speedup of TIDE (arXiv 2602.05145) with its cost model replaced by measurement. Depth 0 is a candidate like
any other, so a draft that does not pay is not used; the few rounds that probe it and the few that decode plainly as
the baseline of the measured speedup are all that it costs.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

_KEPT_TIMES = 15
"""A median over this many rounds follows a changing machine and ignores a round that was interrupted."""
_ENOUGH_TIMES = 3
"""From here on a depth takes part in the choice; up to the next number of times it is still run now and then."""
_PLENTY_TIMES = 8
_EARLY_LOOK_SHARE = 0.1
_LATE_LOOK_SHARE = 0.01
_MEMORY = 0.995
"""What an observation of acceptance still weighs after another: half after 140 verifications."""
_PRIOR_WEIGHT = 2.0
_FIRST_PRIOR = 0.6
"""A draft that nobody has seen yet is tried before it is judged."""
_RENEWED_WEIGHT = 0.25
"""What evidence about the previous version is worth for the next, which is mostly like it."""
_PROBES_AFTER_RENEWAL = 8
_PROBE_DEPTH = 2
_BETTER = 1.02
"""A change of depth must promise at least this much: times are noisy, and switching has a price."""


class RoundCosts:
    """Measured seconds of a round by (batch size class, depth). Classes are 1, 2, 3–4, 5–8, 9–16, …"""

    def __init__(self) -> None:
        # In the order of the last measurement.
        self._times: dict[tuple[int, int], deque[float]] = {}

    def add(self, batch: int, depth: int, seconds: float) -> None:
        """Take a measurement; the first of a kind is left out, it pays for allocations and warm-up."""
        key = _size_class(batch), depth
        times = self._times.pop(key, None)
        self._times[key] = deque(maxlen=_KEPT_TIMES) if times is None else times
        if times is not None:
            times.append(seconds)

    def count(self, batch: int, depth: int) -> int:
        times = self._times.get((_size_class(batch), depth))
        return len(times) if times else 0

    def seconds(self, batch: int, depth: int) -> float | None:
        """The median time; None where this depth was never run at this batch size."""
        times = self._times.get((_size_class(batch), depth))
        return median(times) if times else None

    def table(self) -> dict[tuple[int, int], list[float]]:
        """Everything measured, to be adopted by an engine that must decide the same."""
        return {key: list(times) for key, times in self._times.items()}

    def stalest(self, batch: int, depths: Sequence[int]) -> int:
        """The depth that was not measured for the longest time at this batch size."""
        order = [depth for size, depth in self._times if size == _size_class(batch)]
        return min(depths, key=lambda depth: order.index(depth) if depth in order else -1)

    def adopt(self, table: Mapping[tuple[int, int], Sequence[float]]) -> None:
        self._times = {key: deque(times, maxlen=_KEPT_TIMES) for key, times in table.items()}


class PositionAcceptance:
    """α by position, with an exponentially fading memory. Position 1 is the first proposal of a chain."""

    def __init__(self, max_depth: int) -> None:
        self._reached = [0.0] * max_depth
        self._accepted = [0.0] * max_depth

    def add(self, num_proposals: int, num_accepted: int) -> None:
        """One verification: the proposals up to the first rejected one were reached."""
        for position in range(min(num_proposals, num_accepted + 1, len(self._reached))):
            self._reached[position] = _MEMORY * self._reached[position] + 1
            self._accepted[position] = _MEMORY * self._accepted[position] + (position < num_accepted)

    def fade(self, weight: float) -> None:
        self._reached = [weight * reached for reached in self._reached]
        self._accepted = [weight * accepted for accepted in self._accepted]

    def rate(self, position: int) -> float:
        """α of a position from 1; an unseen one is taken to be like the one before it."""
        prior = _FIRST_PRIOR
        for reached, accepted in zip(self._reached[:position], self._accepted[:position], strict=True):
            prior = (accepted + _PRIOR_WEIGHT * prior) / (reached + _PRIOR_WEIGHT)
        return prior

    def length(self, depth: int) -> float:
        """E[L](depth): tokens that a verification of a chain of `depth` commits."""
        length = survival = 1.0
        for position in range(1, depth + 1):
            survival *= self.rate(position)
            length += survival
        return length


class DepthPolicy:
    """Chooses the depth of each round among `candidates`, of which 0 must be one; used by one thread.

    Ranks that run in step and are given the same observations choose the same depths.
    """

    def __init__(self, candidates: Sequence[int], *, probe_share: float = 0.02, seed: int = 0) -> None:
        if 0 not in candidates:
            raise ValueError("depth 0 must be among the candidates: the policy has to be able to stop drafting")
        self._candidates = sorted(set(candidates))
        self._probe_share = probe_share
        self._random = random.Random(seed)
        self.costs = RoundCosts()
        self.acceptance = PositionAcceptance(self._candidates[-1])
        self._settled: dict[int, int] = {}
        self._probes_left = 0

    def choose(self, batch: int, limit: int | None = None) -> int:
        """The depth of the next round of `batch` requests, at most `limit`."""
        candidates = [depth for depth in self._candidates if limit is None or depth <= limit]
        # Fewest rounds first: a depth is judged by its time only after a few rounds.
        unmeasured = [depth for depth in candidates if self.costs.count(batch, depth) < _ENOUGH_TIMES]
        if unmeasured:
            return min(unmeasured, key=lambda depth: self.costs.count(batch, depth))
        depth = self._best(batch, candidates)
        if self._random.random() < self._look_share(batch, candidates):
            return self.costs.stalest(batch, candidates)
        if depth == 0 and len(candidates) > 1 and self._is_probe():
            depth = max([depth for depth in candidates if depth <= _PROBE_DEPTH][1:], default=candidates[1])
        return depth

    def settled(self, batch: int) -> int:
        """The depth that has last been found best for this batch size; the largest candidate before that."""
        return self._settled.get(_size_class(batch), self._candidates[-1])

    def observe(self, num_proposals: int, accepted: Sequence[int]) -> None:
        """Verifications of one round: how many of up to `num_proposals` each request accepted."""
        if num_proposals:
            for count in accepted:
                self.acceptance.add(num_proposals, count)

    def renew(self) -> None:
        """A new draft version is in service: look at it even where the last one did not pay."""
        self.acceptance.fade(_RENEWED_WEIGHT)
        self.look_again()

    def look_again(self) -> None:
        """At a draft that was not used for a while."""
        self._probes_left = _PROBES_AFTER_RENEWAL

    def explanation(self) -> dict[str, str]:
        """The numbers behind the choice: α by position, and the median milliseconds of a round by batch and depth."""
        rates = [f"{self.acceptance.rate(position):.3f}" for position in range(1, self._candidates[-1] + 1)]
        times = sorted((size, depth, median(times)) for (size, depth), times in self.costs.table().items() if times)
        return {
            "acceptance": ",".join(rates),
            "round_ms": ",".join(f"{size}/{depth}={1000 * seconds:.1f}" for size, depth, seconds in times),
        }

    def _look_share(self, batch: int, candidates: Sequence[int]) -> float:
        """How often a depth is run only to see what it costs: a machine that was busy at first is not so for ever."""
        is_early = any(self.costs.count(batch, depth) < _PLENTY_TIMES for depth in candidates)
        return _EARLY_LOOK_SHARE if is_early else _LATE_LOOK_SHARE

    def _is_probe(self) -> bool:
        if self._probes_left > 0:
            self._probes_left -= 1
            return True
        return self._random.random() < self._probe_share

    def _best(self, batch: int, candidates: Sequence[int]) -> int:
        rates: dict[int, float] = {}
        longest_s = 0.0
        for depth in candidates:
            # A deeper round does more: where it was measured to be faster, that was noise.
            longest_s = max(longest_s, self.costs.seconds(batch, depth) or 0.0)
            rates[depth] = self.acceptance.length(depth) / longest_s
        best = max(rates, key=lambda depth: rates[depth])
        for familiar in (self._settled.get(_size_class(batch), best), 0):
            if familiar in rates and rates[best] < _BETTER * rates[familiar]:
                best = familiar
        self._settled[_size_class(batch)] = best
        return best


def _size_class(batch: int) -> int:
    """The largest batch of the class: 1, 2, 4, 8, 16, …"""
    return 1 << (batch - 1).bit_length()

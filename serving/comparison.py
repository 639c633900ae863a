"""A new version against the incumbent, at any moment: the accept length by strata, the time by kinds of rounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from serving.evidence import Moments, Reference, Stratum, Verification
from serving.sequential import mixture_bound, normal_bound
from serving.speedup import Sums, jackknife

_TUNED_FOR = 100
"""Verifications at which the bound on the accept length is narrowest."""
_LEAST_VARIANCE = 0.01
"""An incumbent whose proposals are never accepted has no variance at all."""
_TUNED_ERROR = 0.05
"""The same for times: standard error of the logarithm."""
_FEWEST_ROUNDS = 10
_FEWEST_BLOCKS = 5


@dataclass(frozen=True, kw_only=True)
class Change:
    """A relative change and what it may truly be: −0.1 is ten per cent worse."""

    estimate: float
    lower: float
    upper: float


@dataclass
class _Cell:
    """Verifications of one stratum at one depth."""

    known: Moments
    count: int = 0
    residual: float = 0.0
    squares: float = 0.0


class AcceptComparison:
    """Residuals x − μ of the new version's accepted tokens x from the incumbent's mean μ in the same stratum.

    A verification commits its accepted proposals and one token, so with d the mean residual and μ the incumbent's mean
    over the new version's mix of strata, the relative change of the accept length is d / (1 + μ). The variance of the
    sum of t residuals is

        σ² (t + ρ Σ_c n_c (n_c − 1))  +  Σ_s t_s² σ_s² D / n_s

    for requests c with n_c verifications that are correlated by ρ, and the incumbent's means from n_s verifications
    with design effect D. Strata in which the incumbent is not known are counted and left out.
    """

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._cells: dict[tuple[Stratum, int], _Cell] = {}
        self._requests: dict[str, int] = {}
        self._pairs = 0
        self.seen = self.known = 0
        """Verifications, and those that count."""
        self.accepted = 0

    def add(self, verification: Verification) -> None:
        self.seen += 1
        self.accepted += verification.accepted
        known = self._reference.moments(verification.stratum, verification.depth)
        if known is None:
            return
        self.known += 1
        cell = self._cells.setdefault((verification.stratum, known.depth), _Cell(known))
        residual = min(verification.accepted, known.depth) - known.mean
        cell.count += 1
        cell.residual += residual
        cell.squares += residual * residual
        siblings = self._requests.get(verification.request_id, 0)
        self._requests[verification.request_id] = siblings + 1
        self._pairs += 2 * siblings

    @property
    def effective(self) -> float:
        """The known verifications as a number of independent ones: those of one request say partly the same."""
        if not self.known:
            return 0.0
        return self.known / (1 + self._reference.correlation * self._pairs / self.known)

    @property
    def incumbent_length(self) -> float:
        """The accept length that the incumbent would have had on these requests."""
        return 1 + sum(cell.count * cell.known.mean for cell in self._cells.values()) / max(self.known, 1)

    def change(self, alpha: float) -> Change:
        """With bounds that hold over all looks together, each with probability 1 − alpha; needs known verifications."""
        own, base = self._variances()
        half = mixture_bound(own + base, tuned_for=_TUNED_FOR * own / self.known, alpha=alpha)
        return self._change(half)

    def final_change(self, alpha: float) -> Change:
        """With bounds for a single look."""
        return self._change(normal_bound(sum(self._variances()), alpha=alpha))

    def _change(self, half: float) -> Change:
        total = sum(cell.residual for cell in self._cells.values())
        scale = self.known * self.incumbent_length
        return Change(estimate=total / scale, lower=(total - half) / scale, upper=(total + half) / scale)

    def _variances(self) -> tuple[float, float]:
        """Of the sum of residuals: from the new verifications, and from the incumbent's means."""
        cells, count = self._cells.values(), self.known
        theirs = sum(cell.count * cell.known.variance for cell in cells) / count
        mean = sum(cell.residual for cell in cells) / count
        ours = sum(cell.squares for cell in cells) / count - mean * mean
        own = max(theirs, ours, _LEAST_VARIANCE) * (count + self._reference.correlation * self._pairs)
        errors: dict[Stratum, float] = {}
        for (stratum, _), cell in self._cells.items():
            # The depths of one stratum share the incumbent's verifications: their errors add up.
            error = cell.count * math.sqrt(max(cell.known.variance, _LEAST_VARIANCE) / cell.known.num)
            errors[stratum] = errors.get(stratum, 0.0) + error
        return own, self._reference.inflation * sum(error * error for error in errors.values())


def has_controls(blocks: Iterable[Sums]) -> bool:
    """Whether they have enough control rounds to say what the machine's part is."""
    return sum(part.num_rounds(drafted=False) for part in blocks) >= _FEWEST_ROUNDS


def time_change(new: Sequence[Sums], incumbent: Sequence[Sums], *, gain: float = 1.0, alpha: float) -> Change | None:
    """The relative change of the time a token, from rounds of kinds that both versions served ten times.

    Against the incumbent's rounds of the same kind (`WatchedRound.kind`) the new version's took d times as long, and
    its control rounds m times: the machine's part. With a `gain` times as long accept length on equal requests, which
    the strata tell, the change is d / (m · gain) − 1. None until both have ten control rounds, without which a trainer
    that starts beside would look like a slow draft, and five blocks in which the draft took part.
    """
    ours, theirs = Sums.over(new), Sums.over(incumbent)
    least = {True: _FEWEST_ROUNDS, False: 1}
    kinds = {key for key, num in ours.rounds.items() if min(num, theirs.rounds.get(key, 0)) >= least[key[1]]}
    new, incumbent = ([part.only(kinds.__contains__) for part in blocks] for blocks in (new, incumbent))
    for blocks in (new, incumbent):
        num_drafted = sum(part.num_rounds(drafted=True) > 0 for part in blocks)
        if num_drafted < _FEWEST_BLOCKS or not has_controls(blocks):
            return None
    ours, theirs = Sums.over(new), Sums.over(incumbent)
    by_new = jackknife(new, lambda sums: _log_slowdown(sums, theirs))
    by_incumbent = jackknife(incumbent, lambda sums: _log_slowdown(ours, sums))
    if by_new is None or by_incumbent is None:
        return None
    information = 1 / max(by_new.error**2 + by_incumbent.error**2, 1e-12)
    half = mixture_bound(information, tuned_for=1 / _TUNED_ERROR**2, alpha=alpha) / information
    log_change = by_new.value - math.log(gain)
    return Change(
        estimate=math.expm1(log_change), lower=math.expm1(log_change - half), upper=math.expm1(log_change + half)
    )


def _log_slowdown(new: Sums, incumbent: Sums) -> float | None:
    drafted, plain = (_slowdown(new, incumbent, drafted=kind) for kind in (True, False))
    return math.log(drafted / plain) if drafted and plain else None


def _slowdown(new: Sums, incumbent: Sums, *, drafted: bool) -> float | None:
    """Time over what the incumbent needs for as many rounds of the same kinds."""
    took = expected = 0.0
    for key, num in new.rounds.items():
        if key[1] == drafted and num > 0 and incumbent.rounds.get(key, 0) > 0:
            took += new.seconds[key]
            expected += num * incumbent.seconds[key] / incumbent.rounds[key]
    return took / expected if expected else None

"""Bounds that hold however often one looks: what the watch of a new draft version may conclude, and when."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import NormalDist


def mixture_bound(variance: float, *, tuned_for: float, alpha: float) -> float:
    """How far above zero a sum of noise of mean zero may ever be, with probability 1 − α over all times together.

    `variance` is that of the sum so far; the bound is narrowest, beside a bound for one time, around `tuned_for`.

        u(v) = √( 2 (v + r) · ln(1 + √((v + r) / r) / 2α) )

    is the one-sided normal mixture of Robbins, as in Howard, Ramdas, McAuliffe and Sekhon (arXiv 1810.08240, equation
    14). With an estimated variance it holds asymptotically: Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas,
    "Time-uniform central limit theory and asymptotic confidence sequences" (arXiv 2103.06476).
    """
    spread = 2 * math.log(1 / (2 * alpha))
    r = tuned_for / (spread + math.log(1 + spread))
    return math.sqrt(2 * (variance + r) * math.log(1 + math.sqrt((variance + r) / r) / (2 * alpha)))


def normal_bound(variance: float, *, alpha: float) -> float:
    """The same for one look, fixed beforehand."""
    return NormalDist().inv_cdf(1 - alpha) * math.sqrt(variance)


def intraclass_correlation(clusters: Iterable[tuple[int, float, float]]) -> float:
    """How alike observations of one cluster are, 0…½, from (count, sum, sum of squares) of each cluster's residuals.

    The ANOVA estimator (Donner, "A review of inference procedures for the intraclass correlation coefficient", 1986).
    With fewer than five clusters there is nothing to estimate it from, and a small one is assumed.
    """
    rows = [row for row in clusters if row[0]]
    total, groups = sum(count for count, _, _ in rows), len(rows)
    if groups < _FEWEST_CLUSTERS or total <= groups:
        return _ASSUMED_CORRELATION
    mean = sum(sums for _, sums, _ in rows) / total
    between = sum(count * (sums / count - mean) ** 2 for count, sums, _ in rows) / (groups - 1)
    within = sum(squares - sums * sums / count for count, sums, squares in rows) / (total - groups)
    typical = (total - sum(count * count for count, _, _ in rows) / total) / (groups - 1)
    spread = between + (typical - 1) * within
    return min(max((between - within) / spread, 0.0), 0.5) if spread > 0 else 0.0


_FEWEST_CLUSTERS = 5
_ASSUMED_CORRELATION = 0.02

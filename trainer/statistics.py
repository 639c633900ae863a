"""Bounds from few observations that hold however often one looks at them."""

from __future__ import annotations

import math

_EFFECT = 1.0
"""c² below: effects of about one standard deviation are found soonest."""


def anytime_quantile(count: int, *, alpha: float) -> float:
    """What takes the place of Student's t with `count` − 1 degrees of freedom where one looks after each observation.

    The mean of independent normal observations of unknown variance is off to one side by more than this many of its
    estimated standard errors, at any time at all, with probability `alpha`. For a mean that is off by d, from n
    observations whose squares around it sum to SS, the t test whose effect d/σ is mixed over a normal of variance 1/c²
    has the likelihood ratio

        E = √(c² / (n + c²)) · ( (n + c²)(SS + n d²) / ((n + c²) SS + c² n d²) )^(n/2)

    It is a martingale whatever σ is, so E ≥ 1/2α comes in at most 2α of all cases, to either side (Lai, "On confidence
    sequences", Annals of Statistics 1976; Wang and Ramdas, "Anytime-valid t-tests and confidence sequences for Gaussian
    means with unknown variance", arXiv 2310.03722). Solved for d over √(SS / (n (n − 1))), with
    K = ((n + c²) / 4α²c²)^(1/n):

        √( (K − 1)(n + c²)(n − 1) / (n − c² (K − 1)) ),    infinite where so few observations bound nothing.
    """
    if count < 2:
        return math.inf
    above = math.expm1(math.log((count + _EFFECT) / (4 * alpha * alpha * _EFFECT)) / count)  # K − 1
    room = count - _EFFECT * above
    return math.sqrt(above * (count + _EFFECT) * (count - 1) / room) if room > 0 else math.inf

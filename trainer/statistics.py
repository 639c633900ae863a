"""Comparison of two drafts on the same traces: the relative change of the accept length, with confidence bounds.

Both drafts decode the same traces again (trainer/release/gate.py). How wide the bounds of `compare` are depends on how
often they are evaluated: `student_t_quantile` for once, `anytime_quantile` for once after every trace.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import msgspec

MIN_TRACES = 4
CONFIDENCE = 0.95
"""Of each one-sided bound by itself."""


@dataclass(frozen=True, kw_only=True)
class AcceptanceCounts:
    """Counts of verifications and of the tokens that they committed, which can be added. Expected counts may be
    fractions. `num_reaching[k]` is the number of rounds that accepted more than k proposals.
    """

    num_committed: float = 0
    num_rounds: float = 0
    num_reaching: tuple[float, ...] = ()

    @property
    def length(self) -> float:
        """Committed tokens per verification, the bonus token included; 1.0 means that drafting never helped."""
        return self.num_committed / self.num_rounds if self.num_rounds else 1.0

    @property
    def rates(self) -> tuple[float, ...]:
        """At each depth k of the chain: of the rounds that accepted k proposals, the share that accepted one more.

        A chain cut short for lack of room counts as not accepting the next.
        """
        before = (self.num_rounds, *self.num_reaching)
        return tuple(
            after / reached if reached else 0.0 for reached, after in zip(before, self.num_reaching, strict=False)
        )

    def __add__(self, other: AcceptanceCounts) -> AcceptanceCounts:
        reaching = zip_longest(self.num_reaching, other.num_reaching, fillvalue=0)
        return AcceptanceCounts(
            num_committed=self.num_committed + other.num_committed,
            num_rounds=self.num_rounds + other.num_rounds,
            num_reaching=tuple(mine + theirs for mine, theirs in reaching),
        )


class PairedScores(NamedTuple):
    """What both drafts would commit on one trace, or on several."""

    candidate: AcceptanceCounts
    incumbent: AcceptanceCounts


PromptScores = tuple[bytes, PairedScores]
"""(hash of the prompt, scores of one answer to it)."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Accept lengths of both drafts; `change` and its bounds are relative, the bounds None for too few traces."""

    num_traces: int
    """Answers to one prompt count once."""
    candidate_length: float
    incumbent_length: float
    change: float
    lower: float | None
    upper: float | None


def _for_one_test(count: int) -> float:
    return student_t_quantile(CONFIDENCE, count - 1)


def by_prompt(answers: Iterable[PromptScores]) -> list[PairedScores]:
    """Add up the answers to each prompt: one pair a prompt."""
    found: defaultdict[bytes, list[PairedScores]] = defaultdict(list)
    for prompt_hash, pair in answers:
        found[prompt_hash].append(pair)
    return [_total(pairs) for pairs in found.values()]


def compare(
    pairs: Sequence[PairedScores], *, quantile: Callable[[int], float] = _for_one_test, doubt: float = 0.0
) -> Comparison:
    """The relative change of the accept length, with bounds. They come from the linearised ratio of sums, in which the
    residual of a trace is

        z = (C/ΣC − R/ΣR) of the candidate − the same of the incumbent,     se(change) = (1 + change) · √(n/(n−1) Σz²)

    for C committed tokens and R verifications (Cochran, "Sampling Techniques", 3rd edition, chapter 6), Σ also over
    z = `doubt` / n: as if one more average trace deviated by so much, so that a few traces that agree prove little.
    Traces without a verification are left out. `quantile` gives the bounds' distance in standard errors for a number of
    traces; infinite means no bounds.
    """
    pairs = [pair for pair in pairs if pair.candidate.num_rounds > 0 and pair.incumbent.num_rounds > 0]
    count = len(pairs)
    totals = _total(pairs) if pairs else None
    lengths = (totals.candidate.length, totals.incumbent.length) if totals else (1.0, 1.0)
    change = lengths[0] / lengths[1] - 1
    lower = upper = None
    if totals is not None and count > 1 and math.isfinite(width := quantile(count)):
        squares = sum(
            (_residual(pair.candidate, totals.candidate) - _residual(pair.incumbent, totals.incumbent)) ** 2
            for pair in pairs
        )
        squares += (doubt / count) ** 2
        error = (1 + change) * math.sqrt(count / (count - 1) * squares)
        lower, upper = change - width * error, change + width * error
    return Comparison(
        num_traces=count,
        candidate_length=lengths[0],
        incumbent_length=lengths[1],
        change=change,
        lower=lower,
        upper=upper,
    )


def _total(pairs: Sequence[PairedScores]) -> PairedScores:
    return PairedScores(*(sum(column, AcceptanceCounts()) for column in zip(*pairs, strict=True)))


def _residual(one: AcceptanceCounts, total: AcceptanceCounts) -> float:
    return one.num_committed / total.num_committed - one.num_rounds / total.num_rounds


def student_t_quantile(probability: float, degrees: int) -> float:
    """t with P(T ≤ t) = `probability` ≥ 0.5 for a whole number of degrees of freedom, to about twelve digits.

    The angle θ = atan(t/√ν) is bisected; P(|T| ≤ t) is a finite sum in it (Abramowitz and Stegun, "Handbook of
    Mathematical Functions", 26.7.3 and 26.7.4).
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        if _two_sided(middle, degrees) < 2 * probability - 1:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan(low)


def _two_sided(theta: float, degrees: int) -> float:
    """P(|T| ≤ √ν · tan θ)."""
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = degrees % 2
    # 1 + 1/2 cos² + 1·3/(2·4) cos⁴ + … for even ν; cos + 2/3 cos³ + 2·4/(3·5) cos⁵ + … for odd ν.
    term, total = (cosine if odd else 1.0), 0.0
    for step in range(degrees // 2):
        total += term
        term *= cosine**2 * (2 * step + 1 + odd) / (2 * step + 2 + odd)
    return 2 / math.pi * (theta + sine * total) if odd else sine * total


_EFFECT = 1.0
"""c² below: effects of about one standard deviation are found soonest."""


def anytime_quantile(count: int, *, alpha: float) -> float:
    """The counterpart of Student's t with `count` − 1 degrees of freedom for a test after every observation.

    The mean of independent normal observations of unknown variance is off to one side by more than this many of its
    estimated standard errors, after any observation, with probability `alpha`. For a mean that is off by d, from n
    observations whose squares around it sum to SS, the t test whose effect d/σ is mixed over a normal of variance 1/c²
    has the likelihood ratio

        E = √(c² / (n + c²)) · ( (n + c²)(SS + n d²) / ((n + c²) SS + c² n d²) )^(n/2)

    It is a martingale whatever σ is, so E ≥ 1/2α comes in at most 2α of all cases, to either side (Lai, "On confidence
    sequences", Annals of Statistics 1976; Wang and Ramdas, "Anytime-valid t-tests and confidence sequences for Gaussian
    means with unknown variance", arXiv 2310.03722). Solved for d over √(SS / (n (n − 1))), with
    K = ((n + c²) / 4α²c²)^(1/n):

        √( (K − 1)(n + c²)(n − 1) / (n − c² (K − 1)) ),    infinite where there are too few observations for a bound.
    """
    if count < 2:
        return math.inf
    above = math.expm1(math.log((count + _EFFECT) / (4 * alpha * alpha * _EFFECT)) / count)  # K − 1
    room = count - _EFFECT * above
    return math.sqrt(above * (count + _EFFECT) * (count - 1) / room) if room > 0 else math.inf

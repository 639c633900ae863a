"""Hop 7 to 8: may a candidate be tried in place of the incumbent? Decided on traces that neither has learnt from.

Both drafts decode the same traces again (trainer/release/offline_scoring.py). What is compared is the acceptance length
of each,

    L = Σ committed tokens / Σ verifications        change = L_candidate / L_incumbent − 1

and its standard error comes from how much the traces differ in it (`compare`). Answers to one prompt resemble each
other and count as one trace, with the sums of them all (`by_prompt`). Traces are few, so the bounds are those of
Student's t: four traces decide only what is plain.

    promote   better, and worse by more than ε in at most one case of twenty
    refuse    worse, or worse by more than the golden ε on the golden set, in all but one case of twenty
    hold      anything else: the incumbent stays, training goes on, and the next interval asks again

When the target has moved since the incumbent was published, that was fitted to a target that is gone, and the candidate
has learnt what the new one says: better in expectation before any trace is asked, and traces of the new target are few.
Then ε is wider (`moved_epsilon`); what is promoted must still come out better on them.

The golden set is old traffic, which a legitimate shift may serve a little worse; so it has a wider ε and only a veto,
and a veto that lasts too long ends with a new golden set (trainer/replay/eval_sets.py).
How often the gate is wrong: benchmarks/results/gate.md.
"""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from speculator.versions.lifecycle import Number
from trainer.release.acceptance import Acceptance

MIN_TRACES = 4
CONFIDENCE = 0.95
"""Of each bound by itself."""


class Outcome(enum.Enum):
    PROMOTE = "promote"
    REFUSE = "refuse"
    HOLD = "hold"


class Pair(NamedTuple):
    """What both drafts would commit on one trace, or on several."""

    candidate: Acceptance
    incumbent: Acceptance


Answer = tuple[bytes, Pair]
"""A trace of the prompt with this hash."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """`change` is relative, and so are its bounds, which are None where there are too few traces for any."""

    num_traces: int
    """Of different prompts."""
    candidate_length: float
    incumbent_length: float
    change: float
    lower: float | None
    upper: float | None


class GateDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What was decided, and everything that it rests on."""

    outcome: Outcome
    reason: str
    incumbent: int
    """The version that the candidate was compared with."""
    fresh: Comparison | None = None
    """On held-out traces; None where the candidate was unfit to be compared."""
    golden: Comparison | None = None
    """None where the golden set was not asked, because the held-out traces were against the candidate already."""
    seconds: float = 0.0

    @property
    def is_vetoed(self) -> bool:
        """Better on held-out traces, and refused for the golden set: it is not asked about any other."""
        return self.outcome is Outcome.REFUSE and self.golden is not None

    @property
    def numbers(self) -> dict[str, Number]:
        """The same without structure: golden ones under `golden_…`."""
        found: dict[str, Number] = {"incumbent": self.incumbent, "seconds": self.seconds}
        for prefix, part in (("", self.fresh), ("golden_", self.golden)):
            if part is not None:
                found |= {prefix + name: value for name, value in msgspec.structs.asdict(part).items()}
        return found


def _for_one_look(count: int) -> float:
    return student_t_quantile(CONFIDENCE, count - 1)


def by_prompt(answers: Iterable[Answer]) -> list[Pair]:
    """One pair for each prompt."""
    found: defaultdict[bytes, list[Pair]] = defaultdict(list)
    for prompt_hash, pair in answers:
        found[prompt_hash].append(pair)
    return [_total(pairs) for pairs in found.values()]


def compare(
    pairs: Sequence[Pair], *, quantile: Callable[[int], float] = _for_one_look, doubt: float = 0.0
) -> Comparison:
    """The change of a ratio of sums, with bounds from its linearisation: the relative residual of a trace is

        z = (C/ΣC − R/ΣR) of the candidate − the same of the incumbent,     se(change) = (1 + change) · √(n/(n−1) Σz²)

    for C committed tokens and R verifications (Cochran, "Sampling Techniques", 3rd edition, chapter 6), Σ also over
    z = `doubt` / n: as if one more average trace had been off by so much, so that traces that agree prove little.
    Traces without a verification say nothing and are left out. `quantile` gives how many standard errors the bounds are
    away, for so many traces; infinite where they bound nothing.
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


def decide(
    fresh: Comparison, golden: Comparison | None, *, incumbent: int, epsilon: float, golden_epsilon: float
) -> GateDecision:
    """See the head of this file; without a golden comparison the held-out traces decide alone."""
    outcome, reason = _judge(fresh, golden, epsilon, golden_epsilon)
    return GateDecision(outcome=outcome, reason=reason, incumbent=incumbent, fresh=fresh, golden=golden)


def _judge(fresh: Comparison, golden: Comparison | None, epsilon: float, golden_epsilon: float) -> tuple[Outcome, str]:
    if fresh.num_traces < MIN_TRACES or fresh.lower is None:
        return Outcome.HOLD, f"fewer than {MIN_TRACES} prompts are held out"
    if _is_worse(fresh, 0.0):
        return Outcome.REFUSE, "worse on held-out traces"
    if fresh.change <= 0 or fresh.lower <= -epsilon:
        return Outcome.HOLD, "not shown to be better on held-out traces"
    if golden is not None and _is_worse(golden, golden_epsilon):
        return Outcome.REFUSE, "worse on the golden set"
    return Outcome.PROMOTE, "better on held-out traces"


def _is_worse(found: Comparison, epsilon: float) -> bool:
    return found.num_traces >= MIN_TRACES and found.upper is not None and found.upper < -epsilon


def _total(pairs: Sequence[Pair]) -> Pair:
    return Pair(*(sum(column, Acceptance()) for column in zip(*pairs, strict=True)))


def _residual(one: Acceptance, total: Acceptance) -> float:
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

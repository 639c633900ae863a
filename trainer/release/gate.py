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

import msgspec

from speculator.versions.lifecycle import Number
from trainer.statistics import MIN_TRACES, Comparison


class Outcome(enum.Enum):
    PROMOTE = "promote"
    REFUSE = "refuse"
    HOLD = "hold"


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

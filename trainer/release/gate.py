"""The gate: may a candidate be tried in place of the incumbent? Decided on traces that neither has learnt from.

Both drafts decode the held-out traces again (trainer/release/acceptance.py), and their accept lengths are compared
(trainer/statistics.py). Answers to one prompt resemble each other and count as one trace. Traces are few, so the bounds
are those of Student's t: four traces decide only what is plain.

    promote   better, and worse by more than ε in at most one case of twenty
    refuse    worse, or worse by more than the golden ε on the golden set, in all but one case of twenty
    hold      anything else: the incumbent stays, training goes on, and the next interval asks again

When the target has moved since the incumbent was published, the candidate is better in expectation before any trace is
asked, and traces of the new target are few. Then ε is wider (`moved_epsilon`); what is promoted must still come out
better on them.

The golden set is old traffic, which a legitimate shift may serve a little worse; so it has a wider ε and only a veto,
and a veto that lasts too long ends with a new golden set (trainer/replay/eval_sets.py). It is asked only about a
candidate that the held-out traces speak for.

Every rank scores its own traces, and rank 0 decides about all of them. Each draft is asked once about a trace: the
incumbent's scores are kept from one decision to the next, and those of a candidate become the incumbent's when it is
published. How often the gate is wrong: benchmarks/results/gate.md.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import msgspec

from speculator.draft.eagle3 import Eagle3Draft
from speculator.errors import DraftError, StoreError
from speculator.versions.lifecycle import Number
from trainer.config import TrainerConfig
from trainer.learning.optimizer_step import all_finite
from trainer.ranks import Ranks
from trainer.release.acceptance import Score, score
from trainer.replay.eval_sets import GoldenSet, HeldOut
from trainer.replay.memory import Stored
from trainer.statistics import MIN_TRACES, Acceptance, Comparison, PairedScores, PromptScores, by_prompt, compare


class GateOutcome(enum.Enum):
    PROMOTE = "promote"
    REFUSE = "refuse"
    HOLD = "hold"


class GateDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What was decided, and everything that it rests on."""

    outcome: GateOutcome
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
        return self.outcome is GateOutcome.REFUSE and self.golden is not None

    @property
    def numbers(self) -> dict[str, Number]:
        """The same without structure: golden ones under `golden_…`."""
        found: dict[str, Number] = {"incumbent": self.incumbent, "seconds": self.seconds}
        for prefix, part in (("", self.fresh), ("golden_", self.golden)):
            if part is not None:
                found |= {prefix + name: value for name, value in msgspec.structs.asdict(part).items()}
        return found


class Decide(Protocol):
    """The rule of the gate."""

    def __call__(
        self, fresh: Comparison, golden: Comparison | None, *, incumbent: int, epsilon: float, golden_epsilon: float
    ) -> GateDecision: ...


def decide(
    fresh: Comparison, golden: Comparison | None, *, incumbent: int, epsilon: float, golden_epsilon: float
) -> GateDecision:
    """See the head of this file; without a golden comparison the held-out traces decide alone."""
    if fresh.num_traces < MIN_TRACES or fresh.lower is None:
        outcome, reason = GateOutcome.HOLD, f"fewer than {MIN_TRACES} prompts are held out"
    elif _is_worse(fresh, 0.0):
        outcome, reason = GateOutcome.REFUSE, "worse on held-out traces"
    elif fresh.change <= 0 or fresh.lower <= -epsilon:
        outcome, reason = GateOutcome.HOLD, "not shown to be better on held-out traces"
    elif golden is not None and _is_worse(golden, golden_epsilon):
        outcome, reason = GateOutcome.REFUSE, "worse on the golden set"
    else:
        outcome, reason = GateOutcome.PROMOTE, "better on held-out traces"
    return GateDecision(outcome=outcome, reason=reason, incumbent=incumbent, fresh=fresh, golden=golden)


def _is_worse(found: Comparison, epsilon: float) -> bool:
    return found.num_traces >= MIN_TRACES and found.upper is not None and found.upper < -epsilon


class Gate:
    """Judges candidates; all ranks call it in the same order."""

    def __init__(
        self,
        held_out: HeldOut,
        golden: GoldenSet,
        config: TrainerConfig,
        ranks: Ranks,
        *,
        load_draft: Callable[[int], Eagle3Draft],
        score: Score = score,
        decide: Decide = decide,
    ) -> None:
        self._held_out, self._golden, self._config, self._ranks = held_out, golden, config, ranks
        self._load_draft, self._score, self._decide = load_draft, score, decide
        self._incumbent = 0
        # By trace id.
        self._scores: dict[str, Acceptance] = {}
        self._candidate_scores: dict[str, Acceptance] = {}

    def judge(self, candidate: Eagle3Draft, *, incumbent: int, has_moved: bool = False) -> GateDecision | None:
        """The decision about a candidate, on rank 0; None elsewhere. `has_moved`: the target, since the incumbent came.

        Raises StoreError, on all ranks, where one of them cannot load the incumbent.
        """
        start_s, config = time.monotonic(), self._config
        if not all_finite(dict(candidate.named_parameters())):
            return GateDecision(outcome=GateOutcome.REFUSE, reason="not finite", incumbent=incumbent)
        known = self._scores if incumbent == self._incumbent else {}
        here = {*self._held_out.trace_ids, *self._golden.trace_ids}
        self._incumbent, self._scores = incumbent, {one: score for one, score in known.items() if one in here}
        self._candidate_scores = {}
        # While the pool is young, the golden traces are as fresh.
        fresh = self._compare(candidate, [*self._held_out, *(self._golden if self._held_out.is_young else ())])
        rule = partial(
            self._decide,
            incumbent=incumbent,
            epsilon=max(config.gate_epsilon, config.moved_epsilon) if has_moved else config.gate_epsilon,
            golden_epsilon=config.golden_epsilon,
        )
        decision = rule(fresh, None) if fresh else None
        if self._ranks.any(decision is not None and decision.outcome is GateOutcome.PROMOTE):
            golden = self._compare(candidate, list(self._golden))
            decision = rule(fresh, golden) if fresh else None
        if decision is None:
            return None
        return msgspec.structs.replace(decision, seconds=time.monotonic() - start_s)

    def published(self, version: int) -> None:
        """The candidate of the last decision is the incumbent now."""
        self._incumbent, self._scores = version, self._candidate_scores

    def _compare(self, candidate: Eagle3Draft, traces: Sequence[Stored]) -> Comparison | None:
        """Over the traces of all ranks, on rank 0."""
        failed, scores = False, list[PromptScores]()
        try:
            self._add_scores(lambda: self._load_draft(self._incumbent), traces, self._scores)
            self._add_scores(lambda: candidate, traces, self._candidate_scores)
            for one in traces:
                pair = PairedScores(self._candidate_scores[one.trace_id], self._scores[one.trace_id])
                scores.append((one.provenance.prompt_hash, pair))
        except (DraftError, StoreError):
            failed = True
        if self._ranks.any(failed):
            raise StoreError(f"the incumbent, draft version {self._incumbent}, cannot be loaded to compare with it")
        parts = self._ranks.gather(msgspec.json.encode(scores))
        every = [one for part in parts for one in msgspec.json.decode(part, type=list[PromptScores])]
        return compare(by_prompt(every)) if self._ranks.leads else None

    def _add_scores(
        self, get_draft: Callable[[], Eagle3Draft], traces: Sequence[Stored], known: dict[str, Acceptance]
    ) -> None:
        unknown = [stored for stored in traces if stored.trace_id not in known]
        if not unknown:
            return
        draft = get_draft()
        for stored in unknown:
            known[stored.trace_id] = self._score(draft, stored, self._config)

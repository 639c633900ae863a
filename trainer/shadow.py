"""The gate's evidence: what candidate and incumbent would commit on the traces that were kept from learning.

Every rank scores its own traces, and rank 0 decides about all of them. Each draft is asked once about a trace: the
incumbent's answers are kept from one decision to the next, and those of a candidate become the incumbent's when it is
published. The golden set is asked only about a candidate that the held-out traces speak for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from speculator.acceptance import Acceptance
from speculator.draft.eagle3 import Eagle3Draft
from speculator.draft.precision import autocast
from speculator.errors import DraftError, StoreError
from trainer.config import TrainerConfig
from trainer.distributed import Ranks
from trainer.evaluate import predict_acceptance
from trainer.gate import Answer, Comparison, GateDecision, Outcome, Pair, by_prompt, compare, decide
from trainer.golden import GoldenSet
from trainer.guard import all_finite
from trainer.heldout import HeldOut
from trainer.provenance import Stored

# The local engine's; below it a chain ends.
MIN_CONFIDENCE = 0.15

Scores = dict[str, Acceptance]
"""By trace id."""


def score(draft: Eagle3Draft, stored: Stored, config: TrainerConfig) -> Acceptance:
    """What the draft would commit on one trace."""
    with autocast(draft.embed.device, is_wanted=config.autocast):
        found = predict_acceptance(draft, [stored.example], depths=[config.gate_depth], min_confidence=MIN_CONFIDENCE)
    return found[config.gate_depth]


class Shadow:
    """Judges candidates; all ranks call it in the same order."""

    def __init__(
        self,
        held_out: HeldOut,
        golden: GoldenSet,
        config: TrainerConfig,
        ranks: Ranks,
        *,
        load_draft: Callable[[int], Eagle3Draft],
    ) -> None:
        self._held_out, self._golden, self._config, self._ranks = held_out, golden, config, ranks
        self._load_draft = load_draft
        self._incumbent = 0
        self._scores: Scores = {}
        self._candidate_scores: Scores = {}

    def judge(self, candidate: Eagle3Draft, *, incumbent: int, has_moved: bool = False) -> GateDecision | None:
        """The decision about a candidate, on rank 0; None elsewhere. `has_moved`: the target, since the incumbent came.

        Raises StoreError, on all ranks, where one of them cannot load the incumbent.
        """
        start_s = time.monotonic()
        if not all_finite(dict(candidate.named_parameters())):
            return GateDecision(outcome=Outcome.REFUSE, reason="not finite", incumbent=incumbent)
        known = self._scores if incumbent == self._incumbent else {}
        here = {*self._held_out.trace_ids, *self._golden.trace_ids}
        self._incumbent, self._scores = incumbent, {one: score for one, score in known.items() if one in here}
        self._candidate_scores = {}
        fresh = self._compare(candidate, self._fresh())
        config = self._config
        epsilon = max(config.gate_epsilon, config.moved_epsilon) if has_moved else config.gate_epsilon
        decision = self._decide(fresh, None, epsilon)
        if self._ranks.any(decision is not None and decision.outcome is Outcome.PROMOTE):
            decision = self._decide(fresh, self._compare(candidate, list(self._golden)), epsilon)
        if decision is None:
            return None
        return msgspec.structs.replace(decision, seconds=time.monotonic() - start_s)

    def published(self, version: int) -> None:
        """The candidate of the last decision is the incumbent now."""
        self._incumbent, self._scores = version, self._candidate_scores

    def _fresh(self) -> list[Stored]:
        """The pool; while that is young, the golden traces are as fresh."""
        return [*self._held_out, *(self._golden if self._held_out.is_young else ())]

    def _compare(self, candidate: Eagle3Draft, traces: Sequence[Stored]) -> Comparison | None:
        """Over the traces of all ranks, on rank 0."""
        failed, answers = False, list[Answer]()
        try:
            answers = self._answers(candidate, traces)
        except (DraftError, StoreError):
            failed = True
        if self._ranks.any(failed):
            raise StoreError(f"the incumbent, draft version {self._incumbent}, cannot be loaded to compare with it")
        parts = self._ranks.gather(msgspec.json.encode(answers))
        every = [answer for part in parts for answer in msgspec.json.decode(part, type=list[Answer])]
        return compare(by_prompt(every)) if self._ranks.leads else None

    def _answers(self, candidate: Eagle3Draft, traces: Sequence[Stored]) -> list[Answer]:
        self._score(lambda: self._load_draft(self._incumbent), traces, self._scores)
        self._score(lambda: candidate, traces, self._candidate_scores)
        return [
            (one.provenance.prompt_hash, Pair(self._candidate_scores[one.trace_id], self._scores[one.trace_id]))
            for one in traces
        ]

    def _score(self, get_draft: Callable[[], Eagle3Draft], traces: Sequence[Stored], scores: Scores) -> None:
        """Add what is not known yet."""
        unknown = [stored for stored in traces if stored.trace_id not in scores]
        if not unknown:
            return
        draft = get_draft()
        for stored in unknown:
            scores[stored.trace_id] = score(draft, stored, self._config)

    def _decide(self, fresh: Comparison | None, golden: Comparison | None, epsilon: float) -> GateDecision | None:
        if fresh is None:
            return None
        return decide(
            fresh,
            golden,
            incumbent=self._incumbent,
            epsilon=epsilon,
            golden_epsilon=self._config.golden_epsilon,
        )

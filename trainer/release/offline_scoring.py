"""The gate's evidence: what candidate and incumbent would commit on the traces that were kept from learning.

Every rank scores its own traces, and rank 0 decides about all of them. Each draft is asked once about a trace: the
incumbent's answers are kept from one decision to the next, and those of a candidate become the incumbent's when it is
published. The golden set is asked only about a candidate that the held-out traces speak for.

**Offline acceptance** is what a draft would commit a verification, had it served the answers that traces hold.

The text does not depend on the draft (speculator/draft/verification.py), so a held-out trace can be decoded again:
every answer position is asked for the probability that the draft's proposal there is accepted, and the rounds that
follow from it are counted in expectation (trainer/release/acceptance.py). For greedy requests that is the count itself.

The engine ends a chain where its confidence, the draft's probability that the proposal is reached and accepted, falls
below `min_confidence`. For one running request that is reproduced exactly: on the path that is accepted the proposals
are the text, so the confidence at step k is Π_{i ≤ k} q(text token). In a batch the engine averages it over the running
requests, which a trace does not name; confident chains then end later and others sooner than predicted here. Control
rounds (depth 0) are no part of it, as they are none of the live figure.

Shape letters: N base positions, K = depth.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec
import torch
from torch import Tensor

from speculator.draft.eagle3 import Eagle3Draft, autocast
from speculator.errors import DraftError, StoreError
from trainer.config import TrainerConfig
from trainer.learning.batch import Batch, Example, Window, pack
from trainer.learning.optimizer_step import all_finite
from trainer.learning.ttt_unroll import unroll
from trainer.ranks import Ranks
from trainer.release.acceptance import Acceptance, coupled_acceptance, expected_rounds
from trainer.release.gate import Answer, Comparison, GateDecision, Outcome, Pair, by_prompt, compare, decide
from trainer.replay.eval_sets import GoldenSet, HeldOut
from trainer.replay.provenance import Stored

# Attention grows with the square of a batch, and so does its mask.
_MAX_BASES = 512
_ALL_CONTEXT = 1 << 31


def predict_acceptance(
    draft: Eagle3Draft, examples: Iterable[Example], *, depths: Sequence[int], min_confidence: float = 0.0
) -> dict[int, Acceptance]:
    """Acceptance over the answers of `examples` with chains of at most each of the `depths`.

    The draft reads the whole kept prompt as context, as in service.
    """
    totals = {depth: Acceptance() for depth in depths}
    for example in examples:
        accept_NK, labelled_N = _decode_again(draft, example, depth=max(depths), min_confidence=min_confidence)
        for depth in depths:
            totals[depth] += expected_rounds(accept_NK, labelled_N, depth)
    return totals


def _decode_again(draft: Eagle3Draft, example: Example, *, depth: int, min_confidence: float) -> tuple[Tensor, Tensor]:
    """`accept_probabilities` of the whole answer, a long one window by window."""
    greedy = example.sampling.temperature == 0
    parts = [(torch.zeros(0, depth, dtype=torch.float64), torch.zeros(0, dtype=torch.bool))]
    for start in range(example.answer_base, example.num_bases, _MAX_BASES):
        window = Window(example=example, start=start, num_bases=min(example.num_bases - start, _MAX_BASES))
        batch = pack([window], max_context=_ALL_CONTEXT).to(draft.embed.device)
        parts.append(accept_probabilities(draft, batch, depth=depth, min_confidence=min_confidence, greedy=greedy))
    return torch.cat([accept for accept, _ in parts]), torch.cat([labelled for _, labelled in parts])


@torch.no_grad()
def accept_probabilities(
    draft: Eagle3Draft, batch: Batch, *, depth: int, min_confidence: float, greedy: bool
) -> tuple[Tensor, Tensor]:
    """([N, depth] float64 P(proposal k of the chain from base n is verified and accepted, once those before it are),
    [N] bool the base has a label), both on the CPU. All of the batch's requests are greedy, or all sampled. What is
    not a number, because weights or features overflow, accepts nothing.
    """
    num_bases = len(batch.rows)
    device = batch.rows.device
    accept_NK = torch.zeros(num_bases, depth, dtype=torch.float64, device=device)
    labelled_N = torch.zeros(num_bases, dtype=torch.bool, device=device)
    confidence_N = torch.zeros(num_bases, device=device)
    least = math.log(min_confidence) if min_confidence else -math.inf
    # A greedy chain is followed while it is right; a sampled one may be right anywhere.
    wanted_NK = None if greedy else torch.ones(num_bases, depth, dtype=torch.bool, device=device)
    for proposals in unroll(draft, batch, num_steps=depth, wanted_NK=wanted_NK):
        chains = proposals.chains
        labels = batch.labels[proposals.label_rows]
        logits_SD = labels.tempered(proposals.logits)
        text_S = batch.draft_ids[proposals.label_rows + 1]
        accept_S = proposals.hits if greedy else coupled_acceptance(logits_SD, labels, text_S)
        chosen_S1 = text_S.clamp_min(0)[:, None]
        confidence_N[chains] += logits_SD.gather(1, chosen_S1)[:, 0] - logits_SD.logsumexp(-1)
        sure_S = accept_S.double() * (confidence_N[chains] >= least)
        accept_NK[chains, proposals.step] = sure_S.nan_to_num(0.0, posinf=0.0)
        if proposals.step == 0:
            labelled_N[chains] = True
    return accept_NK.cpu(), labelled_N.cpu()


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

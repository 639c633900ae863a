"""The gate: decides whether a candidate may replace the incumbent, on traces that neither has learnt from.

Both drafts decode the held-out traces again (`score`), and their accept lengths are compared (trainer/statistics.py).
Answers to one prompt resemble each other and count as one trace. Traces are few, so the bounds are those of Student's
t: with four traces only a large difference decides.

    promote   better, and worse by more than ε in at most one case of twenty
    refuse    worse, or worse by more than the golden ε on the golden set, in all but one case of twenty
    hold      anything else: the incumbent stays, training goes on, and the gate judges again after the next interval

When the target has moved since the incumbent was published, the candidate is expected to be better, and traces of the
new target are few. Then ε is wider (`moved_epsilon`); a promoted candidate must still come out better on them.

The golden set is old traffic. A draft that follows a legitimate shift of traffic may be a little worse on it, so it has
a wider ε and can only veto. A veto that lasts too long ends with a new golden set (trainer/replay/eval_sets.py). Only a
candidate that wins on the held-out traces is scored on it.

Every rank scores its own traces, and rank 0 decides about all of them. Each draft is scored once on a trace: the
incumbent's scores are kept from one decision to the next, and those of a candidate become the incumbent's when it is
published. How often the gate is wrong: benchmarks/results/gate.md.

**How many tokens a draft would commit.** A proposal is accepted when it is the token that the text has there, whatever
the engine's verification (`speculator.trace.Verification`). So a trace can be decoded again with any draft
(`predict_acceptance`): at every answer position we compute the probability that the draft's proposal is accepted, given
the text's token y, and from these the expected rounds. Control rounds, which draft nothing, are not counted.

**Beside earlier text.** Where a proposal from earlier text was right in service, the engine does not need the head:
such a round commits the same tokens with either draft. So the score depends on a draft only where text fails.

For a greedy request the draft's likeliest token is accepted or not, so the expectation is a plain count. The same holds
for an engine that verifies against the target's own sample (`target_only`). Where the engine samples the draft's
proposals, the trace does not have this draft's; with p served and q drafted the probability follows from y.

* **Coupled**, under drafter-invariant verification (speculator/draft/verification.py): with the same Gumbel noise p and
  q both choose y with probability 1 / Σ_x max(p(x)/p(y), q(x)/q(y)) (Moulton and Jiang, "Maximally consistent sampling
  and the Jaccard index of probability distributions", arXiv 1809.04052), the target alone with p(y), so
  P(accepted | y) = 1 / Σ_x max(p(x), q(x) · p(y) / q(y)).
* **Rejection sampling**: y is proposed and accepted with probability q(y) · min(1, p(y) / q(y)), emitted with p(y), so
  P(accepted | y) = min(1, q(y) / p(y)). Block verification accepts no less, and is counted so.

Equal distributions give 1. Samples at different positions are independent, so the probabilities along a chain multiply.

Shape letters: N base positions, S states, K kept target tokens or depth, D draft vocabulary.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor

from speculator.draft.eagle3 import Eagle3Draft, autocast
from speculator.errors import DraftError, StoreError
from speculator.trace import Trace, Verification
from speculator.versions.lifecycle import Number
from trainer.config import TrainerConfig
from trainer.learning.batch import Batch, Example, Window, pack
from trainer.learning.labels import Labels
from trainer.learning.optimizer_step import all_finite
from trainer.learning.ttt import unroll
from trainer.ranks import Ranks
from trainer.replay.eval_sets import GoldenSet, HeldOut
from trainer.replay.reservoirs import Stored
from trainer.statistics import MIN_TRACES, AcceptanceCounts, Comparison, PairedScores, PromptScores, by_prompt, compare

_MAX_RATIO = 1e30


def expected_rounds(
    accept_NK: Tensor, labelled_N: Tensor, depth: int, *, text_ahead_N: Tensor | None = None
) -> AcceptanceCounts:
    """What the verifications of one span would commit, in expectation, with chains of `depth` proposals.

    `accept_NK` [N, K ≥ depth] is the probability that proposal k of the chain from base n is accepted once those before
    it are; 0 where the chain has ended. `labelled_N` says whether the token that base n predicts has a label. A round
    at base n commits its accepted proposals and one token more, and the next one starts behind them. Positions without
    a label are passed over and counted nowhere. The last round counts only tokens inside the span. `text_ahead_N` [N]
    is how many tokens earlier text proposed rightly; where it is above 0 a round commits those instead of the chain.

    Example: N = 5, all labelled, [1, 0, 2, 1, 0] proposals accepted with probability 1, depth 3: rounds at 0 (2 tokens)
    and at 2 (3 tokens), so 5 tokens in 2 rounds, length 2.5.
    """
    accept, labelled = accept_NK[:, :depth].tolist(), labelled_N.tolist()
    num_bases = len(accept)
    ahead = [0] * num_bases if text_ahead_N is None else text_ahead_N.tolist()
    starts = [1.0, *[0.0] * num_bases]
    """Probability that a round starts at base n, or that the text ends there."""
    committed = rounds = 0.0
    reaching = [0.0] * depth
    for base in range(num_bases):
        share = starts[base]
        if not share:
            continue
        if not labelled[base]:
            starts[base + 1] += share
            continue
        rounds += share
        if ahead[base]:
            stop = min(base + ahead[base] + 1, num_bases)
            committed += share * (stop - base)
            starts[stop] += share
            continue
        for step, accepted in enumerate([*accept[base], 0.0]):
            stop = min(base + step + 1, num_bases)
            ends = share * (1 - accepted)
            committed += ends * (stop - base)
            starts[stop] += ends
            share *= accepted
            if step < depth:
                reaching[step] += share
            if not share:
                break
    return AcceptanceCounts(num_committed=committed, num_rounds=rounds, num_reaching=tuple(reaching))


def recorded_rounds(trace: Trace) -> AcceptanceCounts:
    """Tokens that a trace's own rounds committed in service, of the answer's tokens inside the span.

    A round that proposed nothing, control rounds included, leaves no record. A position that no recorded round covers
    counts as such a round.
    """
    first, rounds = trace.header.first_position, trace.rounds
    accepted_at = dict(zip((rounds.position - first).tolist(), rounds.num_accepted.tolist(), strict=True))
    last = trace.num_tokens - 1
    # The answer's first token comes with the prompt; the first round starts behind it.
    at = max(trace.header.num_prompt_tokens - first, 0)
    depth = rounds.draft_tokens.shape[1]
    committed = num_rounds = 0
    reaching = [0] * depth
    while at < last:
        accepted = accepted_at.get(at, 0)
        stop = min(at + accepted + 1, last)
        for step in range(min(accepted, last - at)):
            reaching[step] += 1
        committed, num_rounds, at = committed + stop - at, num_rounds + 1, stop
    return AcceptanceCounts(num_committed=committed, num_rounds=num_rounds, num_reaching=tuple(reaching))


def coupled_acceptance(logits_SD: Tensor, labels: Labels, tokens_S: Tensor) -> Tensor:
    """[S] probability that the draft proposes the emitted token, given that the target emitted it, under shared noise.

    Arguments as for `rejection_acceptance`.
    """
    given = _given_emitted(logits_SD, labels, tokens_S)
    ratio_S = (given.p / given.q).nan_to_num(0.0, posinf=_MAX_RATIO).clamp_max(_MAX_RATIO)
    below_S = torch.maximum(labels.tail, ratio_S * given.below_q)
    total_S = torch.maximum(given.kept_p, given.kept_q * ratio_S[:, None]).sum(-1) + given.outside_p + below_S
    return torch.where(given.is_possible, total_S.reciprocal(), 0.0)


def rejection_acceptance(logits_SD: Tensor, labels: Labels, tokens_S: Tensor) -> Tensor:
    """[S] probability that the draft proposed the emitted token and had it accepted, given that it was emitted.

    `logits_SD` are tempered (`Labels.tempered`), `tokens_S` draft ids of the emitted tokens, −1 outside the draft
    vocabulary. For the tokens below the kept ones a trace has only their total mass. There we take p proportional to q:
    exact where that mass is 0, too high an acceptance for an emitted token that was not kept.
    """
    given = _given_emitted(logits_SD, labels, tokens_S)
    # p may be 0 for an emitted token because recorded probabilities are rounded.
    accept_S = (given.q / given.p).nan_to_num(0.0, posinf=1.0).clamp_max(1.0)
    return torch.where(given.is_possible, accept_S, 0.0)


class _RowDistributions(NamedTuple):
    """Served p and drafted q of S rows."""

    kept_p: Tensor
    """[S, K], as `kept_q`: at the kept tokens, 0 at those that the draft cannot propose."""
    kept_q: Tensor
    p: Tensor
    """[S], as `q`: of the emitted token; of all tokens below the kept ones together where it is one of those."""
    q: Tensor
    outside_p: Tensor
    """[S] p of all kept tokens that the draft cannot propose."""
    below_q: Tensor
    """[S] q of all but the kept tokens."""
    is_possible: Tensor
    """[S] bool: the draft can propose the emitted token."""


def _given_emitted(logits_SD: Tensor, labels: Labels, tokens_S: Tensor) -> _RowDistributions:
    log_q_SK = logits_SD.gather(1, labels.draft_ids) - logits_SD.logsumexp(-1, keepdim=True)
    known_SK = labels.probs > 0
    kept_S = 1 - labels.tail
    p_SK, q_SK = labels.probs * kept_S[:, None], log_q_SK.exp() * known_SK
    q_below_S = (1 - q_SK.sum(-1)).clamp_min(0)
    emitted_SK = known_SK & (labels.draft_ids == tokens_S[:, None])
    is_kept_S = emitted_SK.any(-1)
    p_S = torch.where(is_kept_S, (p_SK * emitted_SK).sum(-1), labels.tail)
    q_S = torch.where(is_kept_S, (q_SK * emitted_SK).sum(-1), q_below_S)
    possible_S = is_kept_S | ((tokens_S >= 0) & (labels.tail > 0))
    return _RowDistributions(p_SK, q_SK, p_S, q_S, kept_S - p_SK.sum(-1), q_below_S, possible_S)


_DRAWN = {"coupled": coupled_acceptance, "rejection": rejection_acceptance, "block": rejection_acceptance}
"""Acceptance by kind of verification, where the engine samples the draft's proposals."""
_MAX_BASES = 512
_ALL_CONTEXT = 1 << 31


def predict_acceptance(
    draft: Eagle3Draft,
    examples: Iterable[Example],
    *,
    depths: Sequence[int],
    beside_text: bool = False,
    max_bases: int = _MAX_BASES,
) -> dict[int, AcceptanceCounts]:
    """Expected acceptance of a draft over the answers of `examples`, for chains of each of the `depths`.

    With `beside_text` a round in which earlier text was right in service commits that text's proposals. The draft reads
    the whole kept prompt as context, as in service. A long answer is computed in windows of `max_bases` positions,
    since attention and its mask grow with the square of a batch.
    """
    totals = {depth: AcceptanceCounts() for depth in depths}
    for example in examples:
        verification: Verification = "target_only" if example.sampling.temperature == 0 else example.verification
        most = max(depths)
        parts = [(torch.zeros(0, most, dtype=torch.float64), torch.zeros(0, dtype=torch.bool))]
        for start in range(example.answer_base, example.num_bases, max_bases):
            window = Window(example=example, start=start, num_bases=min(example.num_bases - start, max_bases))
            batch = pack([window], max_context=_ALL_CONTEXT).to(draft.embed.device)
            parts.append(accept_probabilities(draft, batch, depth=most, verification=verification))
        accept_NK, labelled_N = (torch.cat(column) for column in zip(*parts, strict=True))
        ahead_N = example.text_ahead[example.answer_base :] if beside_text else None
        for depth in depths:
            totals[depth] += expected_rounds(accept_NK, labelled_N, depth, text_ahead_N=ahead_N)
    return totals


@torch.no_grad()
def accept_probabilities(
    draft: Eagle3Draft, batch: Batch, *, depth: int, verification: Verification
) -> tuple[Tensor, Tensor]:
    """([N, depth] float64 P(proposal k of the chain from base n is accepted, once those before it are), [N] bool the
    base has a label), both on the CPU. `verification` holds for all requests of the batch; pass `target_only` for
    greedy ones. A probability of NaN, from overflowing weights or features, counts as 0.
    """
    num_bases, device = len(batch.rows), batch.rows.device
    accept_NK = torch.zeros(num_bases, depth, dtype=torch.float64, device=device)
    labelled_N = torch.zeros(num_bases, dtype=torch.bool, device=device)
    # A chain of likeliest tokens ends at its first wrong one; a sampled chain may reach every position.
    drawn = _DRAWN.get(verification)
    wanted_NK = None if drawn is None else torch.ones(num_bases, depth, dtype=torch.bool, device=device)
    for proposals in unroll(draft, batch, num_steps=depth, wanted_NK=wanted_NK):
        labels = batch.labels[proposals.label_rows]
        logits_SD = labels.tempered(proposals.logits)
        text_S = batch.draft_ids[proposals.label_rows + 1]
        accept_S = proposals.hits if drawn is None else drawn(logits_SD, labels, text_S)
        accept_NK[proposals.chains, proposals.step] = accept_S.double().nan_to_num(0.0, posinf=0.0)
        if proposals.step == 0:
            labelled_N[proposals.chains] = True
    return accept_NK.cpu(), labelled_N.cpu()


Score = Callable[[Eagle3Draft, Stored, TrainerConfig], AcceptanceCounts]


def score(draft: Eagle3Draft, stored: Stored, config: TrainerConfig) -> AcceptanceCounts:
    """What the draft would commit on one trace beside earlier text, with chains of `gate_depth`.

    An engine chooses the depth of each round by measured costs (speculator/proposals/planner.py), which a trace does
    not have. So both drafts are compared at one depth.
    """
    with autocast(draft.embed.device, is_wanted=config.autocast):
        found = predict_acceptance(draft, [stored.example], depths=[config.gate_depth], beside_text=True)
        return found[config.gate_depth]


class GateOutcome(enum.Enum):
    PROMOTE = "promote"
    REFUSE = "refuse"
    HOLD = "hold"


class GateDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The gate's decision about a candidate, with the numbers behind it."""

    outcome: GateOutcome
    reason: str
    incumbent: int
    """The version that the candidate was compared with."""
    fresh: Comparison | None = None
    """On held-out traces; None where the candidate's weights are not finite."""
    golden: Comparison | None = None
    """On the golden set; None where the candidate did not win on the held-out traces."""
    seconds: float = 0.0

    @property
    def is_vetoed(self) -> bool:
        """Better on held-out traces, and refused because of the golden set."""
        return self.outcome is GateOutcome.REFUSE and self.golden is not None

    @property
    def numbers(self) -> dict[str, Number]:
        """The decision's numbers as a flat dict; those of the golden set are named `golden_…`."""
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
    """Apply the gate's rule (at the top of this file); without `golden` the held-out traces decide alone."""
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


class CandidateGate:
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
        self._scores: dict[str, AcceptanceCounts] = {}
        self._candidate_scores: dict[str, AcceptanceCounts] = {}

    def judge(self, candidate: Eagle3Draft, *, incumbent: int, has_moved: bool = False) -> GateDecision | None:
        """The decision about a candidate, on rank 0; None elsewhere. `has_moved`: the target has moved since the
        incumbent was published.

        Raises StoreError, on all ranks, where one of them cannot load the incumbent.
        """
        start_s, config = time.monotonic(), self._config
        if not all_finite(dict(candidate.named_parameters())):
            return GateDecision(outcome=GateOutcome.REFUSE, reason="not finite", incumbent=incumbent)
        known = self._scores if incumbent == self._incumbent else {}
        here = {*self._held_out.trace_ids, *self._golden.trace_ids}
        self._incumbent, self._scores = incumbent, {one: score for one, score in known.items() if one in here}
        self._candidate_scores = {}
        # Until the held-out pool has released a trace, the golden traces are as recent as its own.
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
        """Make the candidate of the last decision the incumbent, with its scores."""
        self._incumbent, self._scores = version, self._candidate_scores

    def _compare(self, candidate: Eagle3Draft, traces: Sequence[Stored]) -> Comparison | None:
        """Compare both drafts over the traces of all ranks; the result is on rank 0, None elsewhere."""
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
        return compare(by_prompt(every)) if self._ranks.is_leader else None

    def _add_scores(
        self, get_draft: Callable[[], Eagle3Draft], traces: Sequence[Stored], known: dict[str, AcceptanceCounts]
    ) -> None:
        unknown = [stored for stored in traces if stored.trace_id not in known]
        if not unknown:
            return
        draft = get_draft()
        for stored in unknown:
            known[stored.trace_id] = self._score(draft, stored, self._config)

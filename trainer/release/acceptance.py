"""How many tokens a verification commits: counted from recorded rounds, or expected from acceptance probabilities.

Under drafter-invariant verification (speculator/draft/verification.py) the text is fixed whatever the draft proposes: a
round at base n accepts proposals as long as they are the text's tokens. So a trace can be decoded again with any draft.
For a greedy request each proposal then is accepted or not. For a sampled one the noise that target and draft shared is
not in the trace, but the token y that it made the target emit is, and the probability that the draft proposes y under
the same noise follows. With Gumbel noise on served p and drafted q both choose y with probability 1 / Σ_x
max(p(x)/p(y), q(x)/q(y)) (Moulton and Jiang, "Maximally consistent sampling and the Jaccard index of probability
distributions", arXiv 1809.04052), and the target alone chooses it with p(y), so

    P(accepted | y) = 1 / Σ_x max(p(x), q(x) · p(y) / q(y))

Equal distributions give 1. Noise of different positions is independent, and a position's noise decides one accepted
proposal or one rejection, never both: the probabilities along a chain multiply.

Shape letters: N base positions, S states, K kept target tokens, D draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from speculator.trace import Trace
from trainer.learning.labels import Labels

_MAX_RATIO = 1e30


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Verifications and what they committed; adds up over spans. Whole numbers where counted, not where expected.

    `num_reaching[k]` is the number of rounds that accepted more than k proposals.
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
        """For each place k in the chain: the share of the rounds that accepted k proposals that also accept the next.

        A chain that ends early, for lack of confidence or room, has not accepted the next.
        """
        before = (self.num_rounds, *self.num_reaching)
        return tuple(
            after / reached if reached else 0.0 for reached, after in zip(before, self.num_reaching, strict=False)
        )

    def __add__(self, other: Acceptance) -> Acceptance:
        reaching = zip_longest(self.num_reaching, other.num_reaching, fillvalue=0)
        return Acceptance(
            num_committed=self.num_committed + other.num_committed,
            num_rounds=self.num_rounds + other.num_rounds,
            num_reaching=tuple(mine + theirs for mine, theirs in reaching),
        )


def expected_rounds(accept_NK: Tensor, labelled_N: Tensor, depth: int) -> Acceptance:
    """Decode one span again with chains of `depth`: what would its verifications commit?

    `accept_NK` [N, K ≥ depth] is the probability that proposal k of the chain from base n is accepted once those before
    it are; 0 where the chain has ended. `labelled_N` says whether the token that base n predicts has a label. A round
    at base n commits its accepted proposals and one token more, and the next one starts behind them. Positions without
    a label are passed over and counted nowhere. The last round counts only tokens inside the span.

    Example: N = 5, all labelled, accepted for sure [1, 0, 2, 1, 0] leading proposals, depth 3: rounds at 0 (2 tokens)
    and at 2 (3 tokens), so 5 tokens in 2 rounds, length 2.5.
    """
    accept, labelled = accept_NK[:, :depth].tolist(), labelled_N.tolist()
    num_bases = len(accept)
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
    return Acceptance(num_committed=committed, num_rounds=rounds, num_reaching=tuple(reaching))


def recorded_rounds(trace: Trace) -> Acceptance:
    """What the rounds that a trace recorded committed, of the answer's tokens inside the span.

    A round in which nothing was proposed leaves no record; it is a position that no recorded round covers, and so is a
    control round, which live figures leave out.
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
    return Acceptance(num_committed=committed, num_rounds=num_rounds, num_reaching=tuple(reaching))


def coupled_acceptance(logits_SD: Tensor, labels: Labels, tokens_S: Tensor) -> Tensor:
    """[S] probability that the draft proposes the emitted token, given that the target emitted it, under shared noise.

    `logits_SD` are tempered (`Labels.tempered`), `tokens_S` draft ids of the emitted tokens, −1 outside the draft
    vocabulary. Below the kept tokens, where the trace has a mass and no shape, the target is taken to be shaped like
    the draft: that is exact where nothing is served there, and too hopeful for an emitted token that was not kept.
    """
    log_q_SK = logits_SD.gather(1, labels.draft_ids) - logits_SD.logsumexp(-1, keepdim=True)
    known_SK = labels.probs > 0
    kept_S = 1 - labels.tail
    p_SK, q_SK = labels.probs * kept_S[:, None], log_q_SK.exp() * known_SK
    q_below_S = (1 - q_SK.sum(-1)).clamp_min(0)
    emitted_SK = known_SK & (labels.draft_ids == tokens_S[:, None])
    is_kept_S = emitted_SK.any(-1)
    # p / q of the emitted token.
    p_S = torch.where(is_kept_S, (p_SK * emitted_SK).sum(-1), labels.tail)
    q_S = torch.where(is_kept_S, (q_SK * emitted_SK).sum(-1), q_below_S)
    ratio_S = (p_S / q_S).nan_to_num(0.0, posinf=_MAX_RATIO).clamp_max(_MAX_RATIO)
    outside_S = kept_S - p_SK.sum(-1)
    below_S = torch.maximum(labels.tail, ratio_S * q_below_S)
    total_S = torch.maximum(p_SK, q_SK * ratio_S[:, None]).sum(-1) + outside_S + below_S
    possible_S = is_kept_S | ((tokens_S >= 0) & (labels.tail > 0))
    return torch.where(possible_S, total_S.reciprocal(), 0.0)

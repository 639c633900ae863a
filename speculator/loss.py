"""What the draft learns from a trace, and how its acceptance is counted: pure functions.

**Labels.** Row t of a trace is the target's distribution p(· | tokens 0…t) over its K likeliest tokens. Temperature,
top-k and top-p of the request turn it into the served distribution, renormalised over the K kept tokens: whatever
lies below them has no identity in the trace. Tokens outside the draft vocabulary are then dropped *without*
renormalising, so a row sums to m = Σ_{x ∈ D} p(x), the share that the draft could propose at all.

**Alignment.** At base position t the draft reads the target's feature of t and token t+1, and predicts token t+2. In
step k of training-time test (EAGLE-3, arXiv 2503.01840, section 3.2) it reads its own output of step k−1 in place of
the feature, and token t+1+k, and predicts token t+2+k: the label is row t+1+k. Prompt `A B` (P = 2), completion
`C D E F` (T = 6):

    position t      0 A   1 B   2 C   3 D   4 E   5 F
    target row t     –    → C   → D   → E   → F   → (outside the span)

    base t = 1 = P−1   step 0 reads B, C   predicts D from row 2   step 1: E, row 3   step 2: F, row 4
    base t = 2         step 0 reads C, D   predicts E from row 3   step 1: F, row 4
    base t = 3         step 0 reads D, E   predicts F from row 4
    base t = 4         would predict position 6, which nobody committed: no label

The chain that drafts the second token of every answer starts at P−1, the last prompt position. Earlier prompt positions
are bases too where the trace has their distributions, and context only where it has not.

**Forward KL** of one row, up to the constant Σ p log p, and already multiplied by the share m that can be accepted:

    loss = −Σ_{x ∈ D} p(x) log q(x) = m · log Σ_{y ∈ D} exp z_y − Σ_{x ∈ D} p(x) z_x

A row whose token the draft cannot propose weighs nothing; the full distribution over D is never stored.

Shape letters: T tokens of the span, R rows, N base positions, S chains still alive, K kept target tokens, D draft
vocabulary, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from speculator.sampling import SamplingParams
from speculator.verify import served_logits

GREEDY_LABEL_TEMPERATURE = 1.0
"""Temperature of the labels of greedy requests. Their served distribution is one token, which teaches far less."""


@dataclass(frozen=True, kw_only=True)
class Labels:
    """Distillation targets of R rows.

    `draft_ids` [R, K] int64 (0 where the kept token is outside the draft vocabulary), `probs` [R, K] float32 served
    probabilities (0 there, and on rows without a label), `labelled` [R] bool: the target's own distribution is known.
    """

    draft_ids: Tensor
    probs: Tensor
    labelled: Tensor


def draft_ids_by_target_id(d2t_D: Tensor, vocab_size: int) -> Tensor:
    """[V] int64: the draft id of every target token, −1 outside the draft vocabulary. `d2t_D` holds offsets."""
    draft_ids_D = torch.arange(d2t_D.numel())
    draft_ids_V = torch.full((vocab_size,), -1, dtype=torch.int64)
    draft_ids_V[draft_ids_D + d2t_D] = draft_ids_D
    return draft_ids_V


def make_labels(
    topk_ids_RK: Tensor, topk_logprobs_RK: Tensor, constrained_R: Tensor, sampling: SamplingParams, draft_ids_V: Tensor
) -> Labels:
    """Labels of R trace rows: ids −1 and log-probabilities −inf where the distribution was not computed.

    Constrained rows (a grammar or a penalty changed the distribution) get no label.
    """
    labelled_R = (topk_ids_RK[:, 0] >= 0) & ~constrained_R
    if sampling.temperature == 0:
        sampling = msgspec.structs.replace(sampling, temperature=GREEDY_LABEL_TEMPERATURE, top_p=1.0, top_k=0)
    logits_RK = served_logits(topk_logprobs_RK.float(), sampling)
    draft_ids_RK = draft_ids_V[topk_ids_RK.long().clamp_min(0)]
    known_RK = labelled_R[:, None] & (topk_ids_RK >= 0) & (draft_ids_RK >= 0)
    # Rows without a distribution are −inf throughout, and their softmax is NaN: masked, never multiplied away.
    probs_RK = logits_RK.softmax(-1).masked_fill(~known_RK, 0.0)
    return Labels(draft_ids=draft_ids_RK.clamp_min(0), probs=probs_RK, labelled=labelled_R)


def forward_kl(logits_SD: Tensor, draft_ids_SK: Tensor, probs_SK: Tensor) -> Tensor:
    """[S] float32 forward KL of each row in nats, without its constant (see the module's formula)."""
    logits_SD = logits_SD.float()
    chosen_SK = logits_SD.gather(1, draft_ids_SK)
    return probs_SK.sum(-1) * logits_SD.logsumexp(-1) - (probs_SK * chosen_SK).sum(-1)


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Tokens committed by a number of verifications; adds up over spans."""

    num_committed: int = 0
    num_rounds: int = 0

    @property
    def length(self) -> float:
        """Committed tokens per verification, the bonus token included; 1.0 means that drafting never helped."""
        return self.num_committed / self.num_rounds if self.num_rounds else 1.0

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(
            num_committed=self.num_committed + other.num_committed, num_rounds=self.num_rounds + other.num_rounds
        )


def count_rounds(accepted_N: Tensor, labelled_N: Tensor, depth: int) -> Acceptance:
    """Decode one span again with chains of `depth`: what would each verification have committed?

    `accepted_N` counts the leading proposals of the chain from base n that equal the span's tokens (the emitted token
    decides, see speculator/verify.py); `labelled_N` says whether the token that base n predicts has a label. A round at
    base n commits accepted + 1 tokens and the next one starts behind them. Positions without a label are passed over
    and counted nowhere. The last round is cut at the end of the span and counts only tokens inside it.

    Example: N = 5, all labelled, accepted = [1, 0, 2, 1, 0], depth 3: rounds at 0 (2 tokens) and at 2 (3 tokens), so
    5 tokens in 2 rounds, length 2.5.
    """
    accepted = accepted_N.clamp_max(depth).tolist()
    labelled = labelled_N.tolist()
    committed = rounds = base = 0
    while base < len(accepted):
        if not labelled[base]:
            base += 1
            continue
        stop = min(base + accepted[base] + 1, len(accepted))
        committed, rounds, base = committed + stop - base, rounds + 1, stop
    return Acceptance(num_committed=committed, num_rounds=rounds)

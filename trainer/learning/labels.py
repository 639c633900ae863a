"""Training labels from a trace: the target's distribution at every position, and verdicts on proposals.

**Labels.** Row t of a trace is the target's distribution p(· | tokens 0…t) over its K likeliest tokens. Temperature,
top-k and top-p of the request turn it into the served distribution. Tokens outside the draft vocabulary D are then
dropped *without* renormalising, so a row sums to m = Σ_{x ∈ D} p(x), the share that the draft can propose at most.

**Tail.** Of the tokens below the K kept ones a trace has only the total mass. `probs` is renormalised over the kept
tokens, which a distillation term can teach. `tail` is the share r of the served distribution that is missing, so (1 −
r) · probs is the served probability, for terms that compare probabilities (acceptance, reverse KL). At temperature 1
the recorded log-probabilities give r exactly, to their float16 rounding. At another temperature T the tail is taken for
n = r₁ / p_K tokens as likely as the least likely kept one, at most all others of the vocabulary, so that it weighs r₁ ·
p_K^(1/T − 1): too much below temperature 1, too little above it. Top-k within the kept tokens and a nucleus that ends
within them leave no tail; the nucleus is cut by served, not by renormalised, mass.

**Greedy.** A greedy request is served the target's likeliest token, which alone decides acceptance: `Labels.served` has
probability 1 there. `probs` of its rows are the target's at temperature 1, so they teach more than one token; a
rejected token may be likely by them. `cross_entropy` and terms that judge proposals use `served`. Terms that distil use
`probs`, and so do `acceptance` and `log_acceptance`, on purpose: so they teach more than one token.

**Temperature.** The engine draws proposals from softmax(z / T) with the request's T, so that q is compared with p:
`temperature` is T for sampled requests and 1 for greedy ones.

**Alignment.** At base position t the draft reads the target's feature of t and token t+1, and predicts token t+2. In
step k of training-time test (EAGLE-3, arXiv 2503.01840, section 3.2) it reads its own output of step k−1 in place of
the feature, and token t+1+k, and predicts token t+2+k: the label is row t+1+k. Prompt `A B` (P = 2), completion
`C D E F` (T = 6):

    position t      0 A   1 B   2 C   3 D   4 E   5 F
    target row t     –    → C   → D   → E   → F   → (outside the span)

    base t = 1 = P−1   step 0 reads B, C   predicts D from row 2   step 1: E, row 3   step 2: F, row 4
    base t = 2         step 0 reads C, D   predicts E from row 3   step 1: F, row 4
    base t = 3         step 0 reads D, E   predicts F from row 4
    base t = 4         would predict position 6, which is outside the span: no label

The chain that drafts the second token of every answer starts at P−1, the last prompt position. Earlier prompt positions
are bases too where the trace has their distributions, and context only where it has not.

**Verdicts.** A round at position p was drafted by the chain of base p−1, and a proposal at depth k of its tree (the
root's children have depth 0) is for position p+1+k: it belongs to step k, and the target judged it by row p+k *if its
parent was committed*. In a chain these are the accepted proposals and the first rejected one; in a tree also the
siblings of accepted nodes. Nodes below a rejected one were judged after a text that was not committed; they have no
verdict. A round at p = 2 proposes `D X Y` where `D E` was committed:

    D  step 0, accepted (row 2)      X  step 1, rejected (row 3)      Y  below X: no verdict

A proposal is accepted when it is the committed token. Verification emits the same token whatever was proposed
(speculator/draft/verification.py), and under rejection sampling, of single proposals or of blocks, a rejected token is
never the one that replaces it, since its q is above its p.

**Branches.** A row behind a rejection is the target's distribution after the text up to a rejected proposal x. If x had
been committed, the draft's next first step would read the pair (x, target's feature of x's parent), after the pairs of
the text before. So this pair is the training input, and the row is its label. The parent of the first rejected proposal
is committed, and its feature is in the span; that of a later one is in its parent's row. Above, at p = 2, X has
position 4, as E has. If the rows of X and Y were kept:

    X  reads feature 3 (D), X    behind the pairs of positions 0 … 2              predicts from the row of X
    Y  reads feature of X, Y     behind the same pairs, and the pair of X         predicts from the row of Y

Shape letters: T tokens of the span, R rows (in `make_verdicts`, rounds), P proposals a round, J verdicts, S states,
N rows behind rejections, w = 3d feature width, K kept target tokens, D draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from speculator.draft.sampling_params import SamplingParams
from speculator.draft.verification import served_logits
from speculator.errors import TraceError
from speculator.trace import NO_DRAFT, BranchRows, Trace, judge_proposals

GREEDY_LABEL_TEMPERATURE = 1.0
"""Temperature of the labels of greedy requests."""
NEARLY_GREEDY = 0.1
"""A request of a lower temperature T is learned from as a greedy one: a gradient grows with 1 / T, so a few such traces
would outweigh all others."""
_FINITE = 80.0
"""An exponent whose power is finite in float32."""


@dataclass(frozen=True, kw_only=True)
class Labels:
    """Distillation targets of R rows.

    `draft_ids` [R, K] int64 (0 where the kept token is outside the draft vocabulary), `probs` [R, K] float32 the
    distribution to learn: probabilities among the kept tokens, likeliest first (0 outside the draft vocabulary, and on
    rows without a label), `tail` [R] float32 the mass of all other tokens, `temperature` [R] float32 of the draft's
    proposals here, `greedy` [R] bool: the request is greedy, `labelled` [R] bool: the trace has the target's
    unconstrained distribution.
    """

    draft_ids: Tensor
    probs: Tensor
    tail: Tensor
    temperature: Tensor
    greedy: Tensor
    labelled: Tensor

    def __getitem__(self, rows: Tensor | slice) -> Labels:
        """Some of the rows, by index, mask or slice."""
        return Labels(**{name: tensor[rows] for name, tensor in vars(self).items()})

    @property
    def served(self) -> Tensor:
        """[R, K] float32 `probs` of the distribution that decides acceptance: on greedy rows 1 for the likeliest token,
        if the draft can propose it, and no tail.
        """
        likeliest_RK = torch.zeros_like(self.probs)
        likeliest_RK[:, 0] = (self.probs[:, 0] > 0).to(self.probs.dtype)
        return torch.where(self.greedy[:, None], likeliest_RK, self.probs)

    @property
    def served_tail(self) -> Tensor:
        """[R] float32 `tail` of that distribution."""
        return torch.where(self.greedy, 0.0, self.tail)

    def tempered(self, logits: Tensor) -> Tensor:
        """Draft logits [R, D] of these rows as the engine samples from them: float32, divided by the temperature."""
        logits = logits.float()
        return logits if bool((self.temperature == 1).all()) else logits / self.temperature[:, None]


@dataclass(frozen=True, kw_only=True)
class Verdicts:
    """J judged proposals, in no particular order.

    `bases` [J] int64 the base whose chain proposed, `steps` [J] int64 the proposal's depth in the chain, `draft_ids`
    [J] int64, `logprobs` [J] float32 under the draft that proposed, at the request's temperature
    (`Correction` in trainer/learning/losses/correction.py says what they mean), `accepted` [J] bool, `versions` [J]
    int64 of the draft that proposed, `committed` [J] int64 draft id of the token that the target emitted there, −1
    outside the draft vocabulary.
    """

    bases: Tensor
    steps: Tensor
    draft_ids: Tensor
    logprobs: Tensor
    accepted: Tensor
    versions: Tensor
    committed: Tensor

    def __len__(self) -> int:
        return len(self.bases)

    def __getitem__(self, chosen: Tensor) -> Verdicts:
        """Some of them, by index or mask."""
        return Verdicts(**{name: tensor[chosen] for name, tensor in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class Branches:
    """N rows behind rejections.

    `bases` [N] int64 the base that the first pair of its path replaces; `paths` [N, N] bool the rows of its path,
    itself included; `token_ids` [N] int64 and `aux` [N, w] bfloat16 the pair that the draft reads; `labels` of N rows.
    """

    bases: Tensor
    paths: Tensor
    token_ids: Tensor
    aux: Tensor
    labels: Labels

    def __len__(self) -> int:
        return len(self.bases)

    def within(self, start: int, end: int) -> Branches:
        """The branches with start ≤ base < end."""
        chosen_N = (self.bases >= start) & (self.bases < end)
        own = {name: value[chosen_N] for name, value in vars(self).items()}
        return Branches(**{**own, "paths": own["paths"][:, chosen_N]})

    @property
    def num_bytes(self) -> int:
        tensors = (self.bases, self.paths, self.token_ids, self.aux, *vars(self.labels).values())
        return sum(tensor.nbytes for tensor in tensors)


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

    Constrained rows (a grammar, a bias or the like changed the distribution) get no label.
    """
    labelled_R = (topk_ids_RK[:, 0] >= 0) & ~constrained_R
    is_greedy = sampling.temperature == 0
    if is_greedy:
        sampling = msgspec.structs.replace(sampling, temperature=GREEDY_LABEL_TEMPERATURE, top_p=1.0, top_k=0)
    logits_RK, tail_R = _served_topk(topk_logprobs_RK.float(), sampling, vocab_size=len(draft_ids_V))
    draft_ids_RK = draft_ids_V[topk_ids_RK.long().clamp_min(0)]
    known_RK = labelled_R[:, None] & (topk_ids_RK >= 0) & (draft_ids_RK >= 0)
    # Rows without a distribution are all −inf, and their softmax is NaN: masked, since NaN times 0 is NaN.
    probs_RK = logits_RK.softmax(-1).masked_fill(~known_RK, 0.0)
    return Labels(
        draft_ids=draft_ids_RK.clamp_min(0),
        probs=probs_RK,
        tail=tail_R.masked_fill(~labelled_R, 0.0),
        temperature=torch.full_like(tail_R, sampling.temperature),
        greedy=torch.full_like(labelled_R, is_greedy),
        labelled=labelled_R,
    )


def _served_topk(logprobs_RK: Tensor, sampling: SamplingParams, *, vocab_size: int) -> tuple[Tensor, Tensor]:
    """(served logits [R, K] of the kept tokens, −inf where dropped; [R] the served share of all other tokens).

    Rows are sorted from the likeliest. See **Tail** above.
    """
    K = logprobs_RK.shape[-1]
    least_R = logprobs_RK.masked_fill(logprobs_RK.isneginf(), 0.0).amin(-1)
    # n is finite, and at most the number of other tokens: where r₁ is only rounding, r₁ / p_K may be far above that.
    num_more_R = (1 - logprobs_RK.exp().sum(-1)).clamp_min(0) * (-least_R).clamp_max(_FINITE).exp()
    num_more_R = num_more_R.clamp_max(max((sampling.top_k or vocab_size) - K, 0))
    # Relative to the likeliest token: at a low temperature its own weight, too, would be 0 in float32.
    best_R = logprobs_RK[:, 0].nan_to_num(neginf=0.0)
    logits_RK = served_logits(logprobs_RK - best_R[:, None], msgspec.structs.replace(sampling, top_p=1.0))
    weights_RK, tail_R = logits_RK.exp(), num_more_R * ((least_R - best_R) / sampling.temperature).exp()
    if sampling.top_p < 1:
        nucleus_R = sampling.top_p * (weights_RK.sum(-1) + tail_R)
        # A token stays while the mass before it is below top_p, so the likeliest always stays.
        dropped_RK = weights_RK.cumsum(-1) - weights_RK >= nucleus_R[:, None]
        logits_RK = logits_RK.masked_fill(dropped_RK, float("-inf"))
        tail_R = (nucleus_R - weights_RK.sum(-1)).clamp_min(0)
    return logits_RK, tail_R / (logits_RK.exp().sum(-1) + tail_R)


def make_verdicts(trace: Trace, draft_ids_V: Tensor, *, first_base: int) -> Verdicts:
    """The judged proposals of a trace, chains and trees; `bases` counts from span index `first_base`.

    Proposals outside the draft vocabulary, of rounds before the first base and beyond the span's end are left out.
    """
    rounds, tokens_T = trace.rounds, trace.token_ids
    start_R = rounds.position.astype(np.int64) - trace.header.first_position
    depth_RP, judged_RP, accepted_RP = judge_proposals(trace)
    committed_RP = tokens_T[np.minimum(start_R[:, None] + 1 + depth_RP, len(tokens_T) - 1)]
    tokens_RP = rounds.draft_tokens
    is_drafts_R = (rounds.draft_version != NO_DRAFT) & (start_R - 1 >= first_base)
    known_RP = judged_RP & (tokens_RP < len(draft_ids_V)) & is_drafts_R[:, None]
    round_J, node_J = np.nonzero(known_RP)
    verdicts = Verdicts(
        bases=torch.from_numpy(start_R[round_J] - 1 - first_base),
        steps=torch.from_numpy(depth_RP[round_J, node_J]),
        draft_ids=draft_ids_V[torch.from_numpy(tokens_RP[round_J, node_J]).long()],
        logprobs=torch.from_numpy(rounds.draft_logprobs[round_J, node_J]).float(),
        accepted=torch.from_numpy(accepted_RP[round_J, node_J]),
        versions=torch.from_numpy(rounds.draft_version[round_J]).long(),
        committed=draft_ids_V[torch.from_numpy(committed_RP[round_J, node_J]).long()],
    )
    return verdicts[verdicts.draft_ids >= 0]


def make_text_ahead(trace: Trace, *, first_base: int, num_bases: int) -> Tensor:
    """[N] int64: how many of the tokens after base n were proposed by earlier text in service, and accepted.

    From the rounds that proposed earlier text; a base inside such a run has the rest of the run.
    """
    rounds, ahead_N = trace.rounds, torch.zeros(num_bases, dtype=torch.int64)
    from_text_R = rounds.draft_version == NO_DRAFT
    base_R = rounds.position[from_text_R].astype(np.int64) - trace.header.first_position - 1 - first_base
    for base, accepted in zip(base_R.tolist(), rounds.num_accepted[from_text_R].tolist(), strict=True):
        for step in range(max(-base, 0), min(accepted, num_bases - base)):
            ahead_N[base + step] = accepted - step
    return ahead_N


def make_branches(trace: Trace, rows: BranchRows, draft_ids_V: Tensor, *, first_base: int) -> Branches:
    """The trace's rows behind rejections; `bases` counts from span index `first_base`.

    They have no label where the span's distribution at their base is constrained. Raises TraceError for a token id
    outside the target's vocabulary, and for a row whose probabilities are not finite.
    """
    rounds, (depth_RP, _, _) = trace.rounds, judge_proposals(trace)
    start_R = rounds.position.astype(np.int64) - trace.header.first_position
    bases, aux, paths = list[int](), list[Tensor](), torch.eye(len(rows), dtype=torch.bool)
    known: dict[tuple[int, int], int] = {}
    for row, (round_, node) in enumerate(zip(rows.round.tolist(), rows.node.tolist(), strict=True)):
        known[round_, node] = row
        parent = known.get((round_, int(rounds.draft_parents[round_, node])))
        if parent is None:
            bases.append(int(start_R[round_] + depth_RP[round_, node]))
            aux.append(trace.aux_hidden[bases[-1]])
        else:
            bases.append(bases[parent])
            aux.append(rows.hidden[parent])
            paths[row] |= paths[parent]
    token_ids_N = torch.from_numpy(rounds.draft_tokens[rows.round, rows.node]).long()
    ids_NK, logprobs_NK = torch.from_numpy(rows.topk_ids), torch.from_numpy(rows.topk_logprobs)
    if max(int(token_ids_N.max()), int(ids_NK.max())) >= len(draft_ids_V):
        raise TraceError(f"a token id behind a rejection is outside the target's vocabulary of {len(draft_ids_V)}")
    constrained_N = torch.from_numpy(trace.constrained)[bases]
    labels = make_labels(ids_NK, logprobs_NK, constrained_N, trace.header.sampling, draft_ids_V)
    if not bool(torch.isfinite(labels.probs).all()):
        raise TraceError("a target distribution behind a rejection has no finite probability")
    return Branches(
        bases=torch.tensor(bases) - first_base, paths=paths, token_ids=token_ids_N, aux=torch.stack(aux), labels=labels
    )

"""Losses on judged proposals, from the trace's verdicts or the draft's own.

z are the draft's logits over the draft vocabulary D, q = softmax z, x a proposal, y the token that was committed in its
place, s the served distribution, w(ρ) the weight of `Correction` (trainer/learning/losses/correction.py):

    policy_gradient  −w(ρ) · A · log q(x),  A = [x accepted] − b          REINFORCE; b a running mean of [x accepted]
    discard          w(ρ) · KL(s_F ‖ q_F) at a rejected proposal          after Aurora's discard term, 2602.06932
    margin           w(ρ) · log(1 + exp(z_x − z_y)) at a rejected one     [x rejected] ≤ margin / log 2

F is the `discard_top_k` likeliest tokens that are served and the rejected one, and s_F, q_F are s and q renormalised on
F: the gradient q_F − s_F moves probability from the rejected token to the served ones.

In a greedy request the draft's likeliest token x is rejected where z_x > z_y, so the margin bounds the rejection rate;
cross-entropy, log Σ_v exp(z_v − z_y), is the same bound with all other tokens in the sum, and never tighter.

Where A < 0, log q(x) would fall without bound, so it counts only down to q(x) = 10⁻⁴.

Verdicts can add little by construction. The emitted token does not depend on the draft, and the trace has the target's
distribution there. So a verdict only tells what an older draft proposed, not what the target prefers. With
`verdicts=fresh` the current draft's likeliest tokens are judged instead, by the committed text alone.

Shape letters: J proposals, K kept target tokens, F tokens of the filter, D draft vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

_LEAST_REJECTED = math.log(1e-4)
_LEAST_TOTAL = 1e-8


def policy_gradient(log_q_J: Tensor, advantages_J: Tensor, weights_J: Tensor) -> Tensor:
    """[J] −w · A · log q(x), with q at least 10⁻⁴ where A < 0; neither weight nor advantage has a gradient."""
    bounded_J = torch.where(advantages_J < 0, log_q_J.clamp_min(_LEAST_REJECTED), log_q_J)
    return -(weights_J * advantages_J).detach() * bounded_J


def discard(logits_JD: Tensor, draft_ids_JK: Tensor, probs_JK: Tensor, rejected_J: Tensor, *, top_k: int) -> Tensor:
    """[J] float32 KL(s_F ‖ q_F) at rejected proposals; 0 where the draft can propose none of the likeliest served ones.

    `probs_JK` are served probabilities, `rejected_J` draft ids. Where the rejected token is itself among the target's
    likeliest, it keeps its own probability: under sampling the target may reject a likely token.
    """
    ids_JF = torch.cat([draft_ids_JK[:, :top_k], rejected_J[:, None]], 1)
    is_rejected_JK = (draft_ids_JK == rejected_J[:, None]) & (probs_JK > 0)
    probs_J = (probs_JK * is_rejected_JK).sum(-1)
    # The rejected token has the last column; it is masked among the first, or it would count twice.
    first_JF = probs_JK[:, :top_k].masked_fill(is_rejected_JK[:, :top_k], 0.0)
    weights_JF = torch.cat([first_JF, probs_J[:, None]], 1)
    total_J1 = weights_JF.sum(-1, keepdim=True)
    p_JF = weights_JF / total_J1.clamp_min(_LEAST_TOTAL)
    absent_JF = torch.cat([first_JF == 0, torch.zeros_like(probs_J, dtype=torch.bool)[:, None]], 1)
    chosen_JF = logits_JD.float().gather(1, ids_JF).masked_fill(absent_JF, float("-inf"))
    log_q_JF = chosen_JF.log_softmax(-1).masked_fill(p_JF == 0, 0.0)
    divergence_J: Tensor = (torch.special.xlogy(p_JF, p_JF) - p_JF * log_q_JF).sum(-1)
    return divergence_J


def margin(logits_JD: Tensor, rejected_J: Tensor, committed_J: Tensor) -> Tensor:
    """[J] float32 log(1 + exp(z_x − z_y)) of draft ids x and y; 0 where the draft cannot propose y, whose id is −1."""
    lead_J = logits_JD.gather(1, rejected_J[:, None]) - logits_JD.gather(1, committed_J.clamp_min(0)[:, None])
    return F.softplus(lead_J[:, 0].float()) * (committed_J >= 0)

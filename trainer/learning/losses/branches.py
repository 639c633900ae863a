"""Losses on rows behind rejections: what the draft proposes after a text that ends in a rejected proposal.

z are the draft's logits over the draft vocabulary D after reading the pair of a rejected proposal and its parent's
feature (**Branches** in trainer/learning/labels.py), q = softmax z, p is the target's distribution after the same text
at the request's temperature, m = Σ_{x ∈ D} p(x):

    branch_forward_kl   −Σ_{x ∈ D} p log q                     KL(p‖q) + constant
    branch_reverse_kl   m · Σ_{x ∈ D} q (log q − log p̃)        KL(q‖p̃), p̃ = p with its tail spread out

They are `forward_kl` and `reverse_kl` of `text.py` at other states. A row weighs as much as a committed one with the
same m, and 0 where the draft can propose none of the kept tokens. Reverse KL on paths that the draft itself proposed
is Draft-OPD's (arXiv 2605.29343). Here rejected proposals from earlier text are used, too.

Shape letters: B rows, K kept target tokens, D draft vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from trainer.learning.losses.text import forward_kl, reverse_kl


def branch_kl(
    logits_BD: Tensor, draft_ids_BK: Tensor, probs_BK: Tensor, tail_B: Tensor, *, forward: float, reverse: float
) -> Tensor:
    """[B] float32 nats: both divergences with their weights."""
    loss_B = logits_BD.new_zeros(len(logits_BD)).float()
    if forward:
        loss_B = loss_B + forward * forward_kl(logits_BD, draft_ids_BK, probs_BK)
    if reverse:
        loss_B = loss_B + reverse * reverse_kl(logits_BD, draft_ids_BK, probs_BK, tail_B)
    return loss_B

"""Losses that bring the draft's distribution to the target's: forward and reverse KL, and cross-entropy.

z are the draft's logits over the draft vocabulary D, q = softmax z, p is what is taught, m = Σ_{x ∈ D} p(x):

    forward_kl       −Σ_{x ∈ D} p log q = m · log Σ_D exp z − Σ_D p z     KL(p‖q) + constant; EAGLE-3, 2503.01840
    reverse_kl       m · Σ_{x ∈ D} q (log q − log p̃)                      p̃ = p with its tail spread out, see there
    cross_entropy    −Σ_{x ∈ D} s log q                                   forward_kl where p = s, what is served

Shape letters: S states, K kept target tokens, D draft vocabulary.
"""

from __future__ import annotations

from torch import Tensor

# Reverse KL is infinite where q has mass and p has none.
_LEAST_PROB = 1e-6


def forward_kl(logits_SD: Tensor, draft_ids_SK: Tensor, probs_SK: Tensor, *, log_z_S: Tensor | None = None) -> Tensor:
    """[S] float32 forward KL of each row in nats, without its constant (see the module's formula).

    A row whose token the draft cannot propose weighs nothing; the full distribution over D is never stored. `log_z_S`
    is log Σ_D exp z where it is known already, here and below: among the dear things of a step.
    """
    chosen_SK = logits_SD.gather(1, draft_ids_SK).float()
    return probs_SK.sum(-1) * log_z(logits_SD, log_z_S) - (probs_SK * chosen_SK).sum(-1)


def reverse_kl(logits_SD: Tensor, draft_ids_SK: Tensor, probs_SK: Tensor, tail_S: Tensor) -> Tensor:
    """[S] float32 KL(q ‖ p̃) in nats, weighted by m.

    p̃ is (1 − r) p on the kept tokens. On the others of D, which the trace does not know apart, it is the tail r spread
    evenly over D, and at least 10⁻⁶: the price of mass where the target has none.
    """
    log_q_SD = logits_SD.float().log_softmax(-1)
    known_SK = probs_SK > 0
    rest_S = (tail_S / log_q_SD.shape[-1]).clamp_min(_LEAST_PROB).log()
    log_p_SK = ((1 - tail_S)[:, None] * probs_SK).clamp_min(_LEAST_PROB).log()
    q_SK = log_q_SD.gather(1, draft_ids_SK).exp()
    entropy_S = -(log_q_SD.exp() * log_q_SD).sum(-1)
    # Every token of D at the rest's price, and the kept ones corrected to their own.
    cross_S = -rest_S - (q_SK * (log_p_SK - rest_S[:, None]) * known_SK).sum(-1)
    return probs_SK.sum(-1) * (cross_S - entropy_S)


def log_z(logits_SD: Tensor, known_S: Tensor | None = None) -> Tensor:
    """[S] log Σ exp z, computed unless it is known."""
    return logits_SD.float().logsumexp(-1) if known_S is None else known_S

"""Losses on committed text: the draft's distribution at each state against the target's.

z are the draft's logits over the draft vocabulary D, q = softmax z, p the distribution to learn and s the served one,
m = Σ_{x ∈ D} p(x). These losses bring q to p:

    forward_kl           −Σ_{x ∈ D} p log q = m · log Σ_D exp z − Σ_D p z  KL(p‖q) + constant; EAGLE-3, 2503.01840
    reverse_kl           m · Σ_{x ∈ D} q (log q − log p̃)                   p̃: see `reverse_kl`
    cross_entropy        −Σ_{x ∈ D} s log q                                forward_kl where p = s

or raise the share of proposals that verification accepts:

    acceptance           1 − α,  α = Σ_x min(p, q)                         1 − acceptance rate where p is served
    log_acceptance       −m · log α                                        LK losses, Samarin et al., 2602.23881
    lk_hybrid            λ · KL(p‖q) + (1 − λ) · (m − α)                   the same paper's blend of KL and TV:
                                                                           λ = exp(−η α/m) without a gradient, η = 3
    coupled_acceptance   1 − Σ_x [Σ_y max(p(y)/p(x), q(y)/q(x))]⁻¹         verification with shared noise; Daliri, Musco
                                                                           and Musco, 2408.07978

A state at which the draft can propose none of the kept tokens has m = 0 and weighs 0.

Shape letters: S states, K kept target tokens, D draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Reverse KL is infinite where q has mass and p has none.
_LEAST_PROB = 1e-6
# The logarithm of an overlap of 0 is infinite.
LEAST_OVERLAP = 1e-8
ETA = 3.0
"""η of `lk_hybrid`: the paper's best value."""


def forward_kl(logits_SD: Tensor, draft_ids_SK: Tensor, probs_SK: Tensor, *, log_z_S: Tensor | None = None) -> Tensor:
    """[S] float32 forward KL of each row in nats, without its constant (see the module's formula).

    The full distribution over D is never stored. Here and below, `log_z_S` is log Σ_D exp z where the caller has it
    already: it is expensive.
    """
    chosen_SK = logits_SD.gather(1, draft_ids_SK).float()
    return probs_SK.sum(-1) * log_z(logits_SD, log_z_S) - (probs_SK * chosen_SK).sum(-1)


def reverse_kl(logits_SD: Tensor, draft_ids_SK: Tensor, probs_SK: Tensor, tail_S: Tensor) -> Tensor:
    """[S] float32 KL(q ‖ p̃) in nats, weighted by m.

    p̃ is (1 − r) p on the kept tokens. On the other tokens of D, of which the trace has only the total mass r, it is r
    spread evenly over D. It is at least 10⁻⁶, which bounds the loss where the target has no mass.
    """
    log_q_SD = logits_SD.float().log_softmax(-1)
    known_SK = probs_SK > 0
    rest_S = (tail_S / log_q_SD.shape[-1]).clamp_min(_LEAST_PROB).log()
    log_p_SK = ((1 - tail_S)[:, None] * probs_SK).clamp_min(_LEAST_PROB).log()
    q_SK = log_q_SD.gather(1, draft_ids_SK).exp()
    entropy_S = -(log_q_SD.exp() * log_q_SD).sum(-1)
    # First as if every token had the rest's log probability; then the kept ones are corrected to their own.
    cross_S = -rest_S - (q_SK * (log_p_SK - rest_S[:, None]) * known_SK).sum(-1)
    return probs_SK.sum(-1) * (cross_S - entropy_S)


def log_z(logits_SD: Tensor, known_S: Tensor | None = None) -> Tensor:
    """[S] log Σ exp z, computed unless it is known."""
    return logits_SD.float().logsumexp(-1) if known_S is None else known_S


def acceptance_rate(
    logits_SD: Tensor, draft_ids_SK: Tensor, probs_SK: Tensor, tail_S: Tensor, *, log_z_S: Tensor | None = None
) -> Tensor:
    """[S] float32 Σ_x min(p, q): how often rejection sampling accepts a proposal drawn from q where p is served.

    Tokens below the kept ones add nothing, so it is too low by at most the tail. Verification with shared noise accepts
    between (1 − TV) / (1 + TV) and this, 1 − TV (speculator/draft/verification.py).
    """
    q_SK = (logits_SD.gather(1, draft_ids_SK).float() - log_z(logits_SD, log_z_S)[:, None]).exp()
    return torch.minimum((1 - tail_S)[:, None] * probs_SK, q_SK).sum(-1)


def lk_hybrid(
    logits_SD: Tensor, draft_ids_SK: Tensor, probs_SK: Tensor, rate_S: Tensor, *, log_z_S: Tensor | None = None
) -> Tensor:
    """[S] float32; `rate_S` is what `acceptance_rate` says. KL is without its constant, as `forward_kl`."""
    mass_S = probs_SK.sum(-1)
    kl_S = forward_kl(logits_SD, draft_ids_SK, probs_SK, log_z_S=log_z_S)
    blend_S = (-ETA * rate_S.detach() / mass_S.clamp_min(LEAST_OVERLAP)).exp()
    return blend_S * kl_S + (1 - blend_S) * (mass_S - rate_S)


def coupled_rate(
    logits_SD: Tensor, draft_ids_SK: Tensor, probs_SK: Tensor, tail_S: Tensor, *, log_z_S: Tensor | None = None
) -> Tensor:
    """[S] float32: how often target and draft draw the same token by the same Gumbel noise.

    Both draw x with probability 1 / Σ_y max(p(y)/p(x), q(y)/q(x)). For tokens below the kept ones, of which the trace
    has only the total mass, we assume that the two never agree, so the result is a lower bound.
    """
    q_SK = (logits_SD.gather(1, draft_ids_SK).float() - log_z(logits_SD, log_z_S)[:, None]).exp()
    p_SK = (1 - tail_S)[:, None] * probs_SK
    q_SK = torch.where(p_SK > 0, q_SK, 0.0)
    # Both ratios times p(x) q(x), so that nothing is divided by 0.
    both_SKK = torch.maximum(p_SK[:, None] * q_SK[:, :, None], q_SK[:, None] * p_SK[:, :, None])
    others_SK = (1 - p_SK.sum(-1)).clamp_min(0)[:, None] * q_SK + (1 - q_SK.sum(-1)).clamp_min(0)[:, None] * p_SK
    total_SK = both_SKK.sum(-1) + others_SK
    return (p_SK * q_SK / total_SK.clamp_min(LEAST_OVERLAP**2)).sum(-1)

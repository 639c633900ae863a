"""Losses on the share of proposals that verification accepts.

z are the draft's logits over the draft vocabulary D, q = softmax z, p is what is taught, m = Σ_{x ∈ D} p(x):

    acceptance           1 − α,  α = Σ_x min(p, q)                        1 − acceptance rate where p is served
    log_acceptance       −m · log α                                       LK losses, Samarin et al., 2602.23881
    lk_hybrid            λ · KL(p‖q) + (1 − λ) · m · (1 − α/m),  λ = exp(−η · α/m), η = 3, λ without a gradient
                                                                          the same paper's blend of KL and TV
    coupled_acceptance   1 − Σ_x [Σ_y max(p(y)/p(x), q(y)/q(x))]⁻¹        verification with shared noise; Daliri, Musco
                                                                          and Musco, 2408.07978

α/m is the overlap with p as far as the draft can propose it; so a state whose token it cannot propose weighs nothing.

Shape letters: S states, K kept target tokens, D draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.learning.losses.distillation import forward_kl, log_z

# An overlap of nothing has no logarithm.
LEAST_OVERLAP = 1e-8
ETA = 3.0
"""Of `lk_hybrid`: the paper's best."""


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

    Each x is drawn by both with 1 / Σ_y max(p(y)/p(x), q(y)/q(x)). Below the kept tokens, of which the trace has a mass
    and no shape, both are taken to have nothing in common, so it is too low there.
    """
    q_SK = (logits_SD.gather(1, draft_ids_SK).float() - log_z(logits_SD, log_z_S)[:, None]).exp()
    p_SK = (1 - tail_S)[:, None] * probs_SK
    q_SK = torch.where(p_SK > 0, q_SK, 0.0)
    # Both ratios times p(x) q(x): nothing is divided by what may be 0.
    both_SKK = torch.maximum(p_SK[:, None] * q_SK[:, :, None], q_SK[:, None] * p_SK[:, :, None])
    others_SK = (1 - p_SK.sum(-1)).clamp_min(0)[:, None] * q_SK + (1 - q_SK.sum(-1)).clamp_min(0)[:, None] * p_SK
    total_SK = both_SKK.sum(-1) + others_SK
    return (p_SK * q_SK / total_SK.clamp_min(LEAST_OVERLAP**2)).sum(-1)

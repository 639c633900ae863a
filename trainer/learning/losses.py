"""What a step may minimise: losses on draft logits, each a pure function, and `LossMix`, which picks and weighs them.

At one state of a chain z are the draft's logits over the draft vocabulary D, divided by the request's temperature, and
q = softmax z. p is what is taught and s what is served (`Labels.probs`, `Labels.served`): for a greedy request p is the
target at temperature 1 and s its likeliest token alone; for a sampled one they are the same. `acceptance` and
`log_acceptance` take p for greedy requests, too, on purpose: they are to teach more than the one token. Further,
m = Σ_{x ∈ D} p(x), r is the mass of p below the kept tokens, x a proposal, ρ its importance ratio and w(ρ) the weight
(`Correction`).

On states over committed text (`chains=own`: those that the draft's own chains reach; `chains=all`: every step from
every position, as EAGLE-3 is published):

    forward_kl       −Σ_{x ∈ D} p log q = m · log Σ_D exp z − Σ_D p z     KL(p‖q) + constant; EAGLE-3, 2503.01840
    reverse_kl       m · Σ_{x ∈ D} q (log q − log p̃)                      p̃ = p with its tail spread out, see there
    acceptance       1 − Σ_x min(p, q)                                    1 − acceptance rate where p = s
    log_acceptance   −m · log Σ_x min(p, q)                               LK losses, 2602.23881
    cross_entropy    −Σ_{x ∈ D} s log q                                   forward_kl where p = s

On proposals, from the trace's verdicts or the draft's own:

    policy_gradient  −w(ρ) · A · log q(x),  A = [x accepted] − b          REINFORCE; b a running mean of [x accepted]
    discard          w(ρ) · KL(s_F ‖ q_F) at a rejected proposal          after Aurora's discard term, 2602.06932

F is the `discard_top_k` likeliest tokens that are served and the rejected one, and s_F, q_F are s and q renormalised on
F: the gradient q_F − s_F takes probability from the rejected token and gives it to what was served in its place.

No term's gradient is larger than √2 times its weights, in the norm over z, except reverse KL's, which has the logarithm
of its least price. Where A < 0, log q(x) would be lowered without end: it counts down to q(x) = 10⁻⁴ and no further.

Aurora's objective is E_accept[KL(p‖q)] + λ E_discard[KL(p‖q)]: `forward_kl=1,discard=λ`, times the rejections a state,
since every term is summed over what it is about and divided by the batch's labelled positions
(trainer/learning/ttt.py).

What the verdicts can add is small by construction. Verification that does not depend on the draft makes the emitted
token, not the verdict, the target's answer, and the trace has the target's whole distribution there: at the rejection
point a verdict says *where an older draft stood*, not what the target wants. `verdicts=fresh` takes the current draft's
own likeliest tokens instead, whose verdict follows from the committed text alone.

Shape letters: S states, J proposals, W rejected ones, K kept target tokens, F tokens of the filter, D draft vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from speculator.errors import ConfigError
from trainer.learning.labels import Labels, Verdicts

DEFAULT_LOSS = "cross_entropy=1,log_acceptance=1,step_discount=1"
# Reverse KL is infinite where q has mass and p has none; an overlap of nothing has no logarithm.
_LEAST_PROB = 1e-6
_LEAST_OVERLAP = 1e-8
_LEAST_REJECTED = math.log(1e-4)


def forward_kl(logits_SD: Tensor, draft_ids_SK: Tensor, probs_SK: Tensor, *, log_z_S: Tensor | None = None) -> Tensor:
    """[S] float32 forward KL of each row in nats, without its constant (see the module's formula).

    A row whose token the draft cannot propose weighs nothing; the full distribution over D is never stored. `log_z_S`
    is log Σ_D exp z where it is known already, here and below: among the dear things of a step.
    """
    chosen_SK = logits_SD.gather(1, draft_ids_SK).float()
    return probs_SK.sum(-1) * _log_z(logits_SD, log_z_S) - (probs_SK * chosen_SK).sum(-1)


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


def acceptance_rate(
    logits_SD: Tensor, draft_ids_SK: Tensor, probs_SK: Tensor, tail_S: Tensor, *, log_z_S: Tensor | None = None
) -> Tensor:
    """[S] float32 Σ_x min(p, q): how often rejection sampling accepts a proposal drawn from q where p is served.

    Tokens below the kept ones add nothing, so it is too low by at most the tail. Verification with shared noise accepts
    between (1 − TV) / (1 + TV) and this, 1 − TV (speculator/draft/verification.py).
    """
    q_SK = (logits_SD.gather(1, draft_ids_SK).float() - _log_z(logits_SD, log_z_S)[:, None]).exp()
    return torch.minimum((1 - tail_S)[:, None] * probs_SK, q_SK).sum(-1)


def _log_z(logits_SD: Tensor, known_S: Tensor | None) -> Tensor:
    return logits_SD.float().logsumexp(-1) if known_S is None else known_S


def policy_gradient(log_q_J: Tensor, advantages_J: Tensor, weights_J: Tensor) -> Tensor:
    """[J] −w · A · log q(x), with q at least 10⁻⁴ where A < 0; neither weight nor advantage has a gradient."""
    bounded_J = torch.where(advantages_J < 0, log_q_J.clamp_min(_LEAST_REJECTED), log_q_J)
    return -(weights_J * advantages_J).detach() * bounded_J


def discard(logits_JD: Tensor, draft_ids_JK: Tensor, probs_JK: Tensor, rejected_J: Tensor, *, top_k: int) -> Tensor:
    """[J] float32 KL(s_F ‖ q_F) at rejected proposals; 0 where the draft can propose none of the served likeliest.
    `probs_JK` are those that are served.

    `rejected_J` are draft ids. Where the rejected token is itself among the target's likeliest, it keeps its own
    probability: under sampling the target may reject what it likes.
    """
    ids_JF = torch.cat([draft_ids_JK[:, :top_k], rejected_J[:, None]], 1)
    is_rejected_JK = (draft_ids_JK == rejected_J[:, None]) & (probs_JK > 0)
    probs_J = (probs_JK * is_rejected_JK).sum(-1)
    # The rejected token stands in the last column; among the first ones it would count twice.
    first_JF = probs_JK[:, :top_k].masked_fill(is_rejected_JK[:, :top_k], 0.0)
    weights_JF = torch.cat([first_JF, probs_J[:, None]], 1)
    total_J1 = weights_JF.sum(-1, keepdim=True)
    p_JF = weights_JF / total_J1.clamp_min(_LEAST_OVERLAP)
    absent_JF = torch.cat([first_JF == 0, torch.zeros_like(probs_J, dtype=torch.bool)[:, None]], 1)
    chosen_JF = logits_JD.float().gather(1, ids_JF).masked_fill(absent_JF, float("-inf"))
    log_q_JF = chosen_JF.log_softmax(-1).masked_fill(p_JF == 0, 0.0)
    divergence_J: Tensor = (torch.special.xlogy(p_JF, p_JF) - p_JF * log_q_JF).sum(-1)
    return divergence_J


CorrectionName = Literal["none", "tis", "cispo", "topr", "weighted_topr"]

_DEFAULT_CLIPS: dict[CorrectionName, tuple[float, float]] = {
    "none": (0.0, math.inf),
    "tis": (0.0, 2.0),
    "cispo": (0.0, 1.2),
    "topr": (0.0, 1.0),
    "weighted_topr": (0.0, 1.0),
}


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Weights for terms on proposals, which an older draft made: q the draft in training, μ the draft that proposed.

    A committed position is visited with the target's own distribution whatever the draft was, so terms on committed
    text need no weight. A proposal is the draft's own action; its weight is a function of ρ = q(x) / μ(x), never
    differentiated:

        none           1
        tis            min(ρ, high)                                    truncated importance sampling (Ionides, 2008)
        cispo          min(ρ, high)                                    MiniMax-M1, arXiv 2506.13585: no lower bound
        topr           1 where A ≥ 0, clip(ρ, low, high) where A < 0   tapered off-policy REINFORCE, 2503.14286
        weighted_topr  topr, its two cases times `positive` and `negative`

    (The set that ROLL Flash, arXiv 2510.11345, offers for asynchronous training.) A is the advantage; a rejected
    proposal without one counts as A < 0. tis and cispo differ in their usual `high` alone. `low`, 0 unless it is set,
    is a floor: with it a token that the draft has dropped goes on to count.

    **What μ means here.** A trace records the proposing draft's own log-probability of the token, at the request's
    temperature T. For T > 0 the proposal is argmax(log q_T + noise), which has exactly the distribution q_T: ρ is a
    true ratio for functions of the proposal alone. Target and draft share the noise
    (speculator/draft/verification.py), so whether a proposal is accepted depends on more, which ρ does not correct. At
    T = 0, and in trees, the draft proposes its likeliest tokens: ρ then is the ratio of two *soft* policies. It says
    how much the draft in training has moved at this token since: near 1 the verdict is fresh, far below 1 the draft has
    already dropped the token. It is a measure of staleness, not an unbiased correction.

    `low` and `high` bound ρ, by default as usual for the name. Raises ConfigError for values that make no sense.
    """

    name: CorrectionName = "none"
    low: float | None = None
    high: float | None = None
    positive: float = 1.0
    negative: float = 1.0

    def __post_init__(self) -> None:
        if self.name not in get_args(CorrectionName):
            raise ConfigError(f"unknown correction {self.name!r}: choose one of {', '.join(get_args(CorrectionName))}")
        low, high = self.clip
        if not 0 <= low <= high:
            raise ConfigError(f"the clip bounds {low} and {high} of {self.name} are not 0 ≤ low ≤ high")

    @property
    def clip(self) -> tuple[float, float]:
        low, high = _DEFAULT_CLIPS[self.name]
        return low if self.low is None else self.low, high if self.high is None else self.high

    def weights(self, log_ratio_J: Tensor, positive_J: Tensor) -> Tensor:
        """[J] float32 weights from log ρ; `positive_J` [J] bool is the advantage's sign, zero counting as positive."""
        low, high = self.clip
        clipped_J = log_ratio_J.detach().float().exp().clamp(low, high)
        if self.name == "none":
            return clipped_J.new_ones(clipped_J.shape)
        if self.name in ("tis", "cispo"):
            return clipped_J
        weights_J = clipped_J.masked_fill(positive_J, 1.0)
        if self.name == "topr":
            return weights_J
        return weights_J * positive_J.float().mul(self.positive - self.negative).add(self.negative)


VerdictSource = Literal["recorded", "fresh"]
Chains = Literal["own", "all"]


@dataclass(frozen=True, kw_only=True)
class LossMix:
    """Weights of the losses, and the settings that they share. Read from text by `parse`; `str` writes it again."""

    forward_kl: float = 0.0
    reverse_kl: float = 0.0
    acceptance: float = 0.0
    log_acceptance: float = 0.0
    cross_entropy: float = 0.0
    policy_gradient: float = 0.0
    discard: float = 0.0
    correction: Correction = field(default_factory=Correction)
    verdicts: VerdictSource = "recorded"
    chains: Chains = "own"
    discard_top_k: int = 10
    step_discount: float = 0.8
    """Weight of step k is this to the power k: late steps are rarer in service and harder to learn; EAGLE-3's reference
    training weighs them the same way."""

    @classmethod
    def parse(cls, text: str) -> LossMix:
        """`name`, or `name=weight`, and settings, separated by commas: `forward_kl=1,discard=0.5,correction=topr`.

        A name alone weighs 1. Settings: `correction` with its `clip_low`, `clip_high`, `positive` and `negative`;
        `verdicts`, `chains`, `discard_top_k`, `step_discount`. Raises ConfigError that names the choices.
        """
        given: dict[str, str] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = (piece.strip() for piece in part.partition("="))
            if name not in (*LOSS_NAMES, *_SETTINGS):
                raise ConfigError(
                    f"unknown loss {name!r}: choose from {', '.join(LOSS_NAMES)}; settings are {', '.join(_SETTINGS)}"
                )
            if name in given:
                raise ConfigError(f"the loss names {name} twice: give it once")
            given[name] = value or ("1" if name in LOSS_NAMES else "")
        return cls(**_values(given))

    def __post_init__(self) -> None:
        weights = [getattr(self, name) for name in LOSS_NAMES]
        if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
            raise ConfigError("a loss has a weight that is negative or not finite: give weights ≥ 0")
        if not any(weights):
            raise ConfigError(f"the loss has no term: give one of {', '.join(LOSS_NAMES)} a weight")
        if self.verdicts not in get_args(VerdictSource):
            raise ConfigError(f"verdicts={self.verdicts} is unknown: choose {' or '.join(get_args(VerdictSource))}")
        if self.chains not in get_args(Chains):
            raise ConfigError(f"chains={self.chains} is unknown: choose {' or '.join(get_args(Chains))}")
        if self.discard_top_k < 1 or not 0 < self.step_discount <= 1:
            raise ConfigError("discard_top_k must be at least 1, and step_discount in (0, 1]")

    def __str__(self) -> str:
        parts = [f"{name}={getattr(self, name):g}" for name in LOSS_NAMES if getattr(self, name)]
        if self.uses_verdicts:
            correction = self.correction
            low, high = correction.clip
            if correction.name != "none":
                parts += [f"correction={correction.name}", f"clip_low={low:g}", f"clip_high={high:g}"]
            if correction.name == "weighted_topr":
                parts += [f"positive={correction.positive:g}", f"negative={correction.negative:g}"]
            parts += [f"verdicts={self.verdicts}"]
        if self.discard:
            parts += [f"discard_top_k={self.discard_top_k}"]
        return ",".join([*parts, f"chains={self.chains}", f"step_discount={self.step_discount:g}"])

    @property
    def uses_verdicts(self) -> bool:
        return bool(self.policy_gradient or self.discard)

    def on_states(self, logits_SD: Tensor, labels: Labels) -> Tensor:
        """[S] float32: the committed-text terms at S states with tempered logits, weighted."""
        ids_SK, probs_SK, tail_S = labels.draft_ids, labels.probs, labels.tail
        if not any(getattr(self, name) for name in _TEXT_LOSSES):
            # Nothing to learn here, yet part of the graph: a batch without verdicts is then a step without a gradient.
            return logits_SD[:, 0].float() * 0.0
        loss_S = logits_SD.new_zeros(len(logits_SD), dtype=torch.float32)
        log_z_S = _log_z(logits_SD, None)
        if self.forward_kl:
            loss_S = loss_S + self.forward_kl * forward_kl(logits_SD, ids_SK, probs_SK, log_z_S=log_z_S)
        if self.reverse_kl:
            loss_S = loss_S + self.reverse_kl * reverse_kl(logits_SD, ids_SK, probs_SK, tail_S)
        if self.cross_entropy:
            loss_S = loss_S + self.cross_entropy * forward_kl(logits_SD, ids_SK, labels.served, log_z_S=log_z_S)
        if self.acceptance or self.log_acceptance:
            rate_S = acceptance_rate(logits_SD, ids_SK, probs_SK, tail_S, log_z_S=log_z_S)
            loss_S = loss_S + self.acceptance * (1 - rate_S)
            if self.log_acceptance:
                # Where most mass is outside the draft vocabulary there is little to accept.
                log_rate_S = probs_SK.sum(-1) * rate_S.clamp_min(_LEAST_OVERLAP).log()
                loss_S = loss_S - self.log_acceptance * log_rate_S
        return loss_S

    def on_proposals(
        self, logits_JD: Tensor, labels: Labels, verdicts: Verdicts, *, baseline: float
    ) -> tuple[Tensor, Tensor]:
        """(Σ policy gradient, Σ discard) over J judged proposals at states with tempered logits, both weighted."""
        accepted_J = verdicts.accepted
        reinforced = dropped = logits_JD.new_zeros((), dtype=torch.float32)
        log_q_J = log_ratio_J = torch.zeros_like(accepted_J, dtype=torch.float32)
        if self.policy_gradient or self.correction.name != "none":
            log_q_J = (logits_JD.gather(1, verdicts.draft_ids[:, None])[:, 0] - logits_JD.logsumexp(-1)).float()
            # The draft's own proposals are on policy.
            log_ratio_J = log_q_J.detach() - verdicts.logprobs if self.verdicts == "recorded" else log_ratio_J
        if self.policy_gradient:
            advantages_J = accepted_J.float() - baseline
            weights_J = self.correction.weights(log_ratio_J, advantages_J >= 0)
            reinforced = self.policy_gradient * policy_gradient(log_q_J, advantages_J, weights_J).sum()
        if self.discard:
            wrong_J = ~accepted_J
            here, judged = labels[wrong_J], verdicts[wrong_J]
            divergence_W = discard(
                logits_JD[wrong_J], here.draft_ids, here.served, judged.draft_ids, top_k=self.discard_top_k
            )
            weights_W = self.correction.weights(log_ratio_J[wrong_J], judged.accepted)
            dropped = self.discard * (weights_W * divergence_W).sum()
        return reinforced, dropped


_TEXT_LOSSES = ("forward_kl", "reverse_kl", "acceptance", "log_acceptance", "cross_entropy")
LOSS_NAMES = (*_TEXT_LOSSES, "policy_gradient", "discard")
_CORRECTION_SETTINGS = {"clip_low": "low", "clip_high": "high", "positive": "positive", "negative": "negative"}
_SETTINGS = ("correction", *_CORRECTION_SETTINGS, "verdicts", "chains", "discard_top_k", "step_discount")


def _values(given: dict[str, str]) -> dict[str, Any]:
    """The arguments of `LossMix` from text."""
    values: dict[str, Any] = {}
    correction: dict[str, Any] = {}
    for name, value in given.items():
        if name == "correction":
            correction["name"] = value
        elif name in ("verdicts", "chains"):
            values[name] = value
        elif name in _CORRECTION_SETTINGS:
            correction[_CORRECTION_SETTINGS[name]] = _number(name, value, float)
        else:
            values[name] = _number(name, value, int if name == "discard_top_k" else float)
    return {**values, "correction": Correction(**correction)}


def _number(name: str, value: str, kind: type[int] | type[float]) -> float:
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"{name}={value} in the loss is not a number: give one") from None

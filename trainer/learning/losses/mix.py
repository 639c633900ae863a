"""`LossMix`: which losses a step minimises and with which weights, as parsed from text.

At one state of a chain z are the draft's logits over the draft vocabulary D, divided by the request's temperature, and
q = softmax z. p is the distribution to learn and s the served one (`Labels.probs`, `Labels.served`): for a greedy
request p is the target at temperature 1 and s its likeliest token alone; for a sampled one they are equal.
`acceptance`, `log_acceptance` and `lk_hybrid` use p for greedy requests, too, so that they teach more than one token.

Losses on states over committed text (`chains=own`: those that the draft's own chains reach; `chains=all`: every step
from every position, as EAGLE-3 is published) have their formulas in `text.py` and `expected_length.py`, those on
proposals in `proposals.py`, those on rows behind rejections in `branches.py`.

No term's gradient is larger than √2 times its weights, in the norm over z, with two exceptions: reverse KL's grows with
−log of the least probability (10⁻⁶), and `expected_length`'s is at most that times the steps of a chain.

Aurora's objective is E_accept[KL(p‖q)] + λ E_discard[KL(p‖q)]. `forward_kl=1,discard=λ` is the same with λ times the
mean number of rejections a state, since every term is a sum divided by the batch's labelled positions
(trainer/learning/ttt.py). `aurora` alone is the published recipe: λ = 1, the ten likeliest tokens, all chains, no
discount.

Shape letters: S states, J proposals, W rejected ones, B rows behind rejections, K kept target tokens, D draft
vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from speculator.errors import ConfigError
from speculator.host import load_function
from trainer.learning.labels import Labels, Verdicts
from trainer.learning.losses.branches import branch_kl
from trainer.learning.losses.correction import Correction
from trainer.learning.losses.proposals import discard, margin, policy_gradient
from trainer.learning.losses.text import (
    LEAST_OVERLAP,
    acceptance_rate,
    coupled_rate,
    forward_kl,
    lk_hybrid,
    log_z,
    reverse_kl,
)

DEFAULT_LOSS = "cross_entropy=1,log_acceptance=1,step_discount=1"
PRESETS = {
    "aurora": "forward_kl=1,discard=1,discard_top_k=10,chains=all,step_discount=1",
    "branches": f"{DEFAULT_LOSS},branch_reverse_kl=1",
}

VerdictSource = Literal["recorded", "fresh"]
Chains = Literal["own", "all"]


@dataclass(frozen=True, kw_only=True)
class LossMix:
    """Weights of the losses, and the settings that they share. `parse` reads it from text, `str` writes that text."""

    forward_kl: float = 0.0
    reverse_kl: float = 0.0
    acceptance: float = 0.0
    log_acceptance: float = 0.0
    cross_entropy: float = 0.0
    lk_hybrid: float = 0.0
    coupled_acceptance: float = 0.0
    expected_length: float = 0.0
    policy_gradient: float = 0.0
    discard: float = 0.0
    margin: float = 0.0
    branch_forward_kl: float = 0.0
    branch_reverse_kl: float = 0.0
    own: tuple[tuple[str, float], ...] = ()
    """The operator's own losses (MODULE:FUNCTION, weight): see `own_loss`."""
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

        A name alone weighs 1, and one of `PRESETS` stands for its text. Settings: `correction` with its `clip_low`,
        `clip_high`, `positive` and `negative`; `verdicts`, `chains`, `discard_top_k`, `step_discount`. Raises
        ConfigError that names the choices. MODULE:FUNCTION is a name as well, of a loss on states: see `own_loss`.
        """
        given: dict[str, str] = {}
        text = PRESETS.get(text.strip(), text)
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = (piece.strip() for piece in part.partition("="))
            is_own = ":" in name
            if name not in (*LOSS_NAMES, *_SETTINGS) and not is_own:
                raise ConfigError(
                    f"unknown loss {name!r}: choose from {', '.join(LOSS_NAMES)}; settings are {', '.join(_SETTINGS)}"
                )
            if name in given:
                raise ConfigError(f"the loss has {name} twice: give it once")
            given[name] = value or ("1" if is_own or name in LOSS_NAMES else "")
        return cls(**_values(given))

    def __post_init__(self) -> None:
        weights = [*(getattr(self, name) for name in LOSS_NAMES), *(weight for _, weight in self.own)]
        for name, _ in self.own:
            own_loss(name)
        if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
            raise ConfigError("a weight in the loss is negative or not finite: give weights ≥ 0")
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
        parts += [f"{name}={weight:g}" for name, weight in self.own]
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
        return bool(self.policy_gradient or self.discard or self.margin)

    def on_states(self, logits_SD: Tensor, labels: Labels) -> Tensor:
        """[S] float32: the committed-text terms at S states with tempered logits, weighted. Raises ConfigError where an
        operator's own loss fails.
        """
        ids_SK, probs_SK, tail_S = labels.draft_ids, labels.probs, labels.tail
        if not self.own and not any(getattr(self, name) for name in _STATE_LOSSES):
            # Zero, but part of the graph, so that `backward` works for a batch without verdicts.
            return logits_SD[:, 0].float() * 0.0
        loss_S = logits_SD.new_zeros(len(logits_SD), dtype=torch.float32)
        log_z_S = log_z(logits_SD)
        if self.forward_kl:
            loss_S = loss_S + self.forward_kl * forward_kl(logits_SD, ids_SK, probs_SK, log_z_S=log_z_S)
        if self.reverse_kl:
            loss_S = loss_S + self.reverse_kl * reverse_kl(logits_SD, ids_SK, probs_SK, tail_S)
        if self.cross_entropy:
            loss_S = loss_S + self.cross_entropy * forward_kl(logits_SD, ids_SK, labels.served, log_z_S=log_z_S)
        if self.coupled_acceptance:
            drawn_S = coupled_rate(logits_SD, ids_SK, labels.served, labels.served_tail, log_z_S=log_z_S)
            loss_S = loss_S + self.coupled_acceptance * (1 - drawn_S)
        if self.acceptance or self.log_acceptance or self.lk_hybrid:
            rate_S = acceptance_rate(logits_SD, ids_SK, probs_SK, tail_S, log_z_S=log_z_S)
            loss_S = loss_S + self.acceptance * (1 - rate_S)
            if self.lk_hybrid:
                loss_S = loss_S + self.lk_hybrid * lk_hybrid(logits_SD, ids_SK, probs_SK, rate_S, log_z_S=log_z_S)
            if self.log_acceptance:
                # Where most mass is outside the draft vocabulary there is little to accept.
                log_rate_S = probs_SK.sum(-1) * rate_S.clamp_min(LEAST_OVERLAP).log()
                loss_S = loss_S - self.log_acceptance * log_rate_S
        for name, weight in self.own:
            loss_S = loss_S + weight * _own_term(name, logits_SD, labels)
        return loss_S

    def on_proposals(
        self, logits_JD: Tensor, labels: Labels, verdicts: Verdicts, *, baseline: float
    ) -> tuple[Tensor, Tensor]:
        """(Σ policy gradient, Σ discard and margin), weighted, over J judged proposals with tempered logits."""
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
        if self.discard or self.margin:
            wrong_J = ~accepted_J
            logits_WD, here, judged = logits_JD[wrong_J], labels[wrong_J], verdicts[wrong_J]
            weights_W = self.correction.weights(log_ratio_J[wrong_J], judged.accepted)
            if self.discard:
                tables = (here.draft_ids, here.served)
                divergence_W = discard(logits_WD, *tables, judged.draft_ids, top_k=self.discard_top_k)
                dropped = dropped + self.discard * (weights_W * divergence_W).sum()
            if self.margin:
                leads_W = margin(logits_WD, judged.draft_ids, judged.committed)
                dropped = dropped + self.margin * (weights_W * leads_W).sum()
        return reinforced, dropped

    @property
    def uses_branches(self) -> bool:
        return bool(self.branch_forward_kl or self.branch_reverse_kl)

    def on_branches(self, logits_BD: Tensor, labels: Labels) -> Tensor:
        """Σ of the branch terms, weighted, over B rows behind rejections with tempered logits."""
        weights = {"forward": self.branch_forward_kl, "reverse": self.branch_reverse_kl}
        return branch_kl(logits_BD, labels.draft_ids, labels.probs, labels.tail, **weights).sum()

    def length_rate(self, logits_SD: Tensor, labels: Labels) -> Tensor:
        """[S] float32: how often each state's proposal is accepted, for `ExpectedLength`."""
        return acceptance_rate(logits_SD, labels.draft_ids, labels.served, labels.served_tail)


@cache
def own_loss(name: str) -> Callable[[Tensor, Labels], Tensor]:
    """Load the operator's loss on states, MODULE:FUNCTION: from tempered logits [S, D] and labels to [S].

    Raises ConfigError where there is no such function.
    """
    return load_function(name, "the loss")


def _own_term(name: str, logits_SD: Tensor, labels: Labels) -> Tensor:
    """[S]: the operator's loss. Raises ConfigError where it fails, or returns what no step can learn from."""
    try:
        own_S = own_loss(name)(logits_SD, labels)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the function is the operator's, and may raise anything
        # Unlike other messages, this one goes to the log: a loss sees numbers, no text.
        reason = " ".join(str(error).split())
        raise ConfigError(f"the loss {name} failed ({type(error).__name__}: {reason}): correct it") from error
    wanted = (len(logits_SD),)
    if not isinstance(own_S, Tensor) or own_S.shape != wanted:
        found = f"shape {tuple(own_S.shape)}" if isinstance(own_S, Tensor) else type(own_S).__name__
        raise ConfigError(f"the loss {name} returned {found}: return a loss a state, {wanted}")
    if logits_SD.requires_grad and not own_S.requires_grad:
        raise ConfigError(f"the loss {name} has no gradient: compute it from the logits, its first argument")
    return own_S


_STATE_LOSSES = (
    *("forward_kl", "reverse_kl", "acceptance", "log_acceptance", "cross_entropy", "lk_hybrid", "coupled_acceptance"),
)
LOSS_NAMES = (
    *(*_STATE_LOSSES, "expected_length", "policy_gradient", "discard", "margin"),
    *("branch_forward_kl", "branch_reverse_kl"),
)
_CORRECTION_SETTINGS = {"clip_low": "low", "clip_high": "high", "positive": "positive", "negative": "negative"}
_SETTINGS = ("correction", *_CORRECTION_SETTINGS, "verdicts", "chains", "discard_top_k", "step_discount")


def _values(given: dict[str, str]) -> dict[str, Any]:
    """The arguments of `LossMix` from text."""
    own = tuple((name, _number(name, value, float)) for name, value in given.items() if ":" in name)
    values: dict[str, Any] = {"own": own}
    correction: dict[str, Any] = {}
    for name, value in given.items():
        if ":" in name:
            continue
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

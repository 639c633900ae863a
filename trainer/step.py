"""One optimiser step, and everything that it changes: the weights, their running average, the optimiser's moments.

The published draft is the running average of the weights, not the weights themselves: at a constant learning rate the
average of the last few dozen steps accepts more than any single one of them (measured: 0.05 tokens a verification).
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from speculator.labels import Verdicts
from speculator.loss import LossMix
from speculator.model import Eagle3Draft
from trainer.batch import Batch
from trainer.config import TrainerConfig
from trainer.unroll import Proposals, unroll

# The average covers about the last tenth of a short history, and at most this many steps.
MAX_AVERAGED_STEPS = 100
# So does the baseline of the policy gradient, the running share of accepted proposals.
BASELINE_SHARE = 1.0 / 100


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """`loss` in nats a base position; `applied` is false, and nothing changed, where loss or gradient was not finite
    or where there was no label at all.
    """

    loss: float
    num_labels: int
    """Base positions with a label."""
    num_accepted: int
    """Accepted proposals of the chains that start there, of at most `ttt_steps` each."""
    num_verdicts: int
    """Judged proposals that a term of the loss was about."""
    applied: bool

    @property
    def accept_length(self) -> float:
        """Mean over base positions, bonus token included."""
        return 1.0 + self.num_accepted / max(self.num_labels, 1)


class Learner:
    """A draft in training. `draft` holds the weights in float32, `averaged` the weights to publish."""

    def __init__(self, draft: Eagle3Draft, config: TrainerConfig) -> None:
        self.draft = draft
        self.averaged = _shadow(draft)
        self.num_steps = 0
        self.baseline = 0.0
        """Running share of accepted proposals, of the terms that ask for it."""
        self._config = config
        self._mix = LossMix.parse(config.loss)
        self._parameters = dict(draft.named_parameters())
        self._averages = list(self.averaged.parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def step(self, batch: Batch) -> StepReport:
        """Learn from one batch, or leave everything as it was (see `StepReport.applied`)."""
        self._optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=self._config.autocast):
            found = ttt_loss(self.draft, batch, self._mix, num_steps=self._config.ttt_steps, baseline=self.baseline)
        if not found.num_labels:
            return StepReport(loss=0.0, num_labels=0, num_accepted=0, num_verdicts=0, applied=False)
        found.loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self._parameters.values(), self._config.max_gradient_norm)
        # A NaN anywhere in the loss or its gradient is in the norm too.
        applied = math.isfinite(norm.item())
        if applied:
            self.num_steps += 1
            self._optimizer.param_groups[0]["lr"] = self._learning_rate()
            self._optimizer.step()
            self._average()
            if found.num_verdicts:
                share = max(BASELINE_SHARE, 1.0 / self.num_steps)
                self.baseline += share * (found.num_rewarded / found.num_verdicts - self.baseline)
        return StepReport(
            loss=found.loss.item(),
            num_labels=found.num_labels,
            num_accepted=found.num_accepted,
            num_verdicts=found.num_verdicts,
            applied=applied,
        )

    def state(self) -> dict[str, Tensor]:
        """Everything that a resumed learner needs, as a flat dict of tensors (not copies)."""
        state = {
            "num_steps": torch.tensor(self.num_steps),
            "baseline": torch.tensor(self.baseline, dtype=torch.float64),
        }
        for (name, weight), average in zip(self._parameters.items(), self._averages, strict=True):
            state[f"weight.{name}"] = weight.detach()
            state[f"average.{name}"] = average.detach()
            for moment, value in self._optimizer.state[weight].items():
                state[f"{moment}.{name}"] = value
        return state

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over what `state` returned. Raises KeyError or RuntimeError where it is another draft's."""
        self.num_steps = int(state["num_steps"])
        self.baseline = float(state["baseline"])
        with torch.no_grad():
            for (name, weight), average in zip(self._parameters.items(), self._averages, strict=True):
                weight.copy_(state[f"weight.{name}"])
                average.copy_(state[f"average.{name}"])
                if self.num_steps:
                    self._optimizer.state[weight] = {
                        moment: state[f"{moment}.{name}"].clone() for moment in ("step", "exp_avg", "exp_avg_sq")
                    }

    def _learning_rate(self) -> float:
        return self._config.learning_rate * min(1.0, self.num_steps / self._config.warmup_steps)

    def _average(self) -> None:
        # A short memory while the weights move fast, a long one later.
        share = max(1.0 / MAX_AVERAGED_STEPS, 9.0 / (9.0 + self.num_steps))
        with torch.no_grad():
            for average, weight in zip(self._averages, self._parameters.values(), strict=True):
                average.lerp_(weight, share)


@dataclass(frozen=True, kw_only=True)
class BatchLoss:
    """`loss` in nats a base position, ready for `backward`; the counts are those of `StepReport`."""

    loss: Tensor
    num_labels: int
    num_accepted: int
    num_verdicts: int
    num_rewarded: int
    """Verdicts that say accepted."""


def ttt_loss(draft: Eagle3Draft, batch: Batch, mix: LossMix, *, num_steps: int, baseline: float) -> BatchLoss:
    """The loss of a batch, with γ = `mix.step_discount`:

        Σ_k γ^k Σ_states (committed-text terms) / N  +  Σ_k γ^k Σ_verdicts (each proposal term) / its verdicts

    N counts base positions with a label. Under `chains=own` chains that ended add nothing, so a deeper step weighs as
    much as it is reached, and states that only an older draft reached enter no committed-text term. Proposal terms are
    means over the verdicts that they are about: all for the policy gradient, the rejected ones for the discard loss.
    """
    on_text = reinforced = dropped = draft.fc.weight.new_zeros(())
    num_labels = num_accepted = num_verdicts = num_rewarded = 0
    verdicts = _recorded(mix, batch, num_steps)
    wanted_NK = None if verdicts is None else _states_of(verdicts, batch, num_steps)
    if mix.chains == "all":
        wanted_NK = torch.ones(len(batch.rows), num_steps, dtype=torch.bool)
    for proposals in unroll(draft, batch, num_steps=num_steps, wanted_NK=wanted_NK):
        labels = batch.labels[proposals.label_rows]
        logits_SD = labels.tempered(proposals.logits)
        weight = mix.step_discount**proposals.step
        if mix.chains == "all" or bool(proposals.own.all()):
            on_text = on_text + weight * mix.on_states(logits_SD, labels).sum()
        else:
            on_text = on_text + weight * mix.on_states(logits_SD[proposals.own], labels[proposals.own]).sum()
        num_accepted += int((proposals.hits & proposals.own).sum())
        if proposals.step == 0:
            num_labels = int(proposals.own.sum())
        if mix.uses_verdicts:
            states_J, judged = _judged_here(verdicts, proposals, len(batch.rows))
            terms = mix.on_proposals(logits_SD[states_J], labels[states_J], judged, baseline=baseline)
            reinforced, dropped = reinforced + weight * terms[0], dropped + weight * terms[1]
            num_verdicts += len(judged)
            num_rewarded += int(judged.accepted.sum())
    loss = on_text / max(num_labels, 1)
    if mix.uses_verdicts:
        loss = loss + reinforced / max(num_verdicts, 1) + dropped / max(num_verdicts - num_rewarded, 1)
    return BatchLoss(
        loss=loss,
        num_labels=num_labels,
        num_accepted=num_accepted,
        num_verdicts=num_verdicts,
        num_rewarded=num_rewarded,
    )


def _recorded(mix: LossMix, batch: Batch, num_steps: int) -> Verdicts | None:
    """The recorded verdicts that a term is about; None where the mix asks for none, or for the draft's own."""
    if not mix.uses_verdicts or mix.verdicts != "recorded":
        return None
    useful_J = batch.verdicts.steps < num_steps
    if not mix.policy_gradient:
        useful_J &= ~batch.verdicts.accepted
    return batch.verdicts[useful_J]


def _states_of(verdicts: Verdicts, batch: Batch, num_steps: int) -> Tensor:
    """[N, num_steps] bool: the states in which the verdicts' proposals were made."""
    states_NK = torch.zeros(len(batch.rows), num_steps, dtype=torch.bool)
    states_NK[verdicts.bases, verdicts.steps] = True
    return states_NK


def _judged_here(verdicts: Verdicts | None, proposals: Proposals, num_bases: int) -> tuple[Tensor, Verdicts]:
    """([J] index into the step's states, the verdicts on proposals made there): recorded, or on the likeliest ones."""
    if verdicts is None:
        likeliest_S = proposals.logits.detach().argmax(-1)
        num_states = len(likeliest_S)
        fresh = Verdicts(
            bases=proposals.chains,
            steps=torch.full((num_states,), proposals.step),
            draft_ids=likeliest_S,
            logprobs=torch.zeros(num_states),
            accepted=proposals.hits,
            versions=torch.zeros(num_states, dtype=torch.int64),
        )
        return torch.arange(num_states), fresh
    state_N = torch.full((num_bases,), -1)
    state_N[proposals.chains] = torch.arange(len(proposals.chains))
    here = verdicts[verdicts.steps == proposals.step]
    states_J = state_N[here.bases]
    return states_J[states_J >= 0], here[states_J >= 0]


def _shadow(draft: Eagle3Draft) -> Eagle3Draft:
    """A copy of the weights beside the same embedding, which is the target's and large."""
    return copy.deepcopy(draft, {id(draft.embed): draft.embed}).requires_grad_(False)

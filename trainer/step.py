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

from speculator.loss import forward_kl
from speculator.model import Eagle3Draft
from trainer.batch import Batch
from trainer.config import TrainerConfig
from trainer.unroll import unroll

# Late TTT steps are rarer in service and harder to learn; EAGLE-3's reference training weighs them the same way.
STEP_DISCOUNT = 0.8
# The average covers about the last tenth of a short history, and at most this many steps.
MAX_AVERAGED_STEPS = 100


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
        self._config = config
        self._parameters = dict(draft.named_parameters())
        self._averages = list(self.averaged.parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def step(self, batch: Batch) -> StepReport:
        """Learn from one batch, or leave everything as it was (see `StepReport.applied`)."""
        self._optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=self._config.autocast):
            loss, num_labels, num_accepted = ttt_loss(self.draft, batch, num_steps=self._config.ttt_steps)
        if not num_labels:
            return StepReport(loss=0.0, num_labels=0, num_accepted=0, applied=False)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self._parameters.values(), self._config.max_gradient_norm)
        # A NaN anywhere in the loss or its gradient is in the norm too.
        applied = math.isfinite(norm.item())
        if applied:
            self.num_steps += 1
            self._optimizer.param_groups[0]["lr"] = self._learning_rate()
            self._optimizer.step()
            self._average()
        return StepReport(loss=loss.item(), num_labels=num_labels, num_accepted=num_accepted, applied=applied)

    def state(self) -> dict[str, Tensor]:
        """Everything that a resumed learner needs, as a flat dict of tensors (not copies)."""
        state = {"num_steps": torch.tensor(self.num_steps)}
        for (name, weight), average in zip(self._parameters.items(), self._averages, strict=True):
            state[f"weight.{name}"] = weight.detach()
            state[f"average.{name}"] = average.detach()
            for moment, value in self._optimizer.state[weight].items():
                state[f"{moment}.{name}"] = value
        return state

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take over what `state` returned. Raises KeyError or RuntimeError where it is another draft's."""
        self.num_steps = int(state["num_steps"])
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


def ttt_loss(draft: Eagle3Draft, batch: Batch, *, num_steps: int) -> tuple[Tensor, int, int]:
    """(loss in nats a base position, base positions with a label, accepted proposals of their chains).

    Σ_k 0.8^k Σ_chains forward KL / N: chains that ended add nothing, so a deeper step weighs as much as it is reached.
    """
    loss = draft.fc.weight.new_zeros(())
    num_labels = num_accepted = 0
    for proposals in unroll(draft, batch, num_steps=num_steps):
        rows = proposals.label_rows
        divergence_S = forward_kl(proposals.logits, batch.labels.draft_ids[rows], batch.labels.probs[rows])
        loss = loss + STEP_DISCOUNT**proposals.step * divergence_S.sum()
        num_accepted += int(proposals.hits.sum())
        if proposals.step == 0:
            num_labels = len(rows)
    return loss / max(num_labels, 1), num_labels, num_accepted


def _shadow(draft: Eagle3Draft) -> Eagle3Draft:
    """A copy of the weights beside the same embedding, which is the target's and large."""
    return copy.deepcopy(draft, {id(draft.embed): draft.embed}).requires_grad_(False)

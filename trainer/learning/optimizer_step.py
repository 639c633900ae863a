"""The optimiser step, the running average of the weights, and what happens when a step is not finite.

The published draft is the running average of the weights, not the weights themselves: at a constant learning rate the
average of the last few dozen steps accepts more than any single one of them (measured: 0.05 tokens a verification).

Where several processes train together (trainer/ranks.py) a step uses all their batches: a mean is the sum of
the ranks' sums over the sum of their counts, exactly as if one process had the whole batch.

**Health.** `Guard` tracks steps that are not finite:

    healthy ──(a step is not finite)──▶ suspect ──(GOOD_STEPS good ones in a row)──▶ healthy
                                           └──(BAD_STEPS bad ones in a row)──▶ restore the last good weights ──▶ suspect

A suspect draft goes on learning and is not published. Bad traces and bad weights look the same in one step; the next
steps tell them apart. Where a good one follows, the traces of the bad steps were at fault and are discarded. Where none
does, the last good weights are restored and the traces kept: if bad steps continue, the traces are at fault after all.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor, nn

from speculator.draft.eagle3 import Eagle3Draft, autocast
from trainer.config import TrainerConfig
from trainer.learning.batch import Batch
from trainer.learning.losses.mix import LossMix
from trainer.learning.ttt import BatchLoss, Counts, ttt_loss
from trainer.ranks import Ranks

GOOD_STEPS = 20
"""About a second of training on a CPU; the averaged weights forget a bad step within so many."""
BAD_STEPS = 8


class Guard:
    """Tracks whether the draft may be published. The caller reports every step that had a label."""

    def __init__(self) -> None:
        self._num_good = GOOD_STEPS
        self._num_bad = 0
        self._restored = False

    @property
    def healthy(self) -> bool:
        """The draft may be published."""
        return self._num_good >= GOOD_STEPS

    @property
    def must_restore(self) -> bool:
        """So many bad steps came in a row that the weights are probably broken."""
        return self._num_bad >= BAD_STEPS

    @property
    def blames_traces(self) -> bool:
        """No step was good since the last good weights were restored, so the traces are at fault."""
        return self._restored

    def observe(self, *, finite: bool) -> None:
        self._restored = self._restored and not finite
        self._num_good = self._num_good + 1 if finite else 0
        self._num_bad = 0 if finite else self._num_bad + 1

    def restored(self) -> None:
        """Note that the last good weights were restored; they may be published after GOOD_STEPS good steps."""
        self._num_bad = self._num_good = 0
        self._restored = True


def all_finite(state: Mapping[str, Tensor]) -> bool:
    """No weight, average or moment is NaN or infinite."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in state.values())


# The average covers about the last tenth of a short history, and at most this many steps.
MAX_AVERAGED_STEPS = 100
# When the target has moved, at most this many: older weights were learnt from another target.
MOVED_AVERAGED_STEPS = 10
# Weight of a step in the policy gradient's baseline, the running share of accepted proposals.
BASELINE_SHARE = 1.0 / 100
# Least size of a feature, relative to the mean: a feature that is always 0 must not make its weights explode.
LEAST_FEATURE_RMS = 1e-3


@dataclass(frozen=True, kw_only=True)
class StepReport(Counts):
    """Result of a step over the batches of all ranks. `loss` in nats a base position; `applied` is false, and nothing
    changed, where loss or gradient was not finite or no position had a label.
    """

    loss: float = 0.0
    applied: bool = False
    is_culprit: bool = False
    """This rank's own gradient was not finite."""
    first_steps: tuple[tuple[int, int], ...] = ()
    """`BatchLoss.first_steps` of this rank's traces, by the draft before the step."""

    @property
    def accept_length(self) -> float:
        """Mean over base positions, bonus token included."""
        return 1.0 + self.num_accepted / max(self.num_labels, 1)


class Learner:
    """A draft in training. `draft` holds the weights in float32, `averaged` the weights to publish."""

    def __init__(self, draft: Eagle3Draft, config: TrainerConfig, ranks: Ranks | None = None) -> None:
        """Computes on the draft's device. All ranks must begin with the same draft, or call `load_state`."""
        self.draft = draft
        self.averaged = _shadow(draft)
        self.num_steps = 0
        self.history = 0
        """Number of steps that sets the average's memory: all steps, or fewer since the target has moved."""
        self.baseline = 0.0
        """Running share of accepted proposals, for the policy gradient."""
        self._config = config
        self._ranks = ranks or Ranks()
        self._mix = LossMix.parse(config.loss)
        self._parameters = dict(draft.named_parameters())
        self._averages = dict(self.averaged.named_parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def step(self, batch: Batch | None) -> StepReport:
        """Learn from the batches of all ranks, or leave everything as it was (see `StepReport.applied`).

        None: this rank has no batch, and takes the others' step.
        """
        self._optimizer.zero_grad(set_to_none=True)
        found = self._loss(batch)
        total = _counts(self._ranks.sum(found.counts))
        if not total.num_labels:
            return StepReport(**asdict(total))
        own_loss = found.mean_over(total)
        if found.num_labels:
            own_loss.backward()  # type: ignore[no-untyped-call]
        own_gradients = self._own_gradients()
        *gradients, squares_w = self._ranks.sum_tensors([*own_gradients, self._feature_squares(batch)])
        norm = nn.utils.get_total_norm(gradients)
        # A NaN anywhere in the loss or its gradient reaches the norm on every rank. Still the ranks agree explicitly:
        # if one skipped the step alone, their weights would differ.
        loss, num_not_finite = self._ranks.sum([own_loss.item(), not math.isfinite(norm.item())])
        applied = not num_not_finite
        is_culprit = not applied and not math.isfinite(nn.utils.get_total_norm(own_gradients).item())
        if applied:
            self._apply(gradients, norm, (squares_w / total.num_bases).sqrt())
            if total.num_verdicts:
                share = max(BASELINE_SHARE, 1.0 / self.num_steps)
                self.baseline += share * (total.num_rewarded / total.num_verdicts - self.baseline)
        return StepReport(
            **asdict(total), loss=loss, applied=applied, is_culprit=is_culprit, first_steps=found.first_steps
        )

    def after_target_update(self) -> None:
        """Shorten the average's memory after the target has moved; it grows again with the steps."""
        self.history = min(self.history, 9 * (MOVED_AVERAGED_STEPS - 1))

    @property
    def is_finite(self) -> bool:
        """No weight, average or moment is NaN or infinite."""
        return all_finite(self._tensors())

    def state(self) -> dict[str, Tensor]:
        """Everything that a resumed learner needs, as a flat dict of tensors (not copies)."""
        return {
            "num_steps": torch.tensor(self.num_steps),
            "history": torch.tensor(self.history),
            "baseline": torch.tensor(self.baseline, dtype=torch.float64),
            **self._tensors(),
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Load what `state` returned. Raises KeyError or RuntimeError for a state of another draft."""
        self.num_steps = int(state["num_steps"])
        # Older checkpoints have no "history".
        self.history = int(state.get("history", state["num_steps"]))
        self.baseline = float(state["baseline"])
        with torch.no_grad():
            for name, weight in self._parameters.items():
                weight.copy_(state[f"weight.{name}"])
                self._averages[name].copy_(state[f"average.{name}"])
                if self.num_steps:
                    self._optimizer.state[weight] = {
                        moment: state[f"{moment}.{name}"].to(weight.device, copy=True)
                        for moment in ("step", "exp_avg", "exp_avg_sq")
                    }

    def _tensors(self) -> dict[str, Tensor]:
        """Weights, average and moments under the names of `state`."""
        tensors = {}
        for name, weight in self._parameters.items():
            tensors[f"weight.{name}"] = weight.detach()
            tensors[f"average.{name}"] = self._averages[name]
            for moment, value in self._optimizer.state[weight].items():
                tensors[f"{moment}.{name}"] = value
        return tensors

    def _loss(self, batch: Batch | None) -> BatchLoss:
        if batch is None:
            nothing = self.draft.fc.weight.new_zeros(())
            return BatchLoss(on_text=nothing, reinforced=nothing, dropped=nothing, off_path=nothing)
        device = self.draft.embed.device
        with autocast(device, is_wanted=self._config.autocast):
            return ttt_loss(
                self.draft,
                batch.to(device),
                self._mix,
                num_steps=self._config.ttt_steps,
                baseline=self.baseline,
            )

    def _own_gradients(self) -> list[Tensor]:
        """This rank's part of the gradient; zeros where it had nothing to learn from."""
        return [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in self.draft.parameters()]

    def _feature_squares(self, batch: Batch | None) -> Tensor:
        """[3d] float32: the squares of what `fc` reads, summed over this rank's base positions."""
        if batch is None:
            return self.draft.fc.weight.new_zeros(self.draft.fc.in_features)
        with torch.no_grad():
            return self.draft.read(batch.aux.to(self.draft.fc.weight.device)).float().square().sum(0)

    def _apply(self, gradients: list[Tensor], norm: Tensor, rms_w: Tensor) -> None:
        weights = list(self._parameters.values())
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        nn.utils.clip_grads_with_norm_(weights, self._config.max_gradient_norm, norm)
        self.num_steps += 1
        self._optimizer.param_groups[0]["lr"] = self._learning_rate()
        fusion = self._parameters["fc.weight"]
        before = fusion.detach().clone()
        self._optimizer.step()
        # AdamW moves every weight by about the same amount, while features differ in size by a factor of hundreds. So
        # each column of `fc` moves as if its feature had size 1: else the few largest features would dominate.
        size_w = rms_w.clamp_min(LEAST_FEATURE_RMS * rms_w.mean())
        if size_w.min() > 0:  # else all features are 0
            with torch.no_grad():
                fusion.copy_(before + (fusion - before) / size_w)
        self._average()

    def _learning_rate(self) -> float:
        return self._config.learning_rate * min(1.0, self.num_steps / self._config.warmup_steps)

    def _average(self) -> None:
        # A short memory while the weights move fast, a long one later.
        self.history += 1
        share = max(1.0 / MAX_AVERAGED_STEPS, 9.0 / (9.0 + self.history))
        with torch.no_grad():
            for name, weight in self._parameters.items():
                self._averages[name].lerp_(weight, share)


def _counts(values: Iterable[float]) -> Counts:
    return Counts(**{each.name: int(value) for each, value in zip(fields(Counts), values, strict=True)})


def _shadow(draft: Eagle3Draft) -> Eagle3Draft:
    """A copy of the draft's weights that shares the tables, which never change: the target's embedding is large."""
    return copy.deepcopy(draft, {id(table): table for table in draft.buffers()}).requires_grad_(False)

"""The loss of a batch: what the chains of its draft say in every step, against labels and verdicts.

A batch's loss is a sum over its labelled positions' number, so that several processes can make one loss out of their
parts of a batch: each divides its sum by the number of all.

Shape letters: N base positions, K steps of a chain, S states of a step, J judged proposals, D draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from speculator.draft.eagle3 import Eagle3Draft
from trainer.learning.batch import Batch
from trainer.learning.labels import Verdicts
from trainer.learning.losses import LossMix
from trainer.learning.ttt_unroll import Proposals, unroll


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What a loss is about."""

    num_bases: int = 0
    """Base positions of the batch."""
    num_labels: int = 0
    """Those with a label."""
    num_accepted: int = 0
    """Accepted proposals of the chains that start there, of at most `ttt_steps` each."""
    num_verdicts: int = 0
    """Judged proposals that a term of the loss was about."""
    num_rewarded: int = 0
    """Verdicts that say accepted."""


@dataclass(frozen=True, kw_only=True)
class BatchLoss(Counts):
    """The sums of `ttt_loss`'s three parts over a batch, discounted and weighted, and the counts of what they sum."""

    on_text: Tensor
    reinforced: Tensor
    dropped: Tensor

    @property
    def counts(self) -> tuple[int, ...]:
        """The fields of `Counts`, in their order."""
        return tuple(getattr(self, each.name) for each in fields(Counts))

    @property
    def loss(self) -> Tensor:
        """In nats a base position, ready for `backward`."""
        return self.mean_over(self)

    def mean_over(self, counts: Counts) -> Tensor:
        """This batch's part of a loss that is about all that `counts` says."""
        return (self.on_text + self.reinforced + self.dropped) / max(counts.num_labels, 1)


def ttt_loss(draft: Eagle3Draft, batch: Batch, mix: LossMix, *, num_steps: int, baseline: float) -> BatchLoss:
    """The loss of a batch, with γ = `mix.step_discount`:

        (Σ_k γ^k Σ_states (committed-text terms)  +  Σ_k γ^k Σ_verdicts (proposal terms)) / N

    N counts base positions with a label: a verdict weighs as much as a state, however few there are. Under `chains=own`
    chains that ended add nothing, so a deeper step weighs as much as it is reached, and states that only an older draft
    reached enter no committed-text term.
    """
    on_text = reinforced = dropped = draft.fc.weight.new_zeros(())
    num_labels = num_accepted = num_verdicts = num_rewarded = 0
    verdicts = _recorded(mix, batch, num_steps)
    wanted_NK = None if verdicts is None else _states_of(verdicts, batch, num_steps)
    if mix.chains == "all":
        wanted_NK = torch.ones(len(batch.rows), num_steps, dtype=torch.bool, device=batch.rows.device)
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
    return BatchLoss(
        on_text=on_text,
        reinforced=reinforced,
        dropped=dropped,
        num_bases=len(batch.rows),
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
    states_NK = torch.zeros(len(batch.rows), num_steps, dtype=torch.bool, device=batch.rows.device)
    states_NK[verdicts.bases, verdicts.steps] = True
    return states_NK


def _judged_here(verdicts: Verdicts | None, proposals: Proposals, num_bases: int) -> tuple[Tensor, Verdicts]:
    """([J] index into the step's states, the verdicts on proposals made there): recorded, or on the likeliest ones."""
    device = proposals.chains.device
    if verdicts is None:
        likeliest_S = proposals.logits.detach().argmax(-1)
        num_states = len(likeliest_S)
        fresh = Verdicts(
            bases=proposals.chains,
            steps=torch.full((num_states,), proposals.step, device=device),
            draft_ids=likeliest_S,
            logprobs=torch.zeros(num_states, device=device),
            accepted=proposals.hits,
            versions=torch.zeros(num_states, dtype=torch.int64, device=device),
        )
        return torch.arange(num_states, device=device), fresh
    state_N = torch.full((num_bases,), -1, device=device)
    state_N[proposals.chains] = torch.arange(len(proposals.chains), device=device)
    here = verdicts[verdicts.steps == proposals.step]
    states_J = state_N[here.bases]
    return states_J[states_J >= 0], here[states_J >= 0]

"""An ordinary EAGLE-3 trainer, to compare with: answers padded side by side, every step on all positions, the full
distribution over the draft vocabulary from the target's final hidden state.

Suffixes: B spans of at most T tokens, d hidden size, D draft vocabulary, S states with a label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speculator.bfloat16 import autocast
from speculator.model import Eagle3Draft
from trainer.batch import Example


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One span with the final normed hidden states [T, d] that a padded trainer learns from; `first_base` is the first
    position that is learnt from where the prompt is left out.
    """

    example: Example
    last_hidden: Tensor
    first_base: int


@dataclass(frozen=True, kw_only=True)
class Padded:
    """B spans of at most T tokens side by side: `token_ids` [B, T], `aux` [B, T, 3d], `last_hidden` [B, T, d],
    `lengths` [B], `first_bases` [B].
    """

    token_ids: Tensor
    aux: Tensor
    last_hidden: Tensor
    lengths: Tensor
    first_bases: Tensor

    def states(self, step: int) -> Tensor:
        """[B, T] bool: positions from which step `step` has a distribution to learn and a token that follows it.

        Example: 6 tokens, first base 2. Position t predicts token t + 2 + step, so step 0 learns at 2 and 3.
        """
        positions_T = torch.arange(self.token_ids.shape[1])
        return (positions_T >= self.first_bases[:, None]) & (positions_T + 2 + step < self.lengths[:, None])


def pad(answers: Sequence[Answer], *, with_prompts: bool) -> Padded:
    T = max(len(answer.example.token_ids) for answer in answers)

    def padded(tensors: Sequence[Tensor]) -> Tensor:
        return torch.stack([F.pad(one, (0, 0) * (one.dim() - 1) + (0, T - len(one))) for one in tensors])

    examples = [answer.example for answer in answers]
    return Padded(
        token_ids=padded([example.token_ids for example in examples]),
        aux=padded([example.aux.float() for example in examples]),
        last_hidden=padded([answer.last_hidden for answer in answers]),
        lengths=torch.tensor([len(example.token_ids) for example in examples]),
        first_bases=torch.tensor(
            [answer.example.first_base if with_prompts else answer.first_base for answer in answers]
        ),
    )


class _PaddedAttention:
    """Step 0 is causal; a deeper step sees the same keys, and besides them those of its position's deeper steps."""

    def __init__(self, num_tokens: int) -> None:
        self._future_TT = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads_per_key = query.shape[1] // key.shape[1]
        self._keys.append(key.repeat_interleave(heads_per_key, 1))
        self._values.append(value.repeat_interleave(heads_per_key, 1))
        T, scale = query.shape[2], query.shape[-1] ** -0.5
        scores_BHTT = (query @ self._keys[0].transpose(-1, -2) * scale).masked_fill(self._future_TT, float("-inf"))
        own = [(query * key).sum(-1, keepdim=True) * scale for key in self._keys[1:]]
        weights = torch.cat([scores_BHTT, *own], -1).softmax(-1)
        out = weights[..., :T] @ self._values[0]
        for index, value_BHTh in enumerate(self._values[1:]):
            out = out + weights[..., T + index, None] * value_BHTh
        return out


class PaddedTrainer:
    """An ordinary EAGLE-3 trainer of a padded batch."""

    def __init__(self, draft: Eagle3Draft, head_Dd: Tensor, *, num_steps: int, learning_rate: float) -> None:
        self._draft, self._head_Dd, self._num_steps = draft, head_Dd, num_steps
        self._optimizer = torch.optim.AdamW(draft.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, batch: Padded) -> float:
        """Learn from one batch; returns the loss."""
        with autocast(self._draft.embed.device, is_wanted=True):
            loss = self.loss(batch)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._draft.parameters(), 1.0)
        self._optimizer.step()
        return loss.item()

    def loss(self, batch: Padded) -> Tensor:
        """Mean cross-entropy with the target of each step's states, deeper steps weighing less."""
        draft = self._draft
        B, T = batch.token_ids.shape
        with torch.no_grad():
            probs_BTD = (batch.last_hidden @ self._head_Dd.T).softmax(-1)
        # Back from autocast's bfloat16: norms of mixed types would take a slow path.
        feature_BTd = draft.fuse(batch.aux).float()
        attention, positions_BT = _PaddedAttention(T), torch.arange(T).expand(B, T)
        loss = feature_BTd.new_zeros((), dtype=torch.float32)
        for step in range(self._num_steps):
            # What stands one place further in this step; the places that come in at the end are no states.
            tokens_BT, labels_BTD = (rows.roll(-1 - step, 1) for rows in (batch.token_ids, probs_BTD))
            feature_BTd = draft(tokens_BT, feature_BTd, positions_BT + step, attention)
            logits_BTD = draft.logits(feature_BTd)
            states_BT = batch.states(step)
            log_q_SD = logits_BTD[states_BT].float().log_softmax(-1)
            loss = loss - 0.8**step * (labels_BTD[states_BT] * log_q_SD).sum(-1).mean()
        return loss

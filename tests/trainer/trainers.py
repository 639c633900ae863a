"""A trainer in this process, and what tests ask it for."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trainer.loop import Trainer

MakeTrainer = Callable[..., Trainer]


def learn(trainer: Trainer, num_steps: int) -> None:
    trainer.read(block_ms=0)
    for _ in range(num_steps):
        trainer.step()


def waiting(trainer: Trainer) -> int:
    return trainer.replay.num_waiting


def members(trainer: Trainer) -> set[str]:
    return set(trainer.replay.members)


def same_weights(first: Trainer, second: Trainer) -> bool:
    return all(torch.equal(a, second.learner.state()[name]) for name, a in first.learner.state().items())

"""How a draft is usually begun and moved, to compare with: random attention, and AdamW's step for every weight alike.

This project does both otherwise: heads look at their own position at first (speculator/fresh.py), and columns of `fc`
move as if their features were of one size (trainer/step.py). All else here is the same.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from speculator.fresh import fresh_draft
from speculator.model import Eagle3Draft
from trainer.batch import Batch
from trainer.step import Learner

# The attention's output is added to features that drown it at full scale, as the MLP's is.
_OUTPUT_SCALE = 0.5


def ordinary_draft(model_dir: Path, *, draft_vocab_size: int | None, seed: int) -> Eagle3Draft:
    """`fresh_draft` with PyTorch's own random attention."""
    draft = fresh_draft(model_dir, draft_vocab_size=draft_vocab_size, seed=seed)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        attention = Eagle3Draft(draft.config, draft.embed, draft.d2t).midlayer.self_attn
        attention.o_proj.weight.mul_(_OUTPUT_SCALE)
    draft.midlayer.self_attn = attention
    return draft


class OrdinaryLearner(Learner):
    """AdamW's own step of `fc` too."""

    def _feature_squares(self, batch: Batch | None) -> Tensor:
        # For features without a size the step is left as it is.
        return torch.zeros_like(super()._feature_squares(batch))

"""Other weights for a toy target: the same architecture after a training step, so to speak."""

from __future__ import annotations

import shutil
from pathlib import Path

import safetensors.torch
import torch

WEIGHTS = "model.safetensors"


def moved_model(model_dir: Path, folder: Path, *, seed: int = 1, scale: float = 0.3) -> Path:
    """Every weight a little elsewhere, norms included; written as a trainer would write it."""
    generator = torch.Generator().manual_seed(seed)
    weights = safetensors.torch.load_file(model_dir / WEIGHTS)
    moved = {
        name: tensor
        + scale * tensor.std().nan_to_num(0.1).clamp_min(0.1) * torch.randn(tensor.shape, generator=generator)
        for name, tensor in weights.items()
    }
    shutil.copytree(model_dir, folder)
    safetensors.torch.save_file(moved, folder / WEIGHTS, {"format": "pt"})
    return folder

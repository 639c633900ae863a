"""Tiny drafts that tests make from a seed."""

from __future__ import annotations

import torch

from speculator.draft.checkpoint import draft_state
from speculator.draft.eagle3 import DraftConfig, Eagle3Draft

CONFIG = DraftConfig(
    hidden_size=8,
    intermediate_size=12,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    vocab_size=20,
    draft_vocab_size=6,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    rope_theta=100_000.0,
)
TARGET_IDS = torch.tensor([0, 3, 4, 9, 17, 19])


def make_draft(seed: int = 0) -> Eagle3Draft:
    torch.manual_seed(seed)
    embed = torch.randn(CONFIG.vocab_size, CONFIG.hidden_size)
    draft = Eagle3Draft(CONFIG, embed, TARGET_IDS - torch.arange(6))
    for parameter in draft.parameters():
        parameter.data.normal_()
    return draft


def noise_like(draft: Eagle3Draft) -> dict[str, torch.Tensor]:
    """The draft's tensors, with noise of the same spread in the place of its weights."""
    generator = torch.Generator().manual_seed(1)
    state = draft_state(draft)
    for name, tensor in state.items():
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std()
            state[name] = noise.to(tensor.dtype)
    return state

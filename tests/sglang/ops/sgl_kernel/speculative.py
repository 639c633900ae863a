"""What SGLang's n-gram drafts need beside the operators of its EAGLE."""

from __future__ import annotations

import torch
from torch import Tensor

from .tree import _link


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    seq_lens_B: Tensor,
    positions: Tensor,
    retrieve_index_BN: Tensor,
    next_token_BN: Tensor,
    next_sibling_BN: Tensor,
    num_requests: int,
    num_nodes: int,
) -> None:
    """Write the links and the positions [B * N] of trees that are given by masks [B * N * N]: node i sees j."""
    mask_BNN = tree_mask.view(num_requests, num_nodes, num_nodes).bool()
    nodes = torch.arange(num_nodes)
    above_BNN = mask_BNN & (nodes < nodes[:, None])
    parents_BN = torch.where(above_BNN, nodes, -1).amax(-1)
    positions.copy_((seq_lens_B[:, None] + above_BNN.sum(-1)).flatten())
    retrieve_index_BN.copy_(torch.arange(num_requests * num_nodes).view(num_requests, num_nodes))
    next_token_BN.fill_(-1)
    next_sibling_BN.fill_(-1)
    _link(parents_BN[:, 1:], next_token_BN, next_sibling_BN)

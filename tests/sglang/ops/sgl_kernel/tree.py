"""The draft tree of a verification: its links, its mask, and the walk along what the target agrees with.

Node 0 is the root, the token that the last round committed; nodes 1 … N-1 are proposals, parents before children. A
node's children form a list: `next_token[parent]` is its first child, `next_sibling[child]` the one after, -1 ends it.

Suffixes: B requests, N nodes of a tree, A the most tokens that one verification can commit (draft steps + 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK_OF_NEW_TOKENS = 1  # SGLang's TreeMaskMode.QLEN_ONLY, the one that its CPU path asks for


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected: Tensor,
    seq_lens_B: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index_BN: Tensor,
    next_token_BN: Tensor,
    next_sibling_BN: Tensor,
    topk: int,
    num_steps: int,
    num_nodes: int,
    mask_mode: int,
) -> None:
    """Write the links, the flattened mask [B * N * N] (node i may see node j) and the positions [B * N] of each tree.

    All candidates of a request count from 0: the first step's `topk`, then for each later step `topk` children of each
    of its `topk` parents. `selected` [B, N-1] are those that became nodes 1 … N-1, ascending; `parent_list` [B, …] has
    for candidate group g > 0 (`candidate // topk`) the candidate that is its parent. Group 0 hangs on the root.
    The link outputs come filled with -1.
    """
    if mask_mode != _MASK_OF_NEW_TOKENS:
        raise NotImplementedError(f"tree mask mode {mask_mode}")
    batch_size = len(seq_lens_B)
    retrieve_index_BN.copy_(torch.arange(batch_size * num_nodes).view(batch_size, num_nodes))
    if topk == 1:
        mask_BNN = torch.ones(num_nodes, num_nodes, dtype=torch.bool).tril().expand(batch_size, -1, -1)
        next_token_BN[:, :-1] = torch.arange(1, num_nodes)
    else:
        parents = _parents(parent_list, selected, topk)
        mask_BNN = _mask(parents)
        _link(parents, next_token_BN, next_sibling_BN)
    tree_mask.view(-1)[: mask_BNN.numel()] = mask_BNN.flatten()
    depth_BN = mask_BNN.sum(-1) - 1
    positions.copy_((seq_lens_B[:, None] + depth_BN).flatten())


def _parents(parent_list: Tensor, selected: Tensor, topk: int) -> Tensor:
    """The parent node of nodes 1 … N-1 [B, N-1]; -1 where the parent candidate was not selected.

    Example, topk 2: candidates 0 1 under the root, 2 3 under candidate 0, 4 5 under candidate 1. Selected 0 1 2 5 as
    nodes 1 2 3 4 have parents 0 0 1 2.
    """
    group = selected // topk
    if parent_list.shape[1] == 0:  # one draft step: no groups but the root's
        return torch.zeros_like(selected)
    parent_candidate = parent_list.gather(1, group)
    is_parent = selected[:, None, :] == parent_candidate[:, :, None]
    parent_node = torch.where(is_parent.any(-1), is_parent.int().argmax(-1) + 1, -1)
    return torch.where(group == 0, 0, parent_node)


def _mask(parents: Tensor) -> Tensor:
    """Each node sees itself, what its parent sees, and the root."""
    batch_size, num_proposals = parents.shape
    mask_BNN = torch.eye(num_proposals + 1, dtype=torch.bool).repeat(batch_size, 1, 1)
    mask_BNN[:, :, 0] = True
    batch = torch.arange(batch_size)
    for node in range(1, num_proposals + 1):
        mask_BNN[:, node] |= mask_BNN[batch, parents[:, node - 1].clamp(min=0)]
    return mask_BNN


def _link(parents: Tensor, next_token_BN: Tensor, next_sibling_BN: Tensor) -> None:
    """Make each parent's list of children, in ascending order; nodes without a parent stay out of reach."""
    for batch, row in enumerate(parents.tolist()):
        next_token, next_sibling = [-1] * (len(row) + 1), [-1] * (len(row) + 1)
        for node in range(len(row), 0, -1):
            parent = row[node - 1]
            if parent >= 0:
                next_sibling[node] = next_token[parent]
                next_token[parent] = node
        next_token_BN[batch] = torch.tensor(next_token)
        next_sibling_BN[batch] = torch.tensor(next_sibling)


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walk down each tree for as long as a child is the token that the target predicts (SGLang's argument names).

    `candidates` and `target_predict` [B, N] are each node's token and the target's choice after it. Written are
    `accept_index` [B, A], the global numbers of the nodes walked, root first; `accept_token_num` [B], how many of them
    are proposals; and in the flat `predicts` [B * N] the target's choice at each node walked. Other entries stay.
    """
    if candidates.shape[1] == 1:  # roots alone: a step that decodes plainly
        accept_index[:, :1] = retrive_index
        accept_token_num.zero_()
        predicts.copy_(target_predict.flatten())
        return
    chosen = target_predict.flatten().tolist()
    walks = [
        _walk(*request)
        for request in zip(
            candidates.tolist(),
            target_predict.tolist(),
            retrive_next_token.tolist(),
            retrive_next_sibling.tolist(),
            [accept_index.shape[1]] * len(candidates),
            strict=True,
        )
    ]
    numbers = [[row[node] for node in walk] for row, walk in zip(retrive_index.tolist(), walks, strict=True)]
    for batch, walked in enumerate(numbers):
        accept_index[batch, : len(walked)] = torch.tensor(walked, dtype=accept_index.dtype)
    flat = [number for walked in numbers for number in walked]
    predicts[flat] = torch.tensor([chosen[number] for number in flat], dtype=predicts.dtype)
    accept_token_num.copy_(torch.tensor([len(walk) - 1 for walk in walks]))


def _walk(tokens: list[int], chosen: list[int], next_token: list[int], next_sibling: list[int], most: int) -> list[int]:
    """The nodes of one tree that the target agrees with, root first, at most `most` of them."""
    walk = [0]
    while len(walk) < most:
        child = next_token[walk[-1]]
        while child >= 0 and tokens[child] != chosen[walk[-1]]:
            child = next_sibling[child]
        if child < 0:
            break
        walk.append(child)
    return walk

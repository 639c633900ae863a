"""From the tensors of a verification, on the host, to the rows and the round of each of its requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from serving.sglang.spans import Round, Rows


def committed(host: Mapping[str, Tensor], *, draft_version: int, is_tree: bool) -> Iterator[tuple[Rows, Round | None]]:
    """The committed rows of each request of a verification, and what it says about the proposals.

    `host` holds, for B requests of N nodes: seq_lens, accept_lens, first_node [B], accept_index [B, A], draft_token,
    next_token, next_sibling [B, N], features [B, N, w], topk_ids and topk_logprobs [B, N, K], and, for N > 1,
    draft_logprobs [B, N − 1]. The round is None where nothing was proposed.
    """
    num_kept = host["topk_ids"].shape[-1]
    ids_NK, logprobs_NK = in_order(host["topk_ids"].view(-1, num_kept), host["topk_logprobs"].view(-1, num_kept))
    positions, counts = host["seq_lens"].tolist(), host["accept_lens"].tolist()
    index_BA = host["accept_index"].numpy() - host["first_node"].numpy()[:, None]
    tokens_BN = host["draft_token"].numpy().astype(np.int32)
    num_nodes = tokens_BN.shape[1]
    for row, (position, num_committed) in enumerate(zip(positions, counts, strict=True)):
        nodes = index_BA[row, :num_committed]
        rows = Rows(
            start=position,
            # SGLang has moved the accepted path's features to the front; its logits stay where the nodes are.
            features=host["features"][row, :num_committed].clone(),
            topk_ids=ids_NK[row * num_nodes + nodes],
            topk_logprobs=logprobs_NK[row * num_nodes + nodes],
        )
        if num_nodes == 1:
            yield rows, None
            continue
        parents = np.array(tree_parents(host["next_token"][row].tolist(), host["next_sibling"][row].tolist()), np.int8)
        logprobs = host["draft_logprobs"][row].float().numpy()
        if is_tree:
            # Of the whole path so far: the node's own is what its parent's lacks.
            logprobs = logprobs - np.where(parents >= 0, logprobs[parents], 0)
        yield (
            rows,
            Round(
                position=position,
                tokens=tokens_BN[row, 1:],
                logprobs=np.minimum(logprobs, 0).astype(np.float16),
                parents=parents,
                path=tokens_BN[row, nodes[1:]],
                draft_version=draft_version,
            ),
        )


class TopTokens:
    """Reduces logits to their likeliest tokens; used by one thread.

    On a CPU it keeps the memory that it computes in: the kernel takes longer to hand out fresh pages than the softmax
    takes to fill them. On a GPU PyTorch keeps it.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._memory = torch.empty(0)

    def __call__(self, logits: Tensor) -> dict[str, Tensor]:
        """The likeliest tokens [..., K] of logits [..., V] and their log-probabilities, in float32."""
        out = None if logits.is_cuda else self._room(logits)
        logprobs = torch.log_softmax(logits, -1, dtype=torch.float32, out=out)
        top = logprobs.topk(min(self._count, logits.shape[-1]), -1)
        return {"topk_ids": top.indices.int(), "topk_logprobs": top.values}

    def _room(self, logits: Tensor) -> Tensor:
        if self._memory.numel() < logits.numel():
            self._memory = torch.empty(logits.numel())
        return self._memory[: logits.numel()].view(logits.shape)


def in_order(ids: Tensor, logprobs: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Rows [n, K] from the likeliest, as int32 and float16; of equal ones the lower id first, as argmax takes it."""
    host_ids, host_logprobs = ids.numpy(), logprobs.numpy()
    order = np.lexsort((host_ids, -host_logprobs), axis=-1)
    # A rounding step above zero is no probability.
    sorted_logprobs = np.minimum(np.take_along_axis(host_logprobs, order, -1), 0).astype(np.float16)
    return np.take_along_axis(host_ids, order, -1), sorted_logprobs


def tree_parents(next_token: Sequence[int], next_sibling: Sequence[int]) -> list[int]:
    """The parent of each proposal, −1 for the root, from SGLang's first-child and next-sibling links over N nodes.

    Proposal p is node p + 1. Example, a chain of three: next_token [1, 2, 3, −1] gives [−1, 0, 1].
    """
    parents = [-1] * len(next_token)
    for node, child in enumerate(next_token):
        while child != -1:
            parents[child] = node
            child = next_sibling[child]
    return [parent - 1 for parent in parents[1:]]

"""Turn the host copies of prefills and verifications into the rows and rounds of their requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from serving.sglang.capture.request import Rounds, Rows
from serving.sglang.device import Device
from speculator.trace import NO_DRAFT, BranchRows, VerifyRounds

T = TypeVar("T")


def joined(hosts: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    """Concatenate verifications of trees of the same size, as if they had been one."""
    return hosts[0] if len(hosts) == 1 else {name: torch.cat([host[name] for host in hosts]) for name in hosts[0]}


def reduced(host: dict[str, Tensor], top_tokens: TopTokens) -> dict[str, Tensor]:
    """Replace logits, if there are any, by their top tokens.

    Takes the logits out of `host`, so that they are freed one step after the other.
    """
    logits = host.pop("logits", None)
    return host if logits is None else {**host, **top_tokens(logits)}


def prefilled(host: Mapping[str, Tensor], owned: Sequence[tuple[T, int, int]]) -> Iterator[tuple[T, Rows, None]]:
    """The rows of a prefill for each (owner, first position, number of rows), in their order in it; it has no rounds.

    `host` holds features [n, w] of all rows, their scale [n] where they are float8, and topk_ids and topk_logprobs [B,
    K] of the last row of each owner.
    """
    ids, logprobs = in_order(host["topk_ids"], host["topk_logprobs"])
    offset = 0
    for index, (owner, start, length) in enumerate(owned):
        rows = Rows(
            start=start,
            # A copy: a view would keep the whole batch's rows in memory as long as the slowest request.
            features=host["features"][offset : offset + length].clone(),
            scale=host["scale"][offset : offset + length].clone() if "scale" in host else None,
            topk_ids=ids[index : index + 1].copy(),
            topk_logprobs=logprobs[index : index + 1].copy(),
        )
        yield owner, rows, None
        offset += length


def committed(
    host: Mapping[str, Tensor],
    owners: Sequence[T],
    counts: Sequence[int],
    sizes: Sequence[int],
    *,
    num_nodes: int,
    draft_version: int,
    is_tree: bool,
) -> Iterator[tuple[T, Rows, Rounds | None]]:
    """The committed rows of each owner, and the verdicts on its proposals.

    Of B trees of N nodes `counts` [B] nodes were committed and `sizes` [B] have rows, R in all: as many, or all N of a
    chain whose rejected rows are kept. `host` holds

    * by row, tree by tree along the accepted path: features [R, w], scale [R] if float8, topk_ids, topk_logprobs [R, K]
    * by tree: seq_lens [B]; for N > 1 also draft_token [B, N] and draft_logprobs [B, N − 1]
    * by tree that is no chain: next_token and next_sibling [B, N], path [B, A]
    * by tree, where earlier text was proposed: is_text and num_proposals [B]

    Without proposals (N = 1) there are no rounds. An owner of several trees in a row gets their rows in one piece.
    """
    ids, logprobs = in_order(host["topk_ids"], host["topk_logprobs"])
    positions = host["seq_lens"].tolist()
    rounds = _rounds(host, counts, draft_version, is_tree) if num_nodes > 1 else None
    num_committed, num_rows = np.array(counts), np.array(sizes)
    first_row = np.cumsum(num_rows) - num_rows

    def rows_of(picked: np.ndarray, features: str) -> dict[str, Any]:
        index = torch.from_numpy(picked)
        return {
            features: host["features"].index_select(0, index),
            "scale": host["scale"].index_select(0, index) if "scale" in host else None,
            "topk_ids": ids[picked],
            "topk_logprobs": logprobs[picked],
        }

    for owner, chosen in _runs(owners, positions, counts):
        trees = np.array(chosen)
        first, taken = first_row[trees], num_committed[trees]
        rows = Rows(start=positions[chosen[0]], **rows_of(_ranges(first, taken), "features"))
        if rounds is None:
            yield owner, rows, None
            continue
        rejected, left = None, num_rows[trees] - taken
        if left.any():
            rejected = BranchRows(
                round=np.repeat(np.arange(len(trees), dtype=np.int32), left),
                node=_ranges(taken - 1, left).astype(np.int8),
                **rows_of(_ranges(first + taken, left), "hidden"),
            )
        # Copied: a view would keep the rounds of the whole batch.
        yield owner, rows, Rounds(verified=rounds.verified[trees], path=rounds.path[trees], rejected=rejected)


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenate the ranges start, start + 1, … of these lengths."""
    return np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())


def _runs(owners: Sequence[T], positions: Sequence[int], counts: Sequence[int]) -> list[tuple[T, list[int]]]:
    """Each owner's trees, in runs of consecutive positions."""
    runs: list[tuple[T, list[int]]] = []
    current: dict[T, list[int]] = {}
    for tree, owner in enumerate(owners):
        run = current.get(owner)
        if run is None or positions[run[-1]] + counts[run[-1]] != positions[tree]:
            run = current[owner] = []
            runs.append((owner, run))
        run.append(tree)
    return runs


def _rounds(host: Mapping[str, Tensor], counts: Sequence[int], draft_version: int, is_tree: bool) -> Rounds:
    """The rounds of all B trees."""
    nodes_BN = host["draft_token"].numpy().astype(np.int32)
    logprobs_BP = host["draft_logprobs"].float().numpy()
    if is_tree:
        links = zip(host["next_token"].tolist(), host["next_sibling"].tolist(), strict=True)
        parents_BP = np.array([tree_parents(children, siblings) for children, siblings in links], np.int64)
        # Scores are of the whole path: a node's own is the difference to its parent's.
        of_parents_BP = np.take_along_axis(logprobs_BP, np.maximum(parents_BP, 0), 1)
        logprobs_BP = logprobs_BP - np.where(parents_BP >= 0, of_parents_BP, 0)
        walked_BA = host["path"].numpy()[:, 1:].astype(np.int64)
        path_BP = np.full_like(nodes_BN[:, 1:], -1)
        path_BP[:, : walked_BA.shape[1]] = np.take_along_axis(nodes_BN, np.maximum(walked_BA, 0), 1)
    else:
        path_BP = nodes_BN[:, 1:]
        parents_BP = np.broadcast_to(np.arange(-1, path_BP.shape[1] - 1), path_BP.shape)
    tokens_BP, logprobs_BP = nodes_BN[:, 1:], np.minimum(logprobs_BP, 0).astype(np.float16)
    versions_B = np.full(len(nodes_BN), draft_version, np.int32)
    if "is_text" in host:
        # Blank out the filler behind a row's proposals, except filler that was accepted.
        sizes_B = np.maximum(host["num_proposals"].numpy(), np.array(counts) - 1)
        is_own_BP = np.arange(tokens_BP.shape[1]) < sizes_B[:, None]
        tokens_BP = np.where(is_own_BP, tokens_BP, np.int32(-1))
        logprobs_BP = np.where(is_own_BP, logprobs_BP, np.float16(0))
        versions_B = np.where(host["is_text"].numpy(), np.int32(NO_DRAFT), versions_B)
    verified = VerifyRounds(
        position=host["seq_lens"].numpy().astype(np.int32),
        draft_tokens=tokens_BP,
        draft_logprobs=logprobs_BP,
        draft_parents=parents_BP.astype(np.int8),
        num_accepted=np.array(counts, np.int8) - np.int8(1),
        draft_version=versions_B,
    )
    return Rounds(verified=verified, path=path_BP)


_ROWS_AT_A_TIME = 512
"""Rows whose log-probabilities are computed at once: in float32 0.3 GB for a vocabulary of 152,000."""


class TopTokens:
    """Reduces logits to their likeliest tokens; used by one thread.

    On a CPU it reuses its scratch memory: the operating system takes longer to hand out fresh pages than the softmax
    takes to fill them. On a GPU PyTorch's allocator does that.
    """

    def __init__(self, count: int, device: Device, *, block: int = 64) -> None:
        """`block`: how many neighbouring tokens there are of which the likeliest is looked for first."""
        self._count, self._on_host, self._block = count, device.is_host, block
        self._memory = torch.empty(0)
        self._within_block = device.upload(range(block))

    def __call__(self, logits: Tensor) -> dict[str, Tensor]:
        """The likeliest tokens [n, K] of logits [n, V] and their log-probabilities, in float32."""
        found = map(self._of_part, torch.split(logits, _ROWS_AT_A_TIME))
        values, ids = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*found, strict=True))
        return {"topk_ids": ids.int(), "topk_logprobs": values}

    def _of_part(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        out = self._scratch(logits) if self._on_host else None
        logprobs = torch.log_softmax(logits, -1, dtype=torch.float32, out=out)
        return self._largest(logprobs, min(self._count, logits.shape[-1]))

    def _scratch(self, logits: Tensor) -> Tensor:
        if self._memory.numel() < logits.numel():
            self._memory = torch.empty(logits.numel())
        return self._memory[: logits.numel()].view(logits.shape)

    def _largest(self, values: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` largest of each row [n, V] and where they are.

        They lie in the `count` blocks with the largest maxima. Finding those first takes a CPU a fifth of the time of
        `topk` on all of it, and a GPU half.
        """
        num_blocks, rest = divmod(values.shape[1], self._block)
        if rest or num_blocks <= count:
            top = values.topk(count, -1)
            return top.values, top.indices
        blocks = values.reshape(-1, num_blocks, self._block)
        chosen = blocks.amax(-1).topk(count, -1, sorted=False).indices[..., None]
        top = blocks.gather(1, chosen.expand(-1, -1, self._block)).flatten(1).topk(count, -1)
        ids = torch.add(self._within_block, chosen, alpha=self._block).flatten(1)
        return top.values, ids.gather(1, top.indices)


def in_order(ids: Tensor, logprobs: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Rows [n, K] from the likeliest, as int32 and float16; of equal ones the lower id first, as argmax takes it."""
    host_ids, host_logprobs = ids.numpy(), logprobs.numpy()
    order = np.lexsort((host_ids, -host_logprobs), axis=-1)
    # Rounding may put a log-probability just above 0.
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

"""Which cache slot holds which token: reads and writes of the request table.

Row r, column p of the table `req_to_token` [R, P] is the slot of the key and value of request r's token p. Columns past
a request's length hold slots that are reserved for its next tokens.

Suffixes: B requests of the batch, R rows of the table, P its columns, N slots of all requests one after another.
`pool_len` (P) is part of SGLang's signatures, for kernels that see a pointer without a shape.
"""

from __future__ import annotations

import torch
from torch import Tensor


def assign_req_to_token_pool_cpu(
    rows_B: Tensor, req_to_token_RP: Tensor, start_B: Tensor, end_B: Tensor, slots_N: Tensor, pool_len: int
) -> None:
    """Write `slots_N`, request by request, into columns [start, end) of each request's row."""
    cells = _cells(rows_B, start_B, end_B)
    req_to_token_RP[cells] = slots_N[: cells[0].numel()].to(req_to_token_RP.dtype)


def assign_extend_cache_locs_cpu(
    rows_B: Tensor, req_to_token_RP: Tensor, start_B: Tensor, end_B: Tensor, out_N: Tensor, pool_len: int
) -> None:
    """Read columns [start, end) of each request's row, one request after another, into the head of `out_N`."""
    slots = req_to_token_RP[_cells(rows_B, start_B, end_B)]
    out_N[: slots.numel()] = slots.to(out_N.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    rows_B: Tensor,
    req_to_token_RP: Tensor,
    seq_lens_B: Tensor,
    out_N: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Read the `topk * num_steps` slots behind each request's committed tokens: where its draft branches write.

    Branch t's tokens own the t-th run of `num_steps` slots.
    """
    assign_extend_cache_locs_cpu(rows_B, req_to_token_RP, seq_lens_B, seq_lens_B + topk * num_steps, out_N, pool_len)


def build_draft_decode_metadata_cpu(
    req_to_token_RP: Tensor, rows_B: Tensor, seq_lens_B: Tensor, topk: int, num_steps: int, pool_len: int
) -> Tensor:
    """One table row for each branch of each draft tree: the prefix's slots, then the branch's own `num_steps` slots.

    Returns [B * topk, W] with W the longest of these rows; columns past a row's end mean nothing.

    Example, topk 2, 2 steps, prefix a b, reserved c d e f: branch 0 reads a b c d, branch 1 reads a b e f.
    """
    width = int(seq_lens_B.max()) + num_steps
    branches_BtW = req_to_token_RP[rows_B.long(), :width].repeat_interleave(topk, 0).view(-1, topk, width)
    own_tk = torch.arange(topk * num_steps).view(topk, num_steps)
    behind_B11 = seq_lens_B.long()[:, None, None]
    slots_Btk = req_to_token_RP[rows_B.long()[:, None, None], behind_B11 + own_tk]
    return branches_BtW.scatter(2, (behind_B11 + own_tk[0]).expand_as(slots_Btk), slots_Btk).flatten(0, 1)


def _cells(rows_B: Tensor, start_B: Tensor, end_B: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column [N] of every cell in columns [start, end) of the given rows, one row after another."""
    lengths_B = (end_B - start_B).long()
    lengths = lengths_B.tolist()
    if lengths == lengths[:1] * len(lengths):  # as in every step that decodes; half the work
        columns_BN = start_B.long()[:, None] + torch.arange(max(lengths, default=0))
        return rows_B.long()[:, None].expand_as(columns_BN).flatten(), columns_BN.flatten()
    before_B = lengths_B.cumsum(0) - lengths_B
    rows_N = rows_B.long().repeat_interleave(lengths_B)
    columns_N = torch.arange(rows_N.numel()) + (start_B.long() - before_B).repeat_interleave(lengths_B)
    return rows_N, columns_N

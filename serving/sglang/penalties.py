"""Give a request with penalties the text that SGLang gives it without a draft.

Such penalties change the target's distribution with every token: those of frequency, presence and repetition, and
`min_tokens`, which forbids the end. SGLang's verification applies the same ones at all nodes of a tree, and counts one
token a step. Both are right for the first token of a step alone, so no more is committed while a request has any. That
token is distributed as without proposals.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from serving.sglang.device import Device


def penalised(batch: Any) -> tuple[bool, ...]:
    """Whether penalties change with the tokens of this decode step, for each request; empty where none has any."""
    # SGLang sets it where a request has penalties. Other batches cost nothing here.
    if batch.sampling_info.acc_additive_penalties is None:
        return ()
    return tuple(map(_is_penalised, batch.reqs))


def commit_one(device: Device, is_penalised: tuple[bool, ...], accept_lens: Tensor, accept_index: Tensor) -> None:
    """Let these requests commit their first token alone, in what SGLang's verification returns.

    `accept_lens` [B] are changed, and `accept_index` [B, A], the accepted path.
    """
    rows = device.index(tuple(row for row, alone in enumerate(is_penalised) if alone))
    accept_lens.index_fill_(0, rows, 1)
    accept_index[:, 1:].index_fill_(0, rows, -1)


def _is_penalised(request: Any) -> bool:
    params = request.sampling_params
    return bool(
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1.0
        # SGLang compares the same number, of decode steps up to this one since the prefill.
        or request.decode_batch_idx < params.min_new_tokens
    )

"""On a CPU a step without proposals attends as plain decoding does.

SGLang verifies one token there, in the way of prompts: keys and values are stored first, in calls of their own. Its
operator of plain decoding does both at once, and rounds as a server without a draft does. On a GPU a step without
proposals has a graph of its own, and nothing is changed.
"""

from __future__ import annotations

from typing import Any


def after_plan(_: Any, backend: Any, forward_batch: Any) -> None:
    """Before the layers of a pass: what its attention reads, where it verifies one token of each request."""
    if _is_one_token(forward_batch) and not backend.use_mla:
        # What the operator reads in the batch's place; a verification counts its own token in no length.
        backend.draft_decode_metadata = (
            backend.req_to_token_pool.req_to_token,
            forward_batch.seq_lens + 1,
            forward_batch.req_pool_indices,
        )
    elif backend.draft_decode_metadata is not None:
        backend.draft_decode_metadata = None


def around_extend(
    run: Any, backend: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    if backend.draft_decode_metadata is None:
        return run(backend, q, k, v, layer, forward_batch, *args, **kwargs)
    return backend.forward_decode(q, k, v, layer, forward_batch, *args, **kwargs)


def _is_one_token(forward_batch: Any) -> bool:
    verifies: bool = forward_batch.forward_mode.is_target_verify()
    return verifies and forward_batch.spec_info.draft_token_num == 1

"""Make a verification without proposals attend as plain decoding does.

SGLang verifies its one token with the kernels that read prompts. On a CPU these kernels store keys and values first, in
separate calls, and round differently. Triton's kernels read a request's whole prefix in one program, where those of
plain decoding split it: on an H100 a step of 64 requests of an 8B took twice as long (benchmarks/results/gpu.md). The
hooks here call each backend's own decode kernels instead, inside and outside SGLang's CUDA graph. FlashAttention and
FlashInfer are left alone.
"""

from __future__ import annotations

import copy
from typing import Any


def after_cpu_plan(_: Any, backend: Any, forward_batch: Any) -> None:
    """Give the backend decode metadata before a pass that verifies one token of each request."""
    if _is_one_token(forward_batch) and not backend.use_mla:
        # The kernel reads these instead of the batch. A verification's `seq_lens` do not count the token that it
        # verifies.
        backend.draft_decode_metadata = (
            backend.req_to_token_pool.req_to_token,
            forward_batch.seq_lens + 1,
            forward_batch.req_pool_indices,
        )
    elif backend.draft_decode_metadata is not None:
        backend.draft_decode_metadata = None


def around_cpu_extend(
    run: Any, backend: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    if backend.draft_decode_metadata is None:
        return run(backend, q, k, v, layer, forward_batch, *args, **kwargs)
    return backend.forward_decode(q, k, v, layer, forward_batch, *args, **kwargs)


def around_triton_plan(run: Any, backend: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Plan a one-token verification as plain decoding, for a pass or for the replay of a captured graph."""
    planned = _as_decode(forward_batch) if _splits_prefixes(backend, forward_batch) else forward_batch
    return run(backend, planned, *args, **kwargs)


def around_triton_extend(
    run: Any, backend: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    if _splits_prefixes(backend, forward_batch):
        return backend.forward_decode(q, k, v, layer, forward_batch, *args, **kwargs)
    return run(backend, q, k, v, layer, forward_batch, *args, **kwargs)


def _splits_prefixes(backend: Any, forward_batch: Any) -> bool:
    return _is_one_token(forward_batch) and not backend.use_mla and backend.dcp_size == 1


def _as_decode(forward_batch: Any) -> Any:
    """The batch as plain decoding sees it: `seq_lens` count the token that is decoded."""
    decode = copy.copy(forward_batch)
    decode.forward_mode = type(forward_batch.forward_mode).DECODE
    decode.spec_info = None
    decode.seq_lens = forward_batch.seq_lens + 1
    if forward_batch.seq_lens_sum is not None:
        decode.seq_lens_sum = forward_batch.seq_lens_sum + forward_batch.batch_size
    return decode


def _is_one_token(forward_batch: Any) -> bool:
    if not forward_batch.forward_mode.is_target_verify() or forward_batch.spec_info is None:
        return False
    verifies_one: bool = forward_batch.spec_info.draft_token_num == 1
    return verifies_one

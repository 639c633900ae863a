"""Traces that tests make from a seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import torch

from speculator.draft.sampling_params import SamplingParams
from speculator.redis.trace_stream import TraceStream
from speculator.trace import Trace, TraceHeader, VerifyRounds, encode_trace


def make_header(**changes: Any) -> TraceHeader:
    values: dict[str, Any] = {
        "trace_id": "trace-0",
        "request_id": "request-0",
        "engine_id": "engine-0",
        "target_fingerprint": "f" * 64,
        "num_prompt_tokens": 4,
        "first_position": 0,
        "created_ms": 1_700_000_000_000,
        "sampling": SamplingParams(temperature=0.7, top_p=0.9, top_k=40),
    }
    return TraceHeader(**values | changes)


def make_trace(
    seed: int = 0,
    *,
    T: int = 12,
    d: int = 8,
    K: int = 4,
    R: int = 3,
    P: int = 3,
    labelled_from: int = 3,
    feature_scale: float = 1.0,
    **header: Any,
) -> Trace:
    """A well-formed trace; rows before `labelled_from` have no target distribution."""
    rng = np.random.default_rng(seed)
    T, R = max(T, R), min(T, R)
    ids = rng.integers(0, 1000, (T, K), dtype=np.int32)
    logprobs = -np.sort(rng.exponential(2.0, (T, K)), axis=1).astype(np.float16)
    ids[:labelled_from], logprobs[:labelled_from] = -1, -np.inf
    built = make_header(**{"num_prompt_tokens": min(4, T)} | header)
    num_proposed = rng.integers(0, P + 1, R)
    padding = np.arange(P) >= num_proposed[:, None]
    position = np.sort(rng.choice(T, R, replace=False)) + built.first_position
    draft_tokens = rng.integers(0, 1000, (R, P), dtype=np.int32)
    draft_tokens[padding] = -1
    return Trace(
        header=built,
        token_ids=rng.integers(0, 1000, T, dtype=np.int32),
        aux_hidden=torch.from_numpy(rng.normal(0, feature_scale, (T, 3 * d))).bfloat16(),
        target_topk_ids=ids,
        target_topk_logprobs=logprobs,
        constrained=rng.random(T) < 0.2,
        rounds=VerifyRounds(
            position=position.astype(np.int32),
            draft_tokens=draft_tokens,
            draft_logprobs=-rng.exponential(1.0, (R, P)).astype(np.float16),
            draft_parents=np.tile(np.arange(-1, P - 1, dtype=np.int8), (R, 1)),
            num_accepted=(rng.random(R) * (num_proposed + 1)).astype(np.int8),
            draft_version=np.sort(rng.integers(1, 6, R)).astype(np.int32),
        ),
    )


def with_rounds(trace: Trace, **changes: np.ndarray) -> Trace:
    return dataclasses.replace(trace, rounds=dataclasses.replace(trace.rounds, **changes))


def with_header(trace: Trace, **changes: Any) -> Trace:
    return dataclasses.replace(trace, header=msgspec.structs.replace(trace.header, **changes))


def send(stream: TraceStream, traces: Iterable[Trace]) -> None:
    for trace in traces:
        stream.append(encode_trace(trace), trace_id=trace.header.trace_id)

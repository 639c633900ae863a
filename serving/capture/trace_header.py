"""The header of a trace, the same from every engine."""

from __future__ import annotations

import uuid

from serving.engine import CapturePolicy
from speculator.draft.sampling_params import SamplingParams
from speculator.trace import TraceHeader


def make_header(
    *,
    request_id: str,
    policy: CapturePolicy,
    sampling: SamplingParams,
    num_prompt_tokens: int,
    first_position: int,
    engine_id: str,
    target_fingerprint: str,
    target_version: int,
    created_ms: int,
) -> TraceHeader:
    """A header with a new trace id; `first_position` is the absolute one of the span's first token.

    `created_ms` is when the request came: an order to erase a tenant then covers answers under way, too.
    """
    return TraceHeader(
        trace_id=uuid.uuid4().hex,
        request_id=request_id,
        engine_id=engine_id,
        target_fingerprint=target_fingerprint,
        target_version=target_version,
        num_prompt_tokens=num_prompt_tokens,
        first_position=first_position,
        created_ms=created_ms,
        sampling=sampling,
        tenant=policy.tenant,
        group_id=policy.group_id,
        domain=policy.domain,
    )

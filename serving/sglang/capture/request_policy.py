"""What an SGLang request says that a trace must know: who may learn from it, how it samples, what binds it; and the
span that ours are put under."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from serving.engine import CapturePolicy
from serving.request_metadata import POLICY_KEY, TARGET_KEY, Marks
from speculator.draft.sampling_params import SamplingParams
from speculator.host import now_ms
from speculator.tracing import Parent, joined

_GREEDY_TOP_K = 1


def mark(request: Any, header: str) -> None:
    """Put the gateway's header into SGLang's model of the body, from which a router may have lost the same.

    Raises ValueError for a header that the gateway did not write.
    """
    marks = Marks.of_header(header)
    request.rid, request.cache_salt = marks.rid, marks.cache_salt
    request.custom_params = {**(request.custom_params or {}), POLICY_KEY: marks.policy}


def is_marked(custom_params: Mapping[str, Any] | None) -> bool:
    """Whether the request has come through the gateway, and is still as it was there."""
    return bool(_ours(custom_params))


def is_for_another_target(custom_params: Mapping[str, Any] | None, fingerprint: str) -> bool:
    """Whether the gateway means a target other than that of `fingerprint`; not where either says nothing."""
    meant = _ours(custom_params).get(TARGET_KEY, "")
    return bool(meant and fingerprint and meant != fingerprint)


def policy_of(custom_params: Mapping[str, Any] | None) -> CapturePolicy:
    """The capture policy that the gateway put into the request; without one it is captured (but see `is_marked`)."""
    values = _ours(custom_params)
    return CapturePolicy(
        capture=bool(values.get("capture", True)),
        tenant=str(values.get("tenant", "default")),
        group_id=str(values.get("group_id", "")),
        domain=str(values.get("domain", "")),
    )


def parent_of(custom_params: Mapping[str, Any] | None) -> Parent | None:
    """The gateway's span of the request; None where spans are off, or it is not sampled."""
    return joined({"traceparent": str(_ours(custom_params).get("traceparent", ""))})


def sampling_of(params: Any) -> SamplingParams:
    """SGLang writes greedy as top-k 1, and "every token" as −1 or a huge top-k."""
    if params.top_k == _GREEDY_TOP_K:
        return SamplingParams(temperature=0.0)
    top_k = params.top_k if 0 < params.top_k < 1 << 20 else 0
    return SamplingParams(temperature=float(params.temperature), top_p=float(params.top_p), top_k=top_k)


def came_ms(request: Any) -> int:
    """When SGLang's scheduler got it: the same after a wait in its queue, and after a retraction."""
    waited_s: float = time.perf_counter() - request.time_stats.scheduler_recv_time
    return now_ms() - round(1000 * waited_s)


def is_constrained(request: Any) -> bool:
    """Whether something but temperature, top-k and top-p changes the distribution of this answer's tokens."""
    params = request.sampling_params
    return bool(
        request.grammar is not None
        or params.logit_bias
        or params.min_new_tokens
        or params.min_p
        or params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1.0
        or request.custom_logit_processor
    )


def _ours(custom_params: Mapping[str, Any] | None) -> Mapping[str, Any]:
    values = (custom_params or {}).get(POLICY_KEY)
    return values if isinstance(values, Mapping) else {}

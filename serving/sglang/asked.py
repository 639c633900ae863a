"""What an SGLang request says that a trace must know: who may learn from it, how it samples, what binds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serving.engine import CapturePolicy
from speculator.sampling import SamplingParams

_GREEDY_TOP_K = 1


def policy_of(custom_params: Mapping[str, Any] | None) -> CapturePolicy:
    """The capture policy that the gateway put into the request; a request without one is captured."""
    values = (custom_params or {}).get("slipstream")
    if not isinstance(values, Mapping):
        return CapturePolicy()
    return CapturePolicy(
        capture=bool(values.get("capture", True)),
        tenant=str(values.get("tenant", "default")),
        group_id=str(values.get("group_id", "")),
        domain=str(values.get("domain", "")),
    )


def sampling_of(params: Any) -> SamplingParams:
    """SGLang writes greedy as top-k 1, and "every token" as −1 or a huge top-k."""
    if params.top_k == _GREEDY_TOP_K:
        return SamplingParams(temperature=0.0)
    top_k = params.top_k if 0 < params.top_k < 1 << 20 else 0
    return SamplingParams(temperature=float(params.temperature), top_p=float(params.top_p), top_k=top_k)


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

"""How a served distribution follows from the target's logits. No torch here: the gateway reads it too."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Temperature 0 is greedy; `top_k` 0 keeps every token; top-k is applied before top-p, both after temperature."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

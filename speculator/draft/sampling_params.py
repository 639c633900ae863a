"""How a served distribution follows from the target's logits. No torch here: the gateway reads it too."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Temperature 0 is greedy; `top_k` 0 keeps every token; top-k is applied before top-p, both after temperature."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


def sample_seed(seed: int, number: int) -> int:
    """Seed of a request's sample `number` (from 0), where the request asks for several with one `seed` of 64 bits.

    The first one has the seed itself: a single answer is the first of several. No two pairs give the same.
    """
    return number << 64 | seed

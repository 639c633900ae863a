"""Sampling parameters of a request. Without torch, since the gateway imports them."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Temperature 0 is greedy; `top_k` 0 keeps every token; top-k is applied before top-p, both after temperature."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


def sample_seed(seed: int, number: int) -> int:
    """Seed, 0 or more, of sample `number` (from 0) of a request for several samples with one `seed` of 64 signed bits.

    The first sample gets the seed itself, a negative one plus 2⁶⁴, so a single answer equals the first of several. No
    two pairs collide.
    """
    return number << 64 | seed % 2**64

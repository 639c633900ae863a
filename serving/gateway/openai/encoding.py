"""Tokenising without stalling the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

INLINE_CHARS = 4096
"""About a millisecond of tokenising: below it a thread costs more than it saves."""


async def encode(encoder: Callable[[T], list[int]], value: T, *, num_chars: int) -> list[int]:
    """`encoder(value)`, in a thread where `value` holds many characters."""
    if num_chars <= INLINE_CHARS:
        return encoder(value)
    return await asyncio.to_thread(encoder, value)

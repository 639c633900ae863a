"""How long an answer may take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from serving.gateway.errors import ApiError


@asynccontextmanager
async def deadline(limit_s: float) -> AsyncIterator[asyncio.Timeout]:
    """Cancel the block after `limit_s` and raise `too_late`."""
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            yield limit
    except TimeoutError:
        if not limit.expired():
            raise
        raise too_late(limit_s) from None


def too_late(limit_s: float) -> ApiError:
    """An error (504) that tells clients not to try the same again."""
    message = f"The answer took longer than {limit_s:g} s: ask for fewer tokens."
    return ApiError(504, message, code="deadline_exceeded", headers={"x-should-retry": "false"})

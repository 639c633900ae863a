"""How long an answer may take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from serving.gateway.errors import ApiError


@asynccontextmanager
async def deadline(limit_s: float) -> AsyncIterator[None]:
    """Cancel the block after `limit_s` and raise ApiError (504), which tells clients not to try the same again."""
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        message = f"The answer took longer than {limit_s:g} s: ask for fewer tokens."
        raise ApiError(504, message, code="deadline_exceeded", headers={"x-should-retry": "false"}) from None

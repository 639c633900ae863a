"""What is refused before the engine hears of a request: another model, too many samples, too many tokens;
and how long an answer may take.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from serving.engine import EngineInfo
from serving.gateway.config import GatewaySettings
from serving.gateway.errors import ApiError
from speculator.errors import RequestError


def check_limits(info: EngineInfo, settings: GatewaySettings, *, model: str, num_samples: int) -> None:
    """`num_samples` counts prompts times `n`. Raises ApiError (404) or RequestError."""
    check_model(info, model)
    limit = settings.max_samples
    if num_samples > limit:
        message = f"{num_samples} samples asked of one request (prompts times 'n'), at most {limit}: split the request."
        raise RequestError(message, param="n")


def check_model(info: EngineInfo, model: str) -> None:
    """Raises ApiError (404)."""
    if model != info.model:
        message = f"This server does not serve the model {model[:100]!r}: ask for {info.model!r}."
        raise ApiError(404, message, code="model_not_found", param="model")


def check_prompt_tokens(settings: GatewaySettings, num_tokens: int, *, param: str) -> None:
    """Raises RequestError."""
    limit = settings.max_prompt_tokens
    if limit is not None and num_tokens > limit:
        message = f"The prompt has {num_tokens} tokens, at most {limit} here: shorten it by {num_tokens - limit}."
        raise RequestError(message, param=param, code="prompt_too_long")


def check_completion_tokens(settings: GatewaySettings, asked: int) -> None:
    """Raises RequestError."""
    limit = settings.max_completion_tokens
    if limit is not None and asked > limit:
        message = f"The request asks for {asked} tokens, at most {limit} here: ask for fewer."
        raise RequestError(message, param="max_tokens", code="too_many_tokens")


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

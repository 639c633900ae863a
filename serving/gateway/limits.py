"""What is refused before any work is done for a request: another model, too many samples."""

from __future__ import annotations

from serving.engine import EngineInfo
from serving.gateway.config import GatewaySettings
from serving.gateway.errors import ApiError
from speculator.errors import RequestError


def check_limits(info: EngineInfo, settings: GatewaySettings, *, model: str, num_samples: int) -> None:
    """`num_samples` counts prompts times `n`. Raises ApiError (404) or RequestError."""
    if model != info.model:
        message = f"This server does not serve the model {model[:100]!r}: ask for {info.model!r}."
        raise ApiError(404, message, code="model_not_found", param="model")
    limit = settings.max_samples
    if num_samples > limit:
        message = f"{num_samples} samples asked of one request (prompts times 'n'), at most {limit}: split the request."
        raise RequestError(message, param="n")

"""Names that the services of one deployment must agree on."""

from __future__ import annotations

from speculator.checkpoint import model_key

__all__ = ["DEFAULT_REDIS_URL", "DEFAULT_STREAM_MAX_BYTES", "model_key"]

DEFAULT_REDIS_URL = "redis://127.0.0.1:6379/0"
DEFAULT_STREAM_MAX_BYTES = 512 * 1024 * 1024

"""What the services of one deployment must agree on, where nobody says otherwise."""

from __future__ import annotations

DEFAULT_REDIS_URL = "redis://127.0.0.1:6379/0"
DEFAULT_STREAM_MAX_BYTES = 512 * 1024 * 1024

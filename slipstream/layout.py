"""Names that the services of one deployment must agree on."""

from __future__ import annotations

import re
from pathlib import Path

DEFAULT_REDIS_URL = "redis://127.0.0.1:6379/0"
DEFAULT_STREAM_MAX_BYTES = 512 * 1024 * 1024


def model_key(model_dir: Path, target_fingerprint: str) -> str:
    """The name of a target in Redis keys: readable, and different for different weights."""
    name = re.sub(r"[^a-z0-9]+", "-", model_dir.name.lower()).strip("-")
    return f"{name}-{target_fingerprint[:12]}"

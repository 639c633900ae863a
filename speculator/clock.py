"""The clock of what travels between processes and onto disk."""

from __future__ import annotations

import time


def now_ms() -> int:
    """Unix time."""
    return time.time_ns() // 1_000_000

"""Where a machine keeps what can be made again: converted models, compiled kernels, what benchmarks keep."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "SLIPSTREAM_CACHE"


def cache_root() -> Path:
    """The directory, which need not exist; `$SLIPSTREAM_CACHE` moves it. Raises RuntimeError where there is no home."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slipstream"

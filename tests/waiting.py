"""Waiting for something to become true, with a deadline instead of a guess."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path


def wait_until(condition: Callable[[], object], *, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not true within {timeout_s} s"
        time.sleep(0.005)


def url_in(log: Path, *, timeout_s: float = 90.0) -> str:
    """Where a server says in its log that it listens, once it does."""

    def found() -> re.Match[str] | None:
        return re.search(r'"url": "([^"]+)"', log.read_text()) if log.exists() else None

    wait_until(found, timeout_s=timeout_s)
    match = found()
    assert match is not None
    return match[1]

"""A file of API keys for tests, and headers with their secrets."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving.gateway.keys import ApiKey, change_keys, digest


@dataclass
class KeyFile:
    """The secret of the key `name` is `secret-of-name`."""

    path: Path
    keys: dict[str, ApiKey] = field(default_factory=dict)

    def add(self, name: str, **fields: Any) -> dict[str, str]:
        """The headers that the key's owner sends."""
        sha256 = digest(f"secret-of-{name}".encode())
        self.keys[name] = ApiKey(name=name, sha256=sha256, **{"tenant": f"tenant-of-{name}", **fields})
        self._write(self.keys.values())
        return bearer(f"secret-of-{name}")

    def revoke(self, name: str) -> None:
        del self.keys[name]
        self._write(self.keys.values())

    def _write(self, keys: Iterable[ApiKey]) -> None:
        change_keys(self.path, lambda _: keys)


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def an_hour_ago() -> int:
    return int(time.time()) - 3600

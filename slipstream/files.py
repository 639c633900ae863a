"""Files that a command is to write."""

from __future__ import annotations

from pathlib import Path

from speculator.errors import ConfigError


def check_output(path: Path | None) -> None:
    """Raise ConfigError now rather than after the work when `path` cannot be written for want of its folder."""
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(f"{path.parent} does not exist: create it or choose another place for {path.name}")

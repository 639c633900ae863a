"""Several drafts for one target: the base, and lineages that were forked from it. A store says which one it holds.

    drafts/{versions, states, events.jsonl}                              the base
    drafts/lineages/code/{lineage.json, versions, states, events.jsonl}   the lineage `code`

A lineage is a draft store of its own, and its name is part of its keys in Redis: traces, pointer and engines of one are
nothing to another. Whoever is given the store knows the name from it, so that an engine with the drafts of one lineage
never reads the pointer of another. `slipstream draft fork` makes one (speculator/fork.py).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from speculator.errors import ConfigError, StoreError
from speculator.files import sync, write_synced

BASE = "base"
"""How requests and metrics name the draft that the lineages were forked from."""
MAX_LINEAGES = 16
"""Of one base: each has engines, a trainer and a stream of its own."""
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")

_FOLDER, _FILE = "lineages", "lineage.json"


class _Said(msgspec.Struct, frozen=True, kw_only=True):
    """What a lineage's store says of itself; which version it was forked from is in the manifest of its first one."""

    name: Annotated[str, Meta(pattern=rf"^(?:{NAME.pattern})\Z")]
    """It becomes part of Redis keys and of the trainer's path."""


def check_name(name: str) -> None:
    """Raises ConfigError."""
    if not NAME.fullmatch(name) or name == BASE:
        raise ConfigError(
            f"{name!r} is no name for a lineage: use up to 32 of a-z, 0-9 and '-', not '-' at either end, not '{BASE}'"
        )


def below(root: Path, name: str) -> Path:
    """The folder of a lineage below the base's, or that itself where `name` is empty."""
    return root / _FOLDER / name if name else root


def lineages_of(root: Path) -> list[str]:
    """The names of the lineages below a base's store, sorted. Raises StoreError."""
    try:
        return sorted(path.parent.name for path in root.glob(f"{_FOLDER}/*/{_FILE}"))
    except OSError as error:
        raise StoreError(f"cannot use the draft store {root}: check its permissions ({error})") from error


def name_of(root: Path) -> str:
    """Of the lineage whose store this is; empty where it is the base. Raises StoreError where it cannot tell."""
    path = root / _FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Said).name
    except FileNotFoundError:
        return ""
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        # Taken for the base's, its engines would serve the base's traffic and learn from it.
        raise StoreError(f"{path} cannot be read ({error}): restore it, or fork the lineage anew") from error


def write_name(root: Path, name: str) -> None:
    """Make a folder the store of a lineage, at once and durably. Raises StoreError."""
    temporary = root / f".{_FILE}.tmp"
    try:
        root.mkdir(parents=True, exist_ok=True)
        write_synced(temporary, msgspec.json.encode(_Said(name=name)) + b"\n")
        temporary.rename(root / _FILE)
        sync(root)
    except OSError as error:
        raise StoreError(f"cannot write {root}: check its permissions and free space ({error})") from error

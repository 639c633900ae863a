"""The instructions of a Dockerfile, as far as tests ask for them."""

from __future__ import annotations

import json
import re
from pathlib import Path


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, arguments) in order; lines that continue are joined, comments left out, ARG defaults filled in."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found: list[tuple[str, str]] = []
    arguments: dict[str, str] = {}
    for line in filter(None, joined.splitlines()):
        name, _, rest = line.partition(" ")
        if name == "ARG":
            key, _, default = rest.partition("=")
            arguments[key] = default
        rest = re.sub(r"\$\{(\w+)\}", lambda variable: arguments[variable[1]], rest)
        found.append((name, rest))
    return found


def entrypoint(path: Path) -> list[str]:
    """Of the last stage."""
    words: list[str] = json.loads([rest for name, rest in instructions(path) if name == "ENTRYPOINT"][-1])
    return words

"""Compose files as `docker compose` reads them, as far as ours go, and the instructions of Dockerfiles.

Variables are filled in, then files are merged, with `!reset` and `!override`. What this does not know of the
specification it refuses, so that it cannot be wrong in silence.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
GPU = (ROOT / "docker-compose.yml",)
CPU = (*GPU, ROOT / "deploy" / "compose.cpu.yml")
_REPLACED = ("command", "entrypoint", "test")
"""Lists that a later file replaces; others are joined."""
_VARIABLE = re.compile(r"\$(?:\{(?P<name>\w+)(?::(?P<kind>[-?+])(?P<rest>(?:[^{}]|\{[^{}]*\})*))?\}|(?P<other>.))")
_RESET = object()


class _Override:
    def __init__(self, value: Any) -> None:
        self.value = value


class _Loader(yaml.SafeLoader):
    pass


def _override(loader: _Loader, node: yaml.Node) -> _Override:
    if isinstance(node, yaml.SequenceNode):
        return _Override(loader.construct_sequence(node, deep=True))
    assert isinstance(node, yaml.MappingNode)
    return _Override(loader.construct_mapping(node, deep=True))


_Loader.add_constructor("!reset", lambda loader, node: _RESET)
_Loader.add_constructor("!override", _override)


def load(files: Sequence[Path], environment: Mapping[str, str]) -> dict[str, Any]:
    """The merged document with all variables filled in; raises ValueError for a required variable that is not set."""
    merged: dict[str, Any] = {}
    for path in files:
        document = yaml.load(path.read_text(), _Loader)  # noqa: S506 - a SafeLoader
        merged = _merge(merged, _interpolate(document, environment))
    return {name: part for name, part in merged.items() if not name.startswith("x-")}


def argv(value: str | list[str] | None) -> list[str]:
    """A command or an entrypoint as a list: texts are split as a shell would."""
    return shlex.split(value) if isinstance(value, str) else list(value or [])


def variables(path: Path) -> dict[str, str]:
    """The assignments of an env file, and those that are commented out where there is no other."""
    found = re.findall(r"^(#?)(\w+)=(.*)$", path.read_text(), re.M)
    return {name: value for _, name, value in sorted(found, key=lambda each: each[0], reverse=True)}


def _interpolate(value: Any, environment: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return _VARIABLE.sub(lambda found: _filled(found, environment), value)
    if isinstance(value, dict):
        return {key: _interpolate(part, environment) for key, part in value.items()}
    if isinstance(value, list):
        return [_interpolate(part, environment) for part in value]
    if isinstance(value, _Override):
        return _Override(_interpolate(value.value, environment))
    return value


def _filled(found: re.Match[str], environment: Mapping[str, str]) -> str:
    if found["other"] is not None:
        if found["other"] == "$":
            return "$"
        raise NotImplementedError(f"{found[0]!r}: write variables as ${{NAME}}")
    value = environment.get(found["name"], "")
    if found["kind"] == "+":
        return str(_interpolate(found["rest"], environment)) if value else ""
    if value:
        return value
    if found["kind"] == "?":
        raise ValueError(f"{found['name']} is not set: {found['rest']}")
    return str(_interpolate(found["rest"], environment)) if found["kind"] == "-" else ""


def _merge(base: dict[str, Any], added: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in added.items():
        if value is _RESET:
            merged.pop(name, None)
        elif isinstance(value, _Override):
            merged[name] = value.value
        elif name not in merged or name in _REPLACED:
            merged[name] = value
        elif isinstance(value, dict) and isinstance(merged[name], dict):
            merged[name] = _merge(merged[name], value)
        elif isinstance(value, list) or isinstance(merged[name], list | dict):
            raise NotImplementedError(
                f"{name} is in two files: say !override, so that nobody has to know how it merges"
            )
        else:
            merged[name] = value
    return merged


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, arguments) of a Dockerfile; lines that continue are joined, ARG defaults filled in."""
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
    """Of a Dockerfile's last stage."""
    words: list[str] = json.loads([rest for name, rest in instructions(path) if name == "ENTRYPOINT"][-1])
    return words

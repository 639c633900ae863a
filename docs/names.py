"""Find flags, settings and metrics in a page that do not exist."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import yaml

from docs.tables import describe
from slipstream.cli.main import app
from slipstream.settings import commands, known_variables

ROOT = Path(__file__).resolve().parents[1]
_CODE = re.compile(r"```.*?```|~~~.*?~~~|<code>.*?</code>|`[^`\n]+`", re.DOTALL)
_REFERENCE = re.compile(r"\]\[([^\]\n]+)\]")
_OLD_COMMAND = re.compile(r"^Command: (?:(?!\n\n).)*?\(at\scommit\s`\w+`\)", re.DOTALL | re.MULTILINE)
"""On a results page: the command has what it names at its commit."""
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")
_VARIABLE = re.compile(r"\bSLIPSTREAM_[A-Z0-9_]*[A-Z0-9](?:_?\*|_(?!\w)|\b)")
_METRIC = re.compile(r"(?<![\w/.-])slipstream[_:][a-z0-9_:]*[a-z0-9](?:_?\*|(?![\w*:-]))")

FLAGS_OF_OTHERS = {
    program: flags.split() for program, flags in tomllib.loads((ROOT / "docs/flags_of_others.toml").read_text()).items()
}
"""Flags of other programs that the pages name."""


def unknown_names(text: str) -> list[str]:
    """Unknown names in a page's Markdown, in order, each once: flags in code, settings and metrics, of which a trailing
    `*` leaves the rest open, and labels of links.
    """
    return list(dict.fromkeys(_unknown(text)))


def _unknown(text: str) -> Iterator[str]:
    known = known_names()
    text = _OLD_COMMAND.sub("", text)
    for code in _CODE.findall(text):
        yield from (flag for flag in _FLAG.findall(code) if flag not in known)
    for pattern in (_VARIABLE, _METRIC):
        yield from (name for name in pattern.findall(text) if not _is_known(name, known))
    labels = _REFERENCE.findall(_CODE.sub("", text))
    yield from (label for label in labels if f"\n[{label}]:" not in text)


def _is_known(name: str, known: frozenset[str]) -> bool:
    if name.endswith(("*", "_")):
        return any(one.startswith(name.rstrip("*")) for one in known)
    return name in known


@cache
def known_names() -> frozenset[str]:
    """All flags, settings and metrics that a page may name."""
    flags = {name for _, command in commands(app) for option in command.params for name in option.opts}
    flags |= {name for _, command in commands(app) for option in command.params for name in option.secondary_opts}
    for folder in ("benchmarks", "deploy", "examples", "tests/containers"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".sh"):
                flags.update(re.findall(r"""["' (](--[a-z][a-z0-9-]+)""", path.read_text()))
    flags.update({"--version"}, *FLAGS_OF_OTHERS.values())
    files = (ROOT / ".env.example", ROOT / "docker-compose.yml")
    variables = {name for file in files for name in _VARIABLE.findall(file.read_text())}
    families = {metric.name for metric in describe()}
    return frozenset(flags | variables | families | known_variables(app) | known_metrics())


@cache
def known_metrics() -> frozenset[str]:
    """Names of our metrics and recording rules, as in a query."""
    endings = {"histogram": ("_bucket", "_sum", "_count")}
    collected = {metric.name + ending for metric in describe() for ending in endings.get(metric.kind, ("",))}
    files = (ROOT / "deploy" / "prometheus" / "rules").glob("*.yml")
    rules = [rule for file in files for group in yaml.safe_load(file.read_text())["groups"] for rule in group["rules"]]
    return frozenset(collected | {rule["record"] for rule in rules if "record" in rule})

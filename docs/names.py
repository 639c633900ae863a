"""Find flags, settings, metrics and links in a page that do not exist."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import yaml

from docs.tables import describe
from slipstream.cli.main import app
from slipstream.settings import commands, known_variables

ROOT = Path(__file__).resolve().parents[1]
_CODE = re.compile(r"```.*?```|~~~.*?~~~|<code>.*?</code>|`[^`\n]+`", re.DOTALL)
_OLD_COMMAND = re.compile(r"^Command: (?:(?!\n\n).)*?\(at\scommit\s`\w+`\)", re.DOTALL | re.MULTILINE)
"""On a results page: the command has what it names at its commit."""
_COMMAND = re.compile(r"\bslipstream ([a-z][^`|;&#\n]*)")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9*]")
_VARIABLE = re.compile(r"\bSLIPSTREAM_[A-Z0-9_]*\*?")
_UNPREFIXED = re.compile(r"(?<![\w$.{])(?!SLIPSTREAM_)[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+_?(?=[`=])")
"""Only at the end of code or before a value: other capitals are constants of a program."""
_METRIC = re.compile(r"(?<![\w/.-])slipstream[_:][a-z0-9_:]*\*?(?![\w-])")
_SGLANG_METRIC = re.compile(r"(?<![\w/.-])sglang:[a-z][a-z0-9_]*")
_REFERENCE = re.compile(r"\[([^\[\]]+)\]\[([^\[\]]*)\]")
_DEFINITION = re.compile(r"^ *\[([^\]]+)\]:", re.MULTILINE)
_OPEN = ("*", "_", ":")
"""What a prefix of names ends in."""

FLAGS_OF_OTHERS = {
    program: flags.split() for program, flags in tomllib.loads((ROOT / "docs/flags_of_others.toml").read_text()).items()
}
"""Flags of other programs that the pages name."""


VARIABLES_OF_OTHERS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG")
"""Variables that only libraries read."""


def unknown_names(text: str) -> list[str]:
    """Names and labels of links in a page's Markdown that nothing has, in order, each once.

    A flag behind `slipstream VERB` must be one of that command, and is named with it.
    """
    return list(dict.fromkeys(_unknown(_OLD_COMMAND.sub("", text).replace("\\\n", " "))))


def _unknown(text: str) -> Iterator[str]:
    known = known_names()
    for pattern in (_FLAG, _VARIABLE, _UNPREFIXED, _METRIC, _SGLANG_METRIC):
        yield from (name for name in pattern.findall(text) if name not in known and not _begins(name, known))
    for line in _COMMAND.findall(text):
        words = line.partition(" -- ")[0].split()
        verb = next((verb for n in (2, 1) if (verb := " ".join(words[:n])) in _flags()), "")
        flags = _FLAG.findall(" ".join(words)) if verb else []
        yield from (f"slipstream {verb} {flag}" for flag in flags if flag not in _flags()[verb])
    prose = _CODE.sub("", text)
    defined = {label.lower() for label in _DEFINITION.findall(prose)}
    labels = (label or shown for shown, label in _REFERENCE.findall(prose))
    yield from (label for label in labels if label.lower() not in defined)


def _begins(name: str, known: Iterable[str]) -> bool:
    """Whether a name that is written as a prefix is one."""
    return name.endswith(_OPEN) and any(each.startswith(name.rstrip("*:")) for each in known)


@cache
def _flags() -> dict[str, set[str]]:
    """Verbs of `slipstream` → their flags."""
    return {
        name.removeprefix("slipstream "): {
            "--help",
            *(flag for option in command.params for flag in (*option.opts, *option.secondary_opts)),
        }
        for name, command in commands(app)
    }


@cache
def known_names() -> frozenset[str]:
    """All flags, settings and metrics that a page may name."""
    flags = {"--version"}.union(*_flags().values(), *FLAGS_OF_OTHERS.values())
    for folder in ("benchmarks", "deploy", "examples", "tests/containers"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".sh"):
                flags.update(re.findall(r"""["' (](--[a-z][a-z0-9-]+)""", path.read_text()))
    files = (ROOT / ".env.example", ROOT / "docker-compose.yml")
    variables = {name for file in files for name in _VARIABLE.findall(file.read_text())} | known_variables(app)
    # A table may leave out the prefix that all of its settings have.
    variables |= {re.sub("^SLIPSTREAM_((GATEWAY|TRAINER)_)?", "", name) for name in variables}
    families = {metric.name for metric in describe()}
    boards = {name for path in (ROOT / "deploy").rglob("*.json") for name in _SGLANG_METRIC.findall(path.read_text())}
    return frozenset({*flags, *variables, *families, *boards, *_capitals(), *known_metrics(), *VARIABLES_OF_OTHERS})


def _capitals() -> Iterator[str]:
    """Variables and constants of the code and the deployments."""
    folders = ("deploy", "examples", "serving", "slipstream", "speculator", "tests/examples", "trainer")
    found = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    for path in (ROOT / ".env.example", ROOT / "docker-compose.yml", *found):
        if path.suffix in (".py", ".sh", ".yml", ".yaml", ".env", ".example", ".Dockerfile"):
            yield from re.findall(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+_?", path.read_text())


@cache
def known_metrics() -> frozenset[str]:
    """Names of our metrics and recording rules, as in a query."""
    endings = {"histogram": ("_bucket", "_sum", "_count")}
    collected = {metric.name + ending for metric in describe() for ending in endings.get(metric.kind, ("",))}
    files = (ROOT / "deploy" / "prometheus" / "rules").glob("*.yml")
    rules = [rule for file in files for group in yaml.safe_load(file.read_text())["groups"] for rule in group["rules"]]
    return frozenset(collected | {rule["record"] for rule in rules if "record" in rule})

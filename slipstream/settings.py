"""Every environment variable that Slipstream reads, taken from the classes and options that read it.

The page docs/configuration.md and `slipstream doctor` are made from this, so neither can know fewer or others.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from pydantic import SecretStr
from pydantic_settings import BaseSettings

PREFIX = "SLIPSTREAM_"
_KUBERNETES_SERVICE = "_SERVICE_HOST"
_MIB = 1024 * 1024
_KINDS = {int: "integer", float: "number", str: "text", bool: "1 or 0", Path: "path", SecretStr: "text, a secret"}
_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One variable; everything as text for a reader."""

    variable: str
    kind: str
    default: str
    meaning: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """The settings of one service; `class_name` is where they are defined, where that is a class of their own."""

    title: str
    class_name: str
    settings: tuple[Setting, ...]


@cache
def groups() -> tuple[Group, ...]:
    """All settings that are classes of their own, service by service."""
    from serving.gateway.config import GatewaySettings
    from serving.sglang.settings import PluginSettings
    from slipstream.logs import LogSettings
    from trainer.config import TrainerConfig

    enabled = Setting(variable="SLIPSTREAM_ENABLED", kind="1 or 0", default="0", meaning="Turns the plugin on.")
    plugin = (enabled, *_of_dataclass(PluginSettings, PREFIX))
    return (
        Group(title="Every command", class_name="", settings=_everywhere()),
        _group("Logs, of every service", LogSettings),
        _group("Gateway: `slipstream serve` and `slipstream gateway`", GatewaySettings),
        _group("Trainer: `slipstream train` and `slipstream replay`", TrainerConfig),
        Group(title="Plugin: the SGLang server", class_name=_name(PluginSettings), settings=plugin),
    )


def _everywhere() -> tuple[Setting, ...]:
    from speculator.cache import CACHE_VARIABLE
    from speculator.redis_client import PASSWORD_FILE_VARIABLE
    from speculator.spans import VARIABLE as SPANS_VARIABLE

    rows = (
        (
            CACHE_VARIABLE,
            "path",
            "~/.cache/slipstream",
            "Converted models, compiled kernels, and what benchmarks keep.",
        ),
        ("SLIPSTREAM_REDIS_URL", "text", "–", "Stands for `--redis-url`; read by the plugin, too."),
        (PASSWORD_FILE_VARIABLE, "path", "–", "The password for the user that the URL names, in a file."),
        ("SLIPSTREAM_STORE", "path", "–", "Stands for `--store`; read by the plugin, too."),
        (SPANS_VARIABLE, "1 or 0", "0", "Sends OpenTelemetry spans: see operations.md."),
    )
    return tuple(Setting(variable=name, kind=kind, default=default, meaning=text) for name, kind, default, text in rows)


def known_variables(app: typer.Typer) -> frozenset[str]:
    """The names of all variables, those that stand for an option of a command of `app` included."""
    of_classes = {setting.variable for group in groups() for setting in group.settings}
    of_options = {name for _, command in commands(app) for option in command.params for name in variables(option)}
    return frozenset({*of_classes, *of_options})


def unknown_variables(environment: Mapping[str, str], known: Iterable[str]) -> dict[str, str | None]:
    """Variables with our prefix that nothing reads, each with the known name that looks most like it."""
    known = set(known)
    services = [name.removesuffix(_KUBERNETES_SERVICE) for name in environment if name.endswith(_KUBERNETES_SERVICE)]
    # Kubernetes says so where each service of its namespace is.
    theirs = tuple(f"{service}_{kind}" for service in services for kind in ("SERVICE_", "PORT"))
    ours = (name for name in environment if name.startswith(PREFIX) and not name.startswith(theirs))
    found = sorted(name for name in ours if name not in known)
    return {name: next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.8)), None) for name in found}


def commands(app: typer.Typer) -> Iterator[tuple[str, Any]]:
    """Every command as it is typed, and typer's object of it."""
    yield from _commands(typer.main.get_command(app), "slipstream")


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    if subcommands := getattr(command, "commands", None):
        for sub_name, sub in subcommands.items():
            yield from _commands(sub, f"{name} {sub_name}")
        return
    yield name, command


def variables(option: Any) -> list[str]:
    """The environment variables that stand for an option."""
    names = option.envvar or []
    return [names] if isinstance(names, str) else list(names)


def _name(owner: type) -> str:
    return f"{owner.__module__}.{owner.__name__}"


def _group(title: str, owner: type[BaseSettings]) -> Group:
    return Group(title=title, class_name=_name(owner), settings=tuple(_of_pydantic(owner)))


def _of_pydantic(owner: type[BaseSettings]) -> Iterator[Setting]:
    """Fields without a default are left out: a command gives them, its options say how."""
    prefix, meanings = owner.model_config["env_prefix"], _docstrings(owner)
    for name, field in owner.model_fields.items():
        if not field.is_required():
            bounds = [
                f"{sign} {_default(name, bound)}"
                for rule in field.metadata
                for attribute, sign in _SIGNS.items()
                if (bound := getattr(rule, attribute, None)) is not None
            ]
            yield Setting(
                variable=prefix + name.upper(),
                kind=", ".join([_kind(field.annotation), *bounds]),
                default=_default(name, field.default),
                meaning=meanings.get(name, ""),
            )


def _of_dataclass(owner: type[Any], prefix: str) -> Iterator[Setting]:
    kinds, meanings = get_type_hints(owner), _docstrings(owner)
    for field in dataclasses.fields(owner):
        yield Setting(
            variable=prefix + field.name.upper(),
            kind=_kind(kinds[field.name]),
            default=_default(field.name, field.default),
            meaning=meanings.get(field.name, ""),
        )


def _docstrings(owner: type) -> dict[str, str]:
    """The string below each field: Python does not keep it, its source does."""
    body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in zip(body.body, body.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def _kind(annotation: Any) -> str:
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(_kind(part) for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{choice}`" for choice in get_args(annotation))
    return _KINDS[annotation]


def _default(name: str, value: Any) -> str:
    if value is None or value == "":
        return "–"
    if name.endswith("_bytes") and value and value % _MIB == 0:
        return f"{value // _MIB} MiB"
    return f"{int(value)}" if isinstance(value, bool) else f"{value}"

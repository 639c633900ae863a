"""Every environment variable that Slipstream reads, taken from the classes and options that read it.

The page docs/configuration.md and `slipstream doctor` are made from this, so neither can know fewer or others.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import typer
from pydantic_settings import BaseSettings

PREFIX = "SLIPSTREAM_"
DEFAULT_REDIS_URL = "redis://127.0.0.1:6379/0"
DEFAULT_STREAM_MAX_BYTES = 512 * 1024 * 1024
"""What the services of one deployment must agree on, where nobody says otherwise."""

COMPOSE_VARIABLES = frozenset(
    f"{PREFIX}{name}"
    for name in (
        *("MODEL", "MODEL_NAME", "MODELS", "CAPTURE", "DEPTH", "SGLANG_GPU", "SGLANG_MEMORY", "SGLANG_ARGS"),
        *("TRAINER_GPU", "REDIS_MEMORY", "PORT", "PROMETHEUS_PORT", "GRAFANA_PORT", "METRICS_KEPT"),
        *("TRACE_TTL_HOURS", "CAPTURE_FILTER", "CAPTURE_FLOOR", "DROP_PERSONAL_DATA"),
    )
)
"""Of .env.example: docker compose reads these, and `slipstream` some of them."""

_KUBERNETES_SERVICE = "_SERVICE_HOST"
_MIB = 1024 * 1024
_KINDS = {"integer": "integer", "number": "number", "string": "text", "boolean": "1 or 0"}
_FORMATS = {"path": "path", "password": "text, a secret"}
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
"""Words of JSON Schema, and what the page says for them."""


class Setting(NamedTuple):
    """One variable; everything as text for a reader."""

    variable: str
    kind: str
    default: str
    meaning: str


@cache
def groups() -> dict[str, tuple[Setting, ...]]:
    """All settings that are more than an option of one command, by the service that reads them."""
    from serving.gateway.config import GatewaySettings
    from serving.sglang.settings import PluginSettings
    from slipstream.logs import LogSettings
    from speculator.host import CACHE_VARIABLE
    from speculator.redis.client import PASSWORD_FILE_VARIABLE
    from speculator.tracing import VARIABLE as SPANS_VARIABLE
    from trainer.config import TrainerConfig

    everywhere = (
        Setting(CACHE_VARIABLE, "path", "~/.cache/slipstream", "Converted models, compiled kernels, benchmark data."),
        Setting("SLIPSTREAM_REDIS_URL", "text", "–", "Stands for `--redis-url`; read by the plugin, too."),
        Setting(PASSWORD_FILE_VARIABLE, "path", "–", "The password for the user that the URL names, in a file."),
        Setting("SLIPSTREAM_STORE", "path", "–", "Stands for `--store`; read by the plugin, too."),
        Setting(SPANS_VARIABLE, "1 or 0", "0", "Sends OpenTelemetry spans: see operations.md."),
    )
    enabled = Setting("SLIPSTREAM_ENABLED", "1 or 0", "0", "Turns the plugin on.")
    return {
        "Every command": everywhere,
        "Logs, of every service": _settings(LogSettings),
        "Gateway: `slipstream serve` and `slipstream gateway`": _settings(GatewaySettings),
        "Trainer: `slipstream train` and `slipstream replay`": _settings(TrainerConfig),
        "Plugin: the SGLang server": (enabled, *_settings(PluginSettings)),
    }


def known_variables(app: typer.Typer) -> frozenset[str]:
    """The names of all variables, those that stand for an option of a command of `app` included."""
    of_classes = {setting.variable for settings in groups().values() for setting in settings}
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


def _settings(owner: type[BaseSettings]) -> tuple[Setting, ...]:
    """The variables of a settings class. Fields without a default are left out: the options of a command give them."""
    prefix, schema = owner.model_config["env_prefix"], owner.model_json_schema()
    return tuple(
        Setting(
            prefix + name.upper(),
            _kind(name, field),
            _value(name, field["default"]),
            " ".join(field.get("description", "").split()),
        )
        for name, field in schema["properties"].items()
        if name not in schema.get("required", ())
    )


def _kind(name: str, schema: Mapping[str, Any]) -> str:
    """What a value may be, from the JSON schema of its field; that a value may be missing is left out."""
    [schema] = [part for part in schema.get("anyOf", [schema]) if part.get("type") != "null"]
    if "enum" in schema:
        return " or ".join(f"`{choice}`" for choice in schema["enum"])
    kind = _FORMATS.get(schema.get("format", ""), _KINDS[schema["type"]])
    return ", ".join([kind, *(f"{sign} {_value(name, schema[key])}" for key, sign in _BOUNDS.items() if key in schema)])


def _value(name: str, value: Any) -> str:
    if value is None or value == "":
        return "–"
    if name.endswith("_bytes") and value and value % _MIB == 0:
        return f"{value // _MIB} MiB"
    return f"{int(value)}" if isinstance(value, bool) else f"{value}"

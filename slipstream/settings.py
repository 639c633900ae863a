"""List every environment variable that Slipstream reads, from the settings classes and command options that read it.

docs/reference/configuration.md and `slipstream doctor` are made from this list, so they are always complete.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import typer
from pydantic_settings import BaseSettings

from speculator.host import PREFIX

DEFAULT_REDIS_URL = "redis://127.0.0.1:6379/0"
"""Default of every service's --redis-url; all services of a deployment need the same."""

COMPOSE_VARIABLES = frozenset(
    f"{PREFIX}{name}"
    for name in (
        *("MODEL", "MODEL_NAME", "MODELS", "CAPTURE", "DEPTH", "SGLANG_GPU", "SGLANG_MEMORY", "SGLANG_ARGS"),
        *("TRAINER_GPU", "REDIS_MEMORY", "STREAM_MAX_BYTES", "PORT", "PROMETHEUS_PORT", "GRAFANA_PORT", "METRICS_KEPT"),
        *("TRACE_TTL_HOURS", "CAPTURE_FILTER", "CAPTURE_FLOOR", "BRANCH_SHARE", "DROP_PERSONAL_DATA"),
    )
)
"""Variables of .env.example: docker compose reads all of them, `slipstream` some."""

_KUBERNETES_SERVICE = "_SERVICE_HOST"


def settings_classes() -> dict[str, type[BaseSettings]]:
    """Settings classes by the services that read them."""
    from serving.gateway.config import GatewaySettings
    from serving.sglang.settings import PluginSettings
    from slipstream.logs import LogSettings
    from trainer.config import TrainerConfig

    return {
        "Logs, of every service": LogSettings,
        "Gateway: `slipstream serve` and `slipstream gateway`": GatewaySettings,
        "Trainer: `slipstream train` and `slipstream replay`": TrainerConfig,
        "Plugin: the SGLang server": PluginSettings,
    }


def other_variables() -> dict[str, tuple[str, str, str]]:
    """Variables that no settings class has: name → (type, default, meaning)."""
    from speculator.host import CACHE_VARIABLE
    from speculator.redis.client import PASSWORD_FILE_VARIABLE
    from speculator.tracing import VARIABLE as SPANS_VARIABLE

    return {
        CACHE_VARIABLE: (
            "path",
            "~/.cache/slipstream, or in `XDG_CACHE_HOME`",
            "Folder of converted models, compiled kernels, benchmark data.",
        ),
        "SLIPSTREAM_REDIS_URL": ("text", "–", "Same as `--redis-url`."),
        PASSWORD_FILE_VARIABLE: ("path", "–", "File with the password of the user in the Redis URL."),
        "SLIPSTREAM_STORE": ("path", "–", "Same as `--store`."),
        SPANS_VARIABLE: ("1 or 0", "0", "1 sends OpenTelemetry spans (docs/how-to/monitor.md)."),
        "SLIPSTREAM_ENABLED": ("1 or 0", "0", "1 turns the plugin on."),
    }


def known_variables(app: typer.Typer) -> frozenset[str]:
    """Names of all variables, including those that set an option of a command of `app`."""
    of_classes = {name for owner in settings_classes().values() for name in variables_of(owner)}
    of_options = {name for _, command in commands(app) for option in command.params for name in variables(option)}
    return frozenset({*of_classes, *of_options, *other_variables()})


def variables_of(owner: type[BaseSettings]) -> dict[str, str]:
    """Variable → field of a settings class. Fields without a default are left out: command options set them."""
    prefix = owner.model_config["env_prefix"]
    return {
        str(field.validation_alias or f"{prefix}{name.upper()}"): name
        for name, field in owner.model_fields.items()
        if not field.is_required()
    }


def unknown_variables(environment: Mapping[str, str], known: Iterable[str]) -> dict[str, str | None]:
    """Variables with our prefix that nothing reads, each with the most similar known name or None."""
    known = set(known)
    services = [name.removesuffix(_KUBERNETES_SERVICE) for name in environment if name.endswith(_KUBERNETES_SERVICE)]
    # Kubernetes sets such variables for each service of the namespace.
    theirs = tuple(f"{service}_{kind}" for service in services for kind in ("SERVICE_", "PORT"))
    ours = (name for name in environment if name.startswith(PREFIX) and not name.startswith(theirs))
    found = sorted(name for name in ours if name not in known)
    return {name: next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.8)), None) for name in found}


def commands(app: typer.Typer) -> Iterator[tuple[str, Any]]:
    """Every command as typed, with its typer object."""
    yield from _commands(typer.main.get_command(app), "slipstream")


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    if subcommands := getattr(command, "commands", None):
        for sub_name, sub in subcommands.items():
            yield from _commands(sub, f"{name} {sub_name}")
        return
    yield name, command


def variables(option: Any) -> list[str]:
    """The environment variables that set an option."""
    names = option.envvar or []
    return [names] if isinstance(names, str) else list(names)

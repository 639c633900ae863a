"""Refuse, or warn of, options and variables that have no effect in the given combination, when a command starts.

A `Rule` says what an option needs. A typed option without that is refused. A variable may be meant for another service
of the same environment, so it causes only a warning; so do rules with `is_refused=False`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog
import typer
from pydantic_settings import BaseSettings

from speculator.errors import ConfigError

log = structlog.get_logger(__name__)

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Rule:
    """Options `names` have an effect only where `needs` holds; else the message is an option's name and `otherwise`."""

    names: tuple[str, ...]
    needs: Callable[[Values], Any]
    otherwise: str
    is_refused: bool = True


def _local(values: Values) -> bool:
    return bool(values["engine"] == "local")


def _sglang(values: Values) -> bool:
    return not _local(values)


def _set(name: str) -> Callable[[Values], Any]:
    return lambda values: values[name]


def _never(_: Values) -> bool:
    return False


_CAPTURE = Rule(
    (
        *("capture_floor", "capture_filter", "stream_max_bytes", "context_window", "branch_share"),
        "capture_bytes_per_s",
    ),
    _set("capture"),
    "has no effect without --capture",
    is_refused=False,
)
_SHARING = Rule(
    ("share_groups",), _set("suffix_depth"), "shares text for suffix drafts: set --suffix-depth to 1 or more"
)
_NO_ROUND_DRAFTS = "has no effect with --depth 0, which drafts nothing"
SERVE = (
    Rule(("slots",), _local, "is for --engine local: pass --max-running-requests after --"),
    Rule(("context_length",), _local, "is for --engine local: pass --context-length after --"),
    Rule(("threads", "head_off_share"), _local, "is for --engine local: leave it out"),
    Rule(("sglang_python", "capture_bytes_per_s", "start_timeout_s"), _sglang, "is for --engine sglang: leave it out"),
    Rule(("data_dir",), _set("learn"), "is for --learn: pass that too, or leave it out"),
    _SHARING,
    Rule(("suffix_depth",), lambda values: values["depth"] or not values["suffix_depth"], _NO_ROUND_DRAFTS, False),
    Rule(("control_share", "plain_share", "head_off_share"), _set("depth"), _NO_ROUND_DRAFTS, is_refused=False),
    _CAPTURE,
)
SGLANG = (
    _SHARING,
    _CAPTURE,
    Rule(("gpu",), _set("trainer_gpu"), "is compared with --trainer-gpu: pass that too", is_refused=False),
)
GATEWAY = (
    Rule(
        ("engine_id",),
        lambda values: not values["pool"],
        "names one SGLang, and --pool takes every engine that reports: leave --engine-id out",
    ),
)
DRAFT_INIT = (Rule(("if_missing",), _set("store"), "is for --store: leave it out"),)
REPLAY = (
    Rule(
        ("loss",),
        lambda values: values["steps"] != 0,
        "has no effect with --steps 0, which learns nothing: leave it out",
    ),
)
PRUNE = (Rule(("redis_url",), _set("model"), "is for pruning a stream: pass --model, too"),)
DOCTOR = (Rule(("sglang_python",), _sglang, "is for --engine sglang: leave it out"),)

_KEYS = Rule(
    ("max_key_share",),
    lambda values: values["keys_file"] or values["api_key"],
    "has no effect without keys",
    is_refused=False,
)
GATEWAY_OF_LOCAL = (_KEYS,)
GATEWAY_IN_FRONT = (
    Rule(
        ("default_max_tokens", "max_prompt_tokens"),
        _never,
        "is for --engine local, SGLang has its own limits: unset it",
    ),
    _KEYS,
)
TRAIN = (
    Rule(
        ("metrics_host",),
        lambda values: values["metrics_port"] is not None,
        "has no effect without --metrics-port",
        is_refused=False,
    ),
    Rule(
        ("golden", "golden_epsilon", "golden_patience_s"),
        _set("golden_traces"),
        "has no effect where SLIPSTREAM_TRAINER_GOLDEN_TRACES is 0",
        is_refused=False,
    ),
    Rule(
        ("golden_patience_s",),
        lambda values: values["golden"] is None,
        "has no effect on a recording, which SLIPSTREAM_TRAINER_GOLDEN names",
        is_refused=False,
    ),
)


def check_options(context: typer.Context, rules: Iterable[Rule]) -> None:
    """Apply rules to a command's options. Raises ConfigError for a typed option that has no effect."""
    typed, other = {}, {}
    for option in context.command.params:
        name, source = option.name or "", context.get_parameter_source(option.name or "")
        if source is not None and source.name in ("COMMANDLINE", "DEFAULT_MAP"):
            # DEFAULT_MAP: set by the `--config` file.
            typed[name] = option.opts[0]
        elif source is not None and source.name == "ENVIRONMENT" and context.params[name] != option.default:
            other[name] = f"{option.envvar}"
    for rule in rules:
        _apply(rule, context.params, typed, is_refused=rule.is_refused)
        _apply(rule, context.params, other, is_refused=False)


def check_variables(settings: BaseSettings, rules: Iterable[Rule]) -> None:
    """Apply rules to settings from the environment. Raises ConfigError for a variable that has no effect."""
    prefix = settings.model_config["env_prefix"]
    given = {name: f"{prefix}{name.upper()}" for name in settings.model_fields_set}
    for rule in rules:
        _apply(rule, settings.model_dump(), given, is_refused=rule.is_refused)


def _apply(rule: Rule, values: Values, given: Mapping[str, str], *, is_refused: bool) -> None:
    named = [given[name] for name in rule.names if name in given]
    if not named or rule.needs(values):
        return
    if is_refused:
        raise ConfigError(f"{', '.join(named)} {rule.otherwise}")
    for name in named:
        log.warning("a setting has no effect", setting=name, reason=f"{name} {rule.otherwise}")


def warn_of_unread_variables() -> None:
    """Warn of variables with our prefix that nothing reads: most often a known one is misspelt."""
    # Imported here: `main` imports this module.
    from slipstream.cli.main import app
    from slipstream.settings import COMPOSE_VARIABLES, known_variables, unknown_variables

    for name, nearest in unknown_variables(os.environ, known_variables(app) | COMPOSE_VARIABLES).items():
        log.warning("nothing reads this variable", variable=name, nearest=nearest)

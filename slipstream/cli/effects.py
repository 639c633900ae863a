"""Options and variables that have no effect where they are given: each one says so when a command starts.

A rule names what they need. What somebody typed for another case is refused. A variable may be set for another service
of the same environment, and what is needed may be switched on later: then a warning is enough.
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

_WITHOUT_EFFECT = "a setting has no effect here"
_NO_ROUND_DRAFTS = "has no effect where no round drafts: --depth is 0"
log = structlog.get_logger(__name__)
Values = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """`otherwise` follows the name of a setting in the message where `needs` does not hold."""

    names: tuple[str, ...]
    needs: Callable[[Values], Any]
    otherwise: str
    is_refused: bool = True


def _local(values: Values) -> bool:
    return bool(values["engine"] == "local")


def _sglang(values: Values) -> bool:
    return not _local(values)


_CAPTURE = Rule(
    names=("capture_floor", "capture_filter", "stream_max_bytes", "context_window", "capture_bytes_per_s"),
    needs=lambda values: values["capture"],
    otherwise="has no effect without --capture",
    is_refused=False,
)
SERVE = (
    Rule(names=("slots",), needs=_local, otherwise="is for --engine local: pass --max-running-requests after --"),
    Rule(names=("context_length",), needs=_local, otherwise="is for --engine local: pass --context-length after --"),
    Rule(
        names=("threads", "suffix_depth", "share_groups", "head_off_share"),
        needs=_local,
        otherwise="is for --engine local: leave it out",
    ),
    Rule(
        names=("sglang_python", "capture_bytes_per_s", "start_timeout_s"),
        needs=_sglang,
        otherwise="is for --engine sglang: leave it out",
    ),
    Rule(
        names=("share_groups",),
        needs=lambda values: values["suffix_depth"],
        otherwise="shares text for suffix drafts: set --suffix-depth to 1 or more",
    ),
    Rule(
        names=("head_off_share",),
        needs=lambda values: values["depth"],
        otherwise="has no effect where the draft head is never asked: --depth is 0",
        is_refused=False,
    ),
    Rule(
        names=("suffix_depth",),
        needs=lambda values: values["depth"] or not values["suffix_depth"],
        otherwise=_NO_ROUND_DRAFTS,
        is_refused=False,
    ),
    Rule(names=("control_share",), needs=lambda values: values["depth"], otherwise=_NO_ROUND_DRAFTS, is_refused=False),
    _CAPTURE,
)
SGLANG = (_CAPTURE,)
GATEWAY = (
    Rule(
        names=("engine_id",),
        needs=lambda values: not values["pool"],
        otherwise="is of one SGLang, and --pool takes every engine that reports: leave --engine-id out",
    ),
)
DRAFT_INIT = (
    Rule(names=("if_missing",), needs=lambda values: values["store"], otherwise="is for --store: leave it out"),
)
REPLAY = (
    Rule(
        names=("loss",),
        needs=lambda values: values["steps"] != 0,
        otherwise="has no effect with --steps 0, which learns nothing: leave it out",
    ),
)
PRUNE = (
    Rule(
        names=("redis_url",),
        needs=lambda values: values["model"],
        otherwise="is of a stream: pass --model, whose it is",
    ),
)
DOCTOR = (Rule(names=("sglang_python",), needs=_sglang, otherwise="is for --engine sglang: leave it out"),)
_KEYS = Rule(
    names=("max_key_share",),
    needs=lambda values: values["keys_file"],
    otherwise="has no effect without keys",
    is_refused=False,
)
GATEWAY_OF_LOCAL = (_KEYS,)
GATEWAY_IN_FRONT = (
    Rule(
        names=("default_max_tokens", "max_prompt_tokens", "targets_dir"),
        needs=lambda _: False,
        otherwise="is for --engine local, SGLang has its own way: unset it",
    ),
    Rule(
        names=(
            "rollout_slots_share",
            "rollout_chunk_tokens",
            "rollout_max_samples",
            "rollout_max_tokens",
            "rollout_grace_s",
            "rollout_keep_s",
        ),
        needs=lambda _: False,
        otherwise="is for --engine local, which alone has rollouts: unset it",
    ),
    _KEYS,
)
TRAIN = (
    Rule(
        names=("metrics_host",),
        needs=lambda values: values["metrics_port"] is not None,
        otherwise="has no effect without --metrics-port",
        is_refused=False,
    ),
    Rule(
        names=("golden", "golden_epsilon", "golden_patience_s"),
        needs=lambda values: values["golden_traces"],
        otherwise="has no effect where SLIPSTREAM_TRAINER_GOLDEN_TRACES is 0",
        is_refused=False,
    ),
    Rule(
        names=("golden_patience_s",),
        needs=lambda values: values["golden"] is None,
        otherwise="has no effect on a recording, which SLIPSTREAM_TRAINER_GOLDEN names",
        is_refused=False,
    ),
)
_USED_BY_REPLAY = (
    *("batch_tokens", "max_bases", "max_context", "learning_rate", "warmup_steps", "max_gradient_norm", "autocast"),
    *("loss", "draft_vocab_size"),
)
"""Of the trainer's settings; options of the command say the rest."""


def check_options(context: typer.Context, rules: Iterable[Rule]) -> None:
    """Of a command. Raises ConfigError for an option that was typed and has no effect."""
    typed, other = {}, {}
    for option in context.command.params:
        name, source = option.name or "", context.get_parameter_source(option.name or "")
        if source is not None and source.name == "COMMANDLINE":
            typed[name] = option.opts[0]
        elif source is not None and source.name == "ENVIRONMENT" and context.params[name] != option.default:
            other[name] = f"{option.envvar}"
    for rule in rules:
        _apply(rule, context.params, typed, is_refused=rule.is_refused)
        _apply(rule, context.params, other, is_refused=False)


def check_variables(settings: BaseSettings, rules: Iterable[Rule]) -> None:
    """Of a class of settings. Raises ConfigError for a variable that is of another engine."""
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
        log.warning(_WITHOUT_EFFECT, setting=name, reason=f"{name} {rule.otherwise}")


def warn_of_unread_variables() -> None:
    """A variable with our prefix that nothing reads is most often a known one, misspelt."""
    # It knows all commands, and they know this module.
    from slipstream.cli.main import app
    from slipstream.settings import COMPOSE_VARIABLES, known_variables, unknown_variables

    for name, nearest in unknown_variables(os.environ, known_variables(app) | COMPOSE_VARIABLES).items():
        log.warning("nothing reads this variable", variable=name, nearest=nearest)


def warn_of_trainer_variables() -> None:
    """Of a replay, in whose environment a trainer's settings may be."""
    from trainer.config import ENV_PREFIX, TrainerConfig

    for name in TrainerConfig.model_fields:
        variable = f"{ENV_PREFIX}{name.upper()}"
        if variable in os.environ and name not in _USED_BY_REPLAY:
            log.warning(_WITHOUT_EFFECT, setting=variable, reason=f"{variable} has no effect on a replay")

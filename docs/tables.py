"""Writes the generated tables of docs/reference: `python -m docs.tables`."""

from __future__ import annotations

import ast
import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, get_args
from unittest.mock import MagicMock

from msgspec import Struct
from prometheus_client import CollectorRegistry
from pydantic import SecretStr
from pydantic_settings import BaseSettings
from starlette.routing import Route

from serving.capture.recorder import RecorderStats
from serving.engine import EngineHealth, EngineInfo
from serving.gateway.access import ACCESS
from serving.gateway.app import Rollouts, create_app, create_passthrough_app
from serving.gateway.config import GatewaySettings
from serving.gateway.metrics import GatewayMetrics, HealthCollector, RolloutCollector
from serving.gateway.rollouts.registry import RolloutRegistry
from serving.hotswap.follower import SwapLog
from serving.metrics import EngineMetrics, GroupTextMetrics, ServingCollector, TargetMetrics, VerdictCollector
from serving.rollout.interactive_share import SlotsShare
from serving.sglang.gateway_metrics import PoolCollector, SglangCollector
from serving.sglang.report import EngineReport
from serving.speedup import SpeedupMeter
from slipstream.cli.main import app
from slipstream.settings import commands, other_variables, settings_classes, variables, variables_of
from speculator.trace import Trace, TraceHeader, VerifyRounds
from speculator.versions.lifecycle import Transition
from speculator.versions.store import Manifest
from trainer.metrics import TrainerMetrics

_MIB = 1024 * 1024
_KINDS = {"integer": "integer", "number": "number", "string": "text", "boolean": "1 or 0"}
_FORMATS = {"path": "path", "password": "text, a secret"}
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
"""JSON Schema keyword → sign on the page."""
MARKER = "<!-- What follows is written by `make docs`; a test compares. -->\n"


def page(path: Path, generated: str) -> str:
    """The text of a page with everything below its marker replaced. Raises ValueError where it has no marker."""
    head, marker, _ = path.read_text().partition(MARKER)
    if not marker:
        raise ValueError(f"{path} has no line {MARKER!r}")
    return f"{head}{marker}\n{generated}"


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table as Markdown."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines) + "\n"


def configuration() -> str:
    """All environment variables."""
    sections = variable_rows().items()
    return "\n".join(
        f"## {title}\n\n{table(('variable', 'type', 'default', 'meaning'), rows)}" for title, rows in sections
    )


def variable_rows() -> dict[str, list[tuple[str, ...]]]:
    """Name, type, default and meaning of every variable, by the services that read it."""
    others = {name: (f"`{name}`", *row) for name, row in other_variables().items()}
    enabled = others.pop("SLIPSTREAM_ENABLED")
    rows = {title: list(_fields(owner)) for title, owner in settings_classes().items()}
    rows["Plugin: the SGLang server"].insert(0, enabled)
    return {"Every command": list(others.values()), **rows}


def _fields(owner: type[BaseSettings]) -> Iterator[tuple[str, ...]]:
    schema = owner.model_json_schema()["properties"]
    for variable, name in variables_of(owner).items():
        field = schema.get(name) or schema[variable]
        meaning = " ".join(field.get("description", "").split())
        yield f"`{variable}`", _kind(name, field), _value(name, field["default"]), meaning


def _kind(name: str, schema: Mapping[str, Any]) -> str:
    """The type of a value, from the JSON schema of its field, without null."""
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


_SHARED_BY = 2
"""An option with one meaning in so many commands is explained once."""


def command_line() -> str:
    """All commands and their options."""
    found = {name: command for name, command in commands(app) if not command.hidden}
    options = {
        name: [_option(each) for each in command.params if each.param_type_name == "option"]
        for name, command in found.items()
    }
    defaults = defaultdict[tuple[str, str, str], Counter[str]](Counter)
    for names, variable, default, meaning in chain.from_iterable(options.values()):
        defaults[names, variable, meaning][default] += 1
    usual: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for (names, variable, meaning), each in sorted(defaults.items(), key=lambda one: -one[1].total()):
        row = (names, variable, each.most_common(1)[0][0], meaning)
        # Of two options with one name the one that more commands have comes first; the default tells them apart.
        if each.total() >= _SHARED_BY and row[2] not in (other[2] for other in usual[names]):
            usual[names].append(row)
    head = ("option", "variable", "default", "meaning")
    parts = ["## Shared options\n", table(head, (row for names in sorted(usual) for row in usual[names]))]
    for name, command in found.items():
        parts.append(f"## `{name}`\n\n{' '.join((command.help or '').split())}\n")
        if arguments := [each for each in command.params if each.param_type_name == "argument"]:
            parts += [*(f"* `{each.metavar or each.name.upper()}`: {each.help}" for each in arguments), ""]
        shared = [row for row in options[name] if row[1::2] in (other[1::2] for other in usual[row[0]])]
        own = [row for row in options[name] if row not in shared]
        said = [row[0] if row == usual[row[0]][0] else f"{row[0]} ({row[2]})" for row in shared]
        parts += [f"[Shared](#shared-options): {', '.join(said)}\n"] * bool(said) + [table(head, own)] * bool(own)
    return "\n".join(parts)


def _option(option: Any) -> tuple[str, ...]:
    choices = [each for each in get_args(option.type_descriptor.annotation) if isinstance(each, str)]
    value = f" {'|'.join(choices)}" if choices else ""
    names = ", ".join(f"`{name}{value}`" for name in (*option.opts, *option.secondary_opts))
    environment = ", ".join(f"`{name}`" for name in variables(option))
    if option.required:
        default = "required"
    elif option.is_flag:
        default = "on" if option.default else "off"
    else:
        default = "–" if option.default in (None, "") else f"{option.default}"
    return names, environment, default, option.help or ""


_PREFIX = "slipstream_"
_GATEWAY, _LOCAL, _SGLANG, _TRAINER = "gateway", "local engine", "SGLang", "trainer"
_SECTIONS = {
    "Gateway": (_GATEWAY,),
    "Both engines": (_LOCAL, _SGLANG),
    "Local engine only": (_LOCAL,),
    "SGLang only": (_SGLANG,),
    "Trainer": (_TRAINER,),
}
"""Titles, and who has exactly these."""


@dataclass(frozen=True, kw_only=True)
class Described:
    """A metric, by its name in queries."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help_text: str
    exposed_by: tuple[str, ...]


def describe() -> list[Described]:
    """All our metrics, in the order in which collectors define them.

    Raises ValueError where two services define a metric differently.
    """
    found: dict[str, Described] = {}
    for exposer, registry in _registries().items():
        for one in _described(exposer, registry):
            known = found.setdefault(one.name, one)
            if replace(known, exposed_by=()) != replace(one, exposed_by=()):
                raise ValueError(f"{one.name} differs between {known.exposed_by} and {exposer}")
            if exposer not in known.exposed_by:
                found[one.name] = replace(known, exposed_by=(*known.exposed_by, exposer))
    return list(found.values())


def metrics() -> str:
    """All metrics, in a table for those that one service or both engines have."""
    described, parts = describe(), []
    for title, exposers in _SECTIONS.items():
        rows = [_row(metric) for metric in described if metric.exposed_by == exposers]
        parts.append(f"## {title}\n\n{table(('name', 'type', 'labels', 'what it says'), rows)}")
    return "\n".join(parts)


def _row(metric: Described) -> tuple[str, ...]:
    return f"`{metric.name}`", metric.kind, ", ".join(f"`{label}`" for label in metric.labels), metric.help_text


def _registries() -> dict[str, CollectorRegistry]:
    """A registry for each service, with the collectors that it registers."""
    registries = {name: CollectorRegistry() for name in (_GATEWAY, _LOCAL, _SGLANG, _TRAINER)}
    GatewayMetrics(registries[_GATEWAY], "model")
    health = EngineHealth(alive=True, ready=True, num_running=0, num_waiting=0)
    registries[_GATEWAY].register(HealthCollector(lambda: health, "model"))
    rollouts = RolloutRegistry([], GatewaySettings())
    registries[_GATEWAY].register(RolloutCollector(rollouts.driver, rollouts.ended, SlotsShare()))
    EngineMetrics(registries[_LOCAL])
    registries[_LOCAL].register(GroupTextMetrics())
    recorder = RecorderStats(
        captured=0, appended=0, dropped_by_reason={}, pending=0, bytes_appended=0, tokens_appended=0
    )
    registries[_LOCAL].register(ServingCollector(SpeedupMeter(), lambda: recorder))
    registries[_LOCAL].register(VerdictCollector(SwapLog))
    registries[_SGLANG].register(SglangCollector(lambda: EngineReport.parse({}), lambda: 0))
    registries[_SGLANG].register(PoolCollector(lambda: 0, lambda: 0))
    for name in (_LOCAL, _SGLANG):
        TargetMetrics(registries[name])
    TrainerMetrics(registries[_TRAINER])
    return registries


def _described(exposer: str, registry: CollectorRegistry) -> Iterator[Described]:
    for collector in registry._collector_to_names:
        for family in collector.collect():
            if family.name.startswith(_PREFIX):
                # Private attributes: without samples prometheus_client has no public way to the label names.
                labels = getattr(collector, "_labelnames", None) or getattr(family, "_labelnames", None) or ()
                yield Described(
                    name=f"{family.name}_total" if family.type == "counter" else family.name,
                    kind=family.type,
                    labels=tuple(labels),
                    help_text=family.documentation,
                    exposed_by=(exposer,),
                )


_PURPOSES = {
    "/v1/rollouts/{rollout_id}/observations": "answer turns of samples",
    "/v1/target-version": "bring new target weights into service",
    "/health": "200 while the gateway serves; 503 once its own engine has ended",
    "/ready": "200 while the engine takes requests, else 503",
    "/metrics": "Prometheus metrics",
    "/slipstream/live": "figures of the live page",
    "/slipstream/drafts": "versions and events of the live page",
    "/v1/messages/count_tokens": "count tokens of messages",
    **dict.fromkeys(("/tokenize", "/v1/tokenize"), "tokens of a text"),
    **dict.fromkeys(("/detokenize", "/v1/detokenize"), "text of tokens"),
    "/openapi.json": "schema of all routes",
    "/": "live page",
    "/page/{name:path}": "files of the live page",
}
"""Where the name of a route's function does not say it."""


def http_api() -> str:
    """All routes of the gateway, with everything that may be switched on: who may call each, before which engine."""
    host, settings = MagicMock(), GatewaySettings(admin_key=SecretStr("a-key-for-a-table"))
    host.info = EngineInfo(model="model", context_length=1)
    common: dict[str, Any] = {"settings": settings, "drafts": MagicMock(), "targets": MagicMock()}
    local = create_app(host, registry=CollectorRegistry(), **common)
    common["rollouts"] = Rollouts(pool=MagicMock(), slots_share=SlotsShare(), tokenizer=MagicMock())
    in_front = create_passthrough_app(host, MagicMock(), registry=CollectorRegistry(), **common)
    found = defaultdict[tuple[str, ...], list[str]](list)
    for engine, gateway in ((_LOCAL, local), (_SGLANG, in_front)):
        for route in gateway.routes:
            assert isinstance(route, Route)
            purpose = _PURPOSES.get(route.path) or route.name.replace("_", " ")
            for method in sorted((route.methods or set()) - {"HEAD"}):
                shown = f"`{method} {route.path.replace(':path', '')}`"
                found[shown, purpose, f"{ACCESS[route.path]}"].append(engine)
    rows = ((*row, "both" if len(engines) > 1 else engines[0]) for row, engines in found.items())
    return "## Routes\n\n" + table(("route", "purpose", "access", "engine"), rows)


_FORMATS_OF: dict[str, tuple[type, ...]] = {
    "Trace: header": (TraceHeader,),
    "Trace: tensors": (Trace, VerifyRounds),
    "Draft version: `manifest.json`": (Manifest,),
    "State: a transition": (Transition,),
}
_JSON_TYPES = {
    **dict.fromkeys(("SamplingParams", "dict[str, Any]", "dict[str, Number]"), "object"),
    **dict.fromkeys(("Verification", "VersionState"), "str"),
}


def formats() -> str:
    """The fields of what is stored, as their classes describe them."""
    head, parts = ("field", "type", "meaning"), []
    for title, owners in _FORMATS_OF.items():
        rows = [row for owner in owners for row in _described_fields(owner)]
        parts.append(f"## {title}\n\n{table(head, rows)}")
    return "\n".join(parts)


def _described_fields(owner: type) -> Iterator[tuple[str, ...]]:
    """The docstrings below fields. Where they begin with shape and type, all else is no tensor."""
    [found] = ast.parse(inspect.getsource(owner)).body
    assert isinstance(found, ast.ClassDef)
    for field, after in pairwise([*found.body, ast.Pass()]):
        if isinstance(field, ast.AnnAssign):
            kind, text = ast.unparse(field.annotation), ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = " ".join(str(after.value.value).split())
            if text.startswith("["):
                kind, _, text = text.partition(": ")
            if kind.startswith("[") or issubclass(owner, Struct):
                yield f"`{ast.unparse(field.target)}`", _JSON_TYPES.get(kind, kind), text


PAGES = (configuration, command_line, metrics, http_api, formats)
"""Each is the page of its name."""


def path_of(tables: Callable[[], str]) -> Path:
    return Path(__file__).parent / "reference" / f"{tables.__name__.replace('_', '-')}.md"


if __name__ == "__main__":
    for tables in PAGES:
        path_of(tables).write_text(page(path_of(tables), tables()))

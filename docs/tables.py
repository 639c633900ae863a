"""Write the tables of docs/reference/configuration.md and docs/reference/metrics.md: `python -m docs.tables`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from pydantic_settings import BaseSettings

from serving.capture.recorder import RecorderStats
from serving.engine import EngineHealth
from serving.gateway.config import GatewaySettings
from serving.gateway.metrics import GatewayMetrics, HealthCollector, RolloutCollector
from serving.gateway.rollouts.book import RolloutBook
from serving.hotswap.follower import SwapLog
from serving.metrics import EngineMetrics, GroupTextMetrics, ServingCollector, TargetMetrics, VerdictCollector
from serving.sglang.gateway_metrics import PoolCollector, SglangCollector
from serving.sglang.report import EngineReport
from serving.speedup import SpeedupMeter
from slipstream.cli.main import app
from slipstream.settings import commands, other_variables, settings_classes, variables, variables_of
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
    """All environment variables and all options of all commands."""
    parts = ["## Environment variables\n"]
    for title, rows in variable_rows().items():
        parts += [f"### {title}\n", table(("variable", "type", "default", "meaning"), rows)]
    return "\n".join([*parts, "## Commands\n", *_commands()])


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


def _commands() -> Iterator[str]:
    for name, command in commands(app):
        if command.hidden:
            continue  # an old name
        arguments = [option for option in command.params if option.param_type_name == "argument"]
        yield f"### `{name}`\n"
        yield f"{' '.join((command.help or '').split())}\n"
        if arguments:
            yield f"Arguments: `{' '.join(option.metavar or option.name.upper() for option in arguments)}`\n"
        rows = [_option(option) for option in command.params if option.param_type_name == "option"]
        if rows:
            yield table(("option", "variable", "default", "meaning"), rows)


def _option(option: Any) -> tuple[str, ...]:
    names = ", ".join(f"`{name}`" for name in option.opts)
    environment = ", ".join(f"`{name}`" for name in variables(option))
    if option.required:
        default = "required"
    elif option.is_flag:
        default = "on" if option.default else "off"
    else:
        default = "–" if option.default is None else f"{option.default}"
    return names, environment, default, option.help or ""


_PREFIX = "slipstream_"
_GATEWAY, _LOCAL, _SGLANG, _TRAINER = "gateway", "local engine", "SGLang", "trainer"
_SECTIONS = {"Gateway": {_GATEWAY}, "Engine": {_LOCAL, _SGLANG}, "Trainer": {_TRAINER}}


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
    """All metrics, in a table for each service."""
    described, parts = describe(), []
    for title, exposers in _SECTIONS.items():
        rows = [_row(metric) for metric in described if exposers & set(metric.exposed_by)]
        parts += [f"## {title}\n", table(("name", "type", "labels", "what it says", "exposed by"), rows)]
    return "\n".join(parts)


def _row(metric: Described) -> tuple[str, ...]:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"`{metric.name}`", metric.kind, labels, metric.help_text, ", ".join(metric.exposed_by)


def _registries() -> dict[str, CollectorRegistry]:
    """A registry for each service, with the collectors that it registers."""
    registries = {name: CollectorRegistry() for name in (_GATEWAY, _LOCAL, _SGLANG, _TRAINER)}
    GatewayMetrics(registries[_GATEWAY], "model")
    health = EngineHealth(alive=True, ready=True, num_running=0, num_waiting=0)
    registries[_GATEWAY].register(HealthCollector(lambda: health, "model"))
    rollouts = RolloutBook([], GatewaySettings())
    registries[_GATEWAY].register(RolloutCollector(rollouts.driver, rollouts.ended))
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


if __name__ == "__main__":
    for name, tables in {"configuration.md": configuration(), "metrics.md": metrics()}.items():
        path = Path(__file__).parent / "reference" / name
        path.write_text(page(path, tables))

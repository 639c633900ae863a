"""The tables of `slipstream drafts`, for a terminal; `--json` has every number."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec
from rich.table import Table

if TYPE_CHECKING:
    from speculator.versions.operator import Details, Difference, DraftRow, EngineRow, Overview


def overview_table(overview: Overview) -> list[Any]:
    table = Table("version", "state", "parent", "created", "gate", "served as")
    for row in overview.drafts:
        state = "unknown" if row.state is None else row.state.value
        gate = row.damage or _short(row.gate)
        table.add_row(str(row.version), state, or_dash(row.parent), _when(row.created_ms), gate, _served_as(row))
    engines = [_engines_table(overview.engines)] if overview.engines else []
    return [table, *engines, *([f"no Redis: {overview.no_redis}"] if overview.no_redis else [])]


def _engines_table(rows: list[EngineRow]) -> Table:
    table = Table("engine", "version", "role", "accept length", "target", "trials", "last verdict")
    for row in rows:
        length = "–" if row.accept_length is None else f"{row.accept_length:.3f}"
        numbers = (or_dash(row.version), row.role or "–", length, or_dash(row.target_version))
        table.add_row(row.engine_id, *numbers, row.verdicts or "–", row.last_verdict or "–")
    return table


def _served_as(row: DraftRow) -> str:
    marks = {"last good": row.is_last_good, "published": row.is_published, "pinned": row.is_pinned}
    return ", ".join([*(name for name, holds in marks.items() if holds), *row.engines])


def details_tables(details: Details) -> list[Any]:
    manifest = Table("manifest", "", show_header=False)
    for name, value in msgspec.to_builtins(details.manifest).items():
        manifest.add_row(name, msgspec.json.encode(value).decode() if isinstance(value, dict) else or_dash(value))
    manifest.add_row("served as", _served_as(details.draft) or "–")
    history = Table("when", "state", "by", "reason", "numbers")
    for each in details.history:
        history.add_row(_when(each.at_ms), each.state.value, each.actor, each.reason, _short(each.numbers))
    return [manifest, history]


def difference_tables(difference: Difference) -> list[Any]:
    tensors = Table("tensor", "relative L2", "cosine", "changed elements")
    for each in difference.tensors:
        if each.num_changed is None:
            tensors.add_row(each.name, "–", "–", f"shapes {each.shapes[0]} and {each.shapes[1]}")
        else:
            tensors.add_row(each.name, _figure(each.relative_l2), _figure(each.cosine), str(each.num_changed))
    rest = Table("", f"version {difference.a}", f"version {difference.b}")
    for name, (a, b) in {**difference.config, **difference.manifest}.items():
        rest.add_row(name, or_dash(a), or_dash(b))
    return [tensors, rest]


def _short(numbers: Any) -> str:
    """Numbers on one line, texts and tables of the gate's left to --json."""
    if not isinstance(numbers, dict):
        return or_dash(numbers)
    shown = {name: value for name, value in numbers.items() if isinstance(value, str | int | float)}
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in shown.items()
    )


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.6f}"


def or_dash(value: object) -> str:
    return "–" if value is None else str(value)


def _when(at_ms: int | None) -> str:
    return "–" if at_ms is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_ms / 1000))

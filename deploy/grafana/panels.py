"""Panels, annotations and dashboards as Grafana's JSON (its schema 39), placed from left to right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

DATA_SOURCE = {"type": "prometheus", "uid": "slipstream-prometheus"}
"""As deploy/grafana/provisioning/datasources names it."""

TIMES, TOKENS, TOKENS_A_SECOND = "suffix: ×", "suffix: tokens", "suffix: tokens/s"
"""Units that Grafana has no name for."""

_GRID_WIDTH = 24
_SCHEMA_VERSION = 39

Kind = Literal["timeseries", "stat", "state-timeline"]


@dataclass(frozen=True)
class Query:
    """PromQL, and the name of its series in the legend."""

    expr: str
    legend: str


@dataclass(frozen=True, kw_only=True)
class Panel:
    """`unit` is Grafana's name of it; `suffix:…` shows any word behind the number."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = "timeseries"
    width: int = 8
    height: int = 8
    decimals: int | None = None
    minimum: float | None = 0
    band: tuple[str, str] | None = None
    """Legends of the lower and the upper end of an interval, which is shaded."""
    line_at: float | None = None
    bars: bool = False

    def to_json(self, number: int, x: int, y: int) -> dict[str, Any]:
        defaults: dict[str, Any] = {"unit": self.unit, "custom": self._custom(), "color": {"mode": "palette-classic"}}
        if self.decimals is not None:
            defaults["decimals"] = self.decimals
        if self.minimum is not None:
            defaults["min"] = self.minimum
        steps: list[dict[str, Any]] = [{"color": "transparent" if self.kind == "timeseries" else "text", "value": None}]
        if self.line_at is not None:
            steps.append({"color": "orange", "value": self.line_at})
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": DATA_SOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "fieldConfig": {"defaults": defaults, "overrides": self._overrides()},
            "options": self._options(),
            "targets": [
                {"refId": chr(ord("A") + index), "datasource": DATA_SOURCE, "expr": query.expr}
                | {"legendFormat": query.legend, "range": True}
                for index, query in enumerate(self.queries)
            ],
        }

    def _custom(self) -> dict[str, Any]:
        if self.kind != "timeseries":
            return {}
        custom: dict[str, Any] = {"lineWidth": 2, "showPoints": "never"}
        if self.line_at is not None:
            custom["thresholdsStyle"] = {"mode": "dashed"}
        if self.bars:
            custom |= {"drawStyle": "bars", "fillOpacity": 60, "lineWidth": 1}
        return custom

    def _overrides(self) -> list[dict[str, Any]]:
        if self.band is None:
            return []
        lower, upper = self.band
        thin = {"id": "custom.lineWidth", "value": 1}
        return [
            _override(lower, thin),
            _override(upper, thin, {"id": "custom.fillBelowTo", "value": lower}),
        ]

    def _options(self) -> dict[str, Any]:
        if self.kind == "stat":
            return {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "textMode": "value_and_name"}
        legend = {"displayMode": "list", "placement": "bottom", "showLegend": True}
        return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}


def _override(name: str, *properties: dict[str, Any]) -> dict[str, Any]:
    return {"matcher": {"id": "byName", "options": name}, "properties": list(properties)}


@dataclass(frozen=True, kw_only=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, kw_only=True)
class Annotation:
    """A mark on every panel wherever the query is above 0."""

    name: str
    expr: str
    text: str
    color: str

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "datasource": DATA_SOURCE,
            "enable": True,
            "iconColor": self.color,
            "target": {"refId": "Anno", "expr": self.expr},
            "titleFormat": self.name,
            "textFormat": self.text,
        }


@dataclass(frozen=True, kw_only=True)
class Dashboard:
    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    annotations: tuple[Annotation, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": ["slipstream"],
            "schemaVersion": _SCHEMA_VERSION,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "5s",
            "time": {"from": "now-15m", "to": "now"},
            "timezone": "browser",
            "annotations": {"list": [annotation.to_json() for annotation in self.annotations]},
            "templating": {"list": []},
            "panels": list(self._panels()),
        }

    def _panels(self) -> list[dict[str, Any]]:
        placed: list[dict[str, Any]] = []
        y = 0
        for row in self.rows:
            heading = {"type": "row", "title": row.title, "collapsed": False, "panels": []}
            placed.append({"id": len(placed) + 1, **heading, "gridPos": {"x": 0, "y": y, "w": _GRID_WIDTH, "h": 1}})
            x, y, height = 0, y + 1, 0
            for panel in row.panels:
                if x + panel.width > _GRID_WIDTH:
                    x, y, height = 0, y + height, 0
                placed.append(panel.to_json(len(placed) + 1, x, y))
                x, height = x + panel.width, max(height, panel.height)
            y += height
        return placed

"""The metric names in PromQL, and whether there are such metrics."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from pathlib import Path

import yaml

from docs.tables import Described, describe

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "rules"
_OURS = re.compile(r"\bslipstream[_:][a-z0-9_:]+")


@functools.cache
def known_names() -> frozenset[str]:
    """Of our collectors and of our recording rules."""
    groups = yaml.safe_load((RULES / "recording.yml").read_text())["groups"]
    return frozenset(_series_names(describe()) | {rule["record"] for group in groups for rule in group["rules"]})


def unknown_names(expr: str) -> set[str]:
    return set(_OURS.findall(expr)) - known_names()


def _series_names(metrics: Iterable[Described]) -> set[str]:
    """The names that a query may use."""
    names: set[str] = set()
    for metric in metrics:
        endings = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        names |= {metric.name + ending for ending in endings}
    return names

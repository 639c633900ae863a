"""docs/metrics.md says what the collectors say, and the collectors keep to Prometheus' conventions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from docs.tables import Described, describe, page
from docs.tables import metrics as tables
from serving.metrics import EngineMetrics
from trainer.metrics import TrainerMetrics

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


@pytest.fixture(scope="module")
def metrics() -> list[Described]:
    return describe()


def test_the_page_is_what_the_collectors_say() -> None:
    assert PAGE.read_text() == page(PAGE, tables()), "run `make docs`"


def test_names_follow_the_conventions(metrics: list[Described]) -> None:
    assert len(metrics) > 70
    for metric in metrics:
        assert re.fullmatch(r"slipstream_[a-z0-9_]+", metric.name)
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name
        assert not re.search(r"_(ms|milliseconds|kb|mib|percent)(_|$)", metric.name), f"{metric.name}: base units"
        assert metric.help_text[:1].isupper() or metric.help_text[:1].isdigit(), metric.name
        assert not set(metric.labels) & {"request_id", "trace_id", "prompt", "version", "engine_id"}, metric.name


def test_the_page_bounds_the_values_of_every_label(metrics: list[Described]) -> None:
    explained = re.findall(r"^\| `(\w+)` \| \S", PAGE.read_text().split("## Gateway")[0], re.MULTILINE)
    assert sorted(explained) == sorted({label for metric in metrics for label in metric.labels})


def test_what_is_known_beforehand_begins_at_zero() -> None:
    """A series that appears with its first event hides that event from `increase()`."""
    registry = CollectorRegistry()
    TrainerMetrics(registry)
    EngineMetrics(registry)
    for name, label, values in (
        ("slipstream_swaps_total", "outcome", ("installed", "failed")),
        ("slipstream_trainer_traces_total", "outcome", ("admitted", "duplicate", "dead_lettered")),
        ("slipstream_trainer_gate_decisions_total", "outcome", ("promote", "refuse", "hold")),
        ("slipstream_trainer_steps_total", "outcome", ("applied", "skipped")),
        ("slipstream_trainer_drift_alarms_total", "domain", ("all",)),
    ):
        assert [registry.get_sample_value(name, {label: value}) for value in values] == [0.0] * len(values), name


def test_the_exposition_parses() -> None:
    registry = CollectorRegistry()
    TrainerMetrics(registry)
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    assert {family.name for family in families} >= {"slipstream_trainer_steps", "slipstream_trainer_step_seconds"}

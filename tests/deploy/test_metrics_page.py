"""docs/metrics.md says what the collectors say, and the collectors keep to Prometheus' conventions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from serving.metrics import EngineMetrics
from slipstream.metrics_page import LABELS, Described, describe, render
from trainer.metrics import TrainerMetrics

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


@pytest.fixture(scope="module")
def metrics() -> list[Described]:
    return describe()


def test_the_page_is_what_the_collectors_say(metrics: list[Described]) -> None:
    assert PAGE.read_text() == render(metrics), "run: python -m slipstream.metrics_page docs/metrics.md"


def test_names_follow_the_conventions(metrics: list[Described]) -> None:
    assert len(metrics) > 70
    for metric in metrics:
        assert re.fullmatch(r"slipstream_[a-z0-9_]+", metric.name)
        assert metric.unit
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name
        assert not re.search(r"_(ms|milliseconds|kb|mib|percent)(_|$)", metric.name), f"{metric.name}: base units"
        assert metric.help_text[0].isupper() or metric.help_text[0].isdigit(), metric.name
        assert not set(metric.labels) & {"request_id", "trace_id", "prompt", "version", "engine_id"}, metric.name


def test_every_label_that_is_explained_is_used(metrics: list[Described]) -> None:
    assert set(LABELS) == {label for metric in metrics for label in metric.labels}


def described(name: str, *, labels: tuple[str, ...] = (), help_text: str = "Something") -> Described:
    return Described(name=name, kind="gauge", labels=labels, help_text=help_text, exposed_by=("trainer",))


@pytest.mark.parametrize(
    ("metric", "complaint"),
    [
        (described("slipstream_trainer_seconds", help_text=""), "no help text"),
        (described("slipstream_trainer_gate_changes"), "no unit"),
        (described("slipstream_trainer_seconds", labels=("user",)), "add it to LABELS"),
    ],
)
def test_a_metric_that_does_not_explain_itself_is_refused(metric: Described, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        render([metric])


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

"""Metrics, Prometheus' rules and Grafana's dashboards agree; with data: tests/slipstream/test_loop.py."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from docs.names import known_metrics
from docs.tables import Described, describe, page
from docs.tables import metrics as tables
from serving.metrics import EngineMetrics
from serving.speedup import BASELINE
from slipstream.cli.main import app
from slipstream.settings import commands
from tests.deploy.compose import ROOT
from tests.fixtures.command_line import check_slipstream
from tests.fixtures.telemetry import BOARDS, RULES
from trainer.metrics import TrainerMetrics

PROMETHEUS = RULES.parent
ALERT_TESTS = PROMETHEUS / "tests" / "alerts_test.yml"
GRAFANA = BOARDS.parent
PAGE, RUNBOOK = ROOT / "docs" / "reference" / "metrics.md", ROOT / "docs" / "how-to" / "runbook.md"
SGLANG = ROOT / ".venv-sglang"
RUNBOOKS = "{{ $externalLabels.runbooks }}"
DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
FILES = {path.stem: json.loads(path.read_text()) for path in BOARDS.iterdir()}
_OURS = re.compile(r"\bslipstream[_:][a-z0-9_:]+")

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool: make system-packages installs it"
)
each_board = pytest.mark.parametrize("board", FILES.values(), ids=FILES.keys())


def unknown_names(expr: str) -> set[str]:
    return set(_OURS.findall(expr)) - known_metrics()


def rules(kind: str) -> list[dict[str, Any]]:
    """All rules that have a `record`, or an `alert`."""
    groups = [group for file in sorted(RULES.glob("*.yml")) for group in yaml.safe_load(file.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


ALERTS = rules("alert")


def promtool(*arguments: object) -> str:
    result = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@needs_promtool
def test_the_configuration_and_the_rules_are_valid(tmp_path: Path) -> None:
    """promtool looks for the file with the key, too."""
    copy = shutil.copytree(PROMETHEUS, tmp_path / "prometheus")
    (tmp_path / "key").write_text("key")
    config = (copy / "prometheus.yml").read_text()
    (copy / "prometheus.yml").write_text(config.replace("/run/secrets/gateway_metrics", str(tmp_path / "key")))
    assert "2 rule files found" in promtool("check", "config", copy / "prometheus.yml")


@needs_promtool
def test_the_rules_do_what_their_tests_say() -> None:
    assert "SUCCESS" in promtool("test", "rules", ALERT_TESTS)


def test_every_alert_is_seen_firing_and_not_firing() -> None:
    """The quiet scenario, and the moment before each firing one, expect that nothing fires."""
    scenarios = yaml.safe_load(ALERT_TESTS.read_text())["tests"]
    checks = [check for scenario in scenarios for check in scenario["promql_expr_test"] if "ALERTS" in check["expr"]]
    expected = [set(re.findall(r'alertname="(\w+)"', str(check["exp_samples"]))) for check in checks]
    assert set().union(*expected) == {alert["alert"] for alert in ALERTS}
    assert expected.count(set()) >= len(ALERTS)


@pytest.mark.parametrize("rule", [*rules("record"), *ALERTS], ids=lambda rule: rule.get("alert", rule.get("record")))
def test_rules_ask_for_metrics_that_exist(rule: dict[str, Any]) -> None:
    assert unknown_names(rule["expr"]) == set()


def test_a_name_that_does_not_exist_is_noticed() -> None:
    assert unknown_names("rate(slipstream_swaps_totl[1m]) + slipstream:nothing:rate1m + slipstream_depth") == {
        "slipstream_swaps_totl",
        "slipstream:nothing:rate1m",
    }
    assert "slipstream_trainer_step_seconds_bucket" in known_metrics()


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_says_what_happened_and_what_to_do(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in ("info", "warning", "critical")
    summary, description = alert["annotations"]["summary"], alert["annotations"]["description"]
    assert len(summary) < 100
    assert len(description) > 100
    assert alert["annotations"]["runbook_url"] == f"{RUNBOOKS}docs/how-to/runbook.md#{alert['alert'].lower()}"
    for command in re.findall(r"`slipstream ([^`]+)`", description):
        check_slipstream(command.split(), whole=False)


def test_the_runbook_has_a_section_for_every_alert_and_for_no_other() -> None:
    sections = re.split(r"^### (\w+)\n", RUNBOOK.read_text(), flags=re.MULTILINE)[1:]
    assert sorted(sections[::2]) == sorted(alert["alert"] for alert in ALERTS)
    assert all(re.search(r"^1\. ", section, re.MULTILINE) for section in sections[1::2]), "each has steps"


@needs_promtool
@pytest.mark.parametrize("address", ["", "https://git.example.com/slipstream/blob/main/"])
def test_a_firing_alert_leads_to_its_section(tmp_path: Path, address: str) -> None:
    [alert] = [one for one in ALERTS if one["alert"] == "SlipstreamTrainerUnhealthy"]
    annotations = {
        name: text.replace(RUNBOOKS, address).replace("{{ $labels.instance }}", "t")
        for name, text in alert["annotations"].items()
    }
    fired = {"exp_labels": {"instance": "t", **alert["labels"]}, "exp_annotations": annotations}
    scenario = {
        "interval": "1m",
        "external_labels": {"runbooks": address} if address else {},
        "input_series": [{"series": 'slipstream_trainer_healthy{instance="t"}', "values": "0x30"}],
        "alert_rule_test": [{"eval_time": "20m", "alertname": alert["alert"], "exp_alerts": [fired]}],
    }
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump({"rule_files": [f"{RULES}/alerts.yml"], "tests": [scenario]}))
    assert "SUCCESS" in promtool("test", "rules", file)


def test_the_scraped_ports_are_those_of_the_services() -> None:
    scraped = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    targets = {job["job_name"]: job["static_configs"][0]["targets"][0] for job in scraped if "static_configs" in job}
    (port,) = (
        parameter.default for parameter in dict(commands(app))["slipstream serve"].params if parameter.name == "port"
    )
    assert targets["gateway"] == f"gateway:{port}"
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert f"--metrics-port {targets['trainer'].removeprefix('trainer:')}" in services["trainer"]["command"]
    (by_name,) = (job["dns_sd_configs"][0] for job in scraped if "dns_sd_configs" in job)
    assert f"--port {by_name['port']}" in services[by_name["names"][0]]["command"]


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def queries(board: dict[str, Any]) -> list[str]:
    asked = [target["expr"] for panel in panels(board) for target in panel["targets"]]
    asked += [mark["target"]["expr"] for mark in board["annotations"]["list"]]
    return asked + [variable["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]


@each_board
def test_every_panel_explains_itself_and_has_its_place(board: dict[str, Any]) -> None:
    places = set()
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    titles = [panel["title"] for panel in panels(board)]
    assert len(set(titles)) == len(titles)
    for panel in panels(board):
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]
        x, y, width, height = (panel["gridPos"][side] for side in "xywh")
        cells = set(itertools.product(range(x, x + width), range(y, y + height)))
        assert not cells & places, f"{panel['title']} lies on another panel"
        assert max(x for x, _ in cells) < 24
        places |= cells


@each_board
def test_a_speedup_names_its_baseline(board: dict[str, Any]) -> None:
    measured = [panel for panel in panels(board) if "speedup_measured" in json.dumps(panel["targets"])]
    assert measured
    for panel in measured:
        assert BASELINE in panel["description"], panel["title"]
        assert any("{{baseline}}" in target["legendFormat"] for target in panel["targets"]), panel["title"]


@each_board
def test_queries_ask_for_metrics_that_exist(board: dict[str, Any]) -> None:
    assert [(expr, unknown) for expr in queries(board) if (unknown := unknown_names(expr))] == []


@each_board
def test_everything_is_asked_of_the_chosen_data_source_and_engine(board: dict[str, Any]) -> None:
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    asked = [*panels(board), *board["annotations"]["list"], *(each for each in variables.values() if "refresh" in each)]
    asked += [target for panel in panels(board) for target in panel["targets"]]
    assert all(each["datasource"] == DATA_SOURCE for each in asked)
    used = set(re.findall(r"\$(\w+)", "\n".join(queries(board)))) - {"__rate_interval"}
    assert used == variables.keys() - {"datasource"}
    assert "engine" in used


@each_board
def test_the_model_chooses_the_engines_and_all_of_them_are_no_more_than_its_own(board: dict[str, Any]) -> None:
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["model"]["query"].endswith(", model_name)")
    by_model = [variable for variable in variables.values() if 'model_name=~"$model"' in variable["query"]]
    assert "engine" in {variable["name"] for variable in by_model}
    assert not any("allValue" in variable for variable in by_model), "All would be those of other models, too"


@each_board
def test_states_are_told_by_words_in_colour(board: dict[str, Any]) -> None:
    for metric in ("slipstream_engine_up{", "slipstream_draft_version{"):
        assert any(
            panel["type"] == "state-timeline" and metric in json.dumps(panel["targets"]) for panel in panels(board)
        )
    for panel in panels(board):
        if panel["type"] != "state-timeline" and panel["title"] != "State":
            continue
        overrides = panel["fieldConfig"]["overrides"]
        names = {target["legendFormat"] for target in panel["targets"]} | {
            target["refId"] for target in panel["targets"]
        }
        for override in overrides:
            assert override["matcher"]["options"] in names, panel["title"]
            told = {given["id"]: given["value"] for given in override["properties"]}
            colours = [value["color"] for mapping in told.get("mappings", ()) for value in mapping["options"].values()]
            colours += [step["color"] for step in told.get("thresholds", {}).get("steps", ())]
            assert set(colours) - {"text", "transparent"}, (panel["title"], override["matcher"])
        assert len(overrides) == len(panel["targets"]), panel["title"]


@each_board
def test_a_single_value_says_what_it_means_that_there_is_none(board: dict[str, Any]) -> None:
    single = [panel for panel in panels(board) if panel["type"] in ("stat", "gauge", "bargauge")]
    assert single
    assert all(panel["fieldConfig"]["defaults"].get("noValue") for panel in single)


@pytest.mark.skipif(not SGLANG.exists(), reason="no .venv-sglang: make test-sglang makes it")
def test_sglang_exports_what_its_board_asks_for() -> None:
    (collector,) = SGLANG.glob("lib/python*/site-packages/sglang/srt/observability/metrics_collector.py")
    exported = set(re.findall(r'name="(sglang:\w+)"', collector.read_text()))
    asked = {name for board in FILES.values() for expr in queries(board) for name in re.findall(r"sglang:\w+", expr)}
    assert len(asked) > 12
    assert {re.sub(r"_bucket$", "", name) for name in asked} <= exported


def test_what_the_loop_is_for_is_on_the_live_board() -> None:
    assert {name: board["uid"] for name, board in FILES.items()} == {
        name: name for name in ("slipstream-live", "slipstream-sglang")
    }
    live = FILES["slipstream-live"]
    everything = "\n".join(queries(live))
    assert [panel["title"] for panel in live["panels"] if panel["type"] == "row"] == [
        "Does it pay?",
        "What is accepted?",
        "Is it healthy?",
        "Does it learn?",
        "What is lost?",
    ]
    metrics = ("speedup_measured_ratio_lower", "accept_length_by_version", "acceptance_by_position", "gate_decisions")
    metrics += ("speedup_end_to_end_ratio_lower", "inter_token_latency_seconds_bucket", "prompt_tokens_total")
    metrics += ("time_to_first_token_seconds_bucket", "slipstream_accepted_total", "loss_budget_used")
    assert [metric for metric in metrics if metric not in everything] == []
    assert {variable["name"] for variable in live["templating"]["list"]} >= {"datasource", "model", "engine", "tenant"}
    assert {mark["name"] for mark in live["annotations"]["list"]} >= {"Draft swap", "Rollback"}


def test_provisioning_names_the_data_source_and_the_folder() -> None:
    (source,) = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["type"] == DATA_SOURCE["type"]
    assert source["isDefault"], "what the boards' variable begins with"
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((GRAFANA / "provisioning" / "dashboards" / "slipstream.yml").read_text())["providers"]
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert f"./deploy/grafana/dashboards:{provider['options']['path']}:ro" in services["grafana"]["volumes"]


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

"""The scrape configuration, the rules and their own tests, as promtool sees them; and what alerts tell an operator."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.cli.main import app
from slipstream.settings import commands
from tests.deploy.queries import RULES, known_names, unknown_names
from tests.fixtures.command_line import check_slipstream

FOLDER = RULES.parent
TESTS = FOLDER / "tests" / "alerts_test.yml"

DOCUMENT = RULES.parents[2] / "docs" / "dashboards.md"

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool: make system-packages installs it"
)


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
    copy = shutil.copytree(FOLDER, tmp_path / "prometheus")
    (tmp_path / "key").write_text("key")
    config = (copy / "prometheus.yml").read_text()
    (copy / "prometheus.yml").write_text(config.replace("/run/secrets/gateway_metrics", str(tmp_path / "key")))
    assert "2 rule files found" in promtool("check", "config", copy / "prometheus.yml")


@needs_promtool
def test_the_rules_do_what_their_tests_say() -> None:
    assert "SUCCESS" in promtool("test", "rules", TESTS)


def test_every_alert_is_seen_firing_and_not_firing() -> None:
    """The quiet scenario, and the moment before each firing one, expect that nothing fires."""
    scenarios = yaml.safe_load(TESTS.read_text())["tests"]
    firing, quiet = set(), 0
    for check in (
        check for scenario in scenarios for check in scenario["promql_expr_test"] if "ALERTS" in check["expr"]
    ):
        firing |= set(re.findall(r'alertname="(\w+)"', str(check["exp_samples"])))
        quiet += not check["exp_samples"]
    assert firing == {alert["alert"] for alert in ALERTS}
    assert quiet >= len(ALERTS)


@pytest.mark.parametrize("rule", [*rules("record"), *ALERTS], ids=lambda rule: rule.get("alert", rule.get("record")))
def test_rules_ask_for_metrics_that_exist(rule: dict[str, Any]) -> None:
    assert unknown_names(rule["expr"]) == set()


def test_a_name_that_does_not_exist_is_noticed() -> None:
    assert unknown_names("rate(slipstream_swaps_totl[1m]) + slipstream:nothing:rate1m + slipstream_depth") == {
        "slipstream_swaps_totl",
        "slipstream:nothing:rate1m",
    }
    assert "slipstream_trainer_step_seconds_bucket" in known_names()


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_says_what_happened_and_what_to_do(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in ("info", "warning", "critical")
    summary, description = alert["annotations"]["summary"], alert["annotations"]["description"]
    assert len(summary) < 100
    assert len(description) > 100
    assert f"| {alert['alert']} |" in DOCUMENT.read_text()
    for command in re.findall(r"`slipstream ([^`]+)`", description):
        check_slipstream(command.split(), whole=False)


def test_the_scraped_ports_are_those_of_the_services() -> None:
    scraped = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    targets = {job["job_name"]: job["static_configs"][0]["targets"][0] for job in scraped if "static_configs" in job}
    (port,) = (
        parameter.default for parameter in dict(commands(app))["slipstream serve"].params if parameter.name == "port"
    )
    assert targets["gateway"] == f"gateway:{port}"
    services = yaml.safe_load((FOLDER.parents[1] / "docker-compose.yml").read_text())["services"]
    assert f"--metrics-port {targets['trainer'].removeprefix('trainer:')}" in services["trainer"]["command"]
    (by_name,) = (job["dns_sd_configs"][0] for job in scraped if "dns_sd_configs" in job)
    assert f"--port {by_name['port']}" in services[by_name["names"][0]]["command"]

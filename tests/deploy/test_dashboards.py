"""The dashboards are complete and ask for metrics that exist. With data: tests/slipstream/test_loop.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from serving.speedup import BASELINE
from tests.deploy.queries import unknown_names

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "grafana" / "dashboards"
PROVISIONING = FOLDER.parent / "provisioning"
SGLANG = ROOT / ".venv-sglang"
DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}

BOARDS = {path.stem: json.loads(path.read_text()) for path in FOLDER.iterdir()}
each_board = pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS.keys())


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def queries(board: dict[str, Any]) -> list[str]:
    asked = [target["expr"] for panel in panels(board) for target in panel["targets"]]
    asked += [mark["target"]["expr"] for mark in board["annotations"]["list"]]
    return asked + [variable["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]


def test_the_files_are_named_after_their_boards() -> None:
    assert {name: board["uid"] for name, board in BOARDS.items()} == {name: name for name in BOARDS}
    assert BOARDS.keys() == {"slipstream-live", "slipstream-sglang"}


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
        position = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(position["x"], position["x"] + position["w"])
            for y in range(position["y"], position["y"] + position["h"])
        }
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


@pytest.mark.skipif(not SGLANG.exists(), reason="no .venv-sglang: make test-sglang makes it")
def test_sglang_exports_what_its_board_asks_for() -> None:
    (collector,) = SGLANG.glob("lib/python*/site-packages/sglang/srt/observability/metrics_collector.py")
    exported = set(re.findall(r'name="(sglang:\w+)"', collector.read_text()))
    asked = {name for board in BOARDS.values() for expr in queries(board) for name in re.findall(r"sglang:\w+", expr)}
    assert len(asked) > 12
    assert {re.sub(r"_bucket$", "", name) for name in asked} <= exported


def test_what_the_loop_is_for_is_on_the_live_board() -> None:
    live = BOARDS["slipstream-live"]
    everything = "\n".join(queries(live))
    for metric in (
        "speedup_measured_ratio_lower",
        "accept_length_by_version",
        "acceptance_by_position",
        "gate_decisions",
    ):
        assert metric in everything
    assert {mark["name"] for mark in live["annotations"]["list"]} >= {"Draft swap", "Rollback"}


def test_provisioning_names_the_data_source_and_the_folder() -> None:
    (source,) = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["type"] == DATA_SOURCE["type"]
    assert source["isDefault"], "what the boards' variable begins with"
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards" / "slipstream.yml").read_text())["providers"]
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert f"./deploy/grafana/dashboards:{provider['options']['path']}:ro" in services["grafana"]["volumes"]

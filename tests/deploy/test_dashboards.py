"""The dashboards are current, complete and ask for metrics that exist. With data: tests/slipstream/test_loop.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.grafana.boards import BOARDS, FOLDER, file_of, rendered
from deploy.grafana.live import LIVE
from deploy.grafana.panels import DATA_SOURCE, Dashboard
from serving.speedup import BASELINE
from tests.deploy.queries import unknown_names

PROVISIONING = FOLDER.parent / "provisioning"
SGLANG = Path(__file__).parents[2] / ".venv-sglang"

each_board = pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)


def panels(board: Dashboard) -> list[dict[str, Any]]:
    return [panel for panel in board.to_json()["panels"] if panel["type"] != "row"]


def queries(board: Dashboard) -> list[str]:
    asked = [target["expr"] for panel in panels(board) for target in panel["targets"]]
    return asked + [annotation.expr for annotation in board.annotations]


@each_board
def test_the_file_is_current(board: Dashboard) -> None:
    assert file_of(board).read_text() == rendered(board), "run: python -m deploy.grafana.boards"


def test_there_is_no_other_file() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {file_of(board).name for board in BOARDS}


@each_board
def test_every_panel_explains_itself_and_has_its_place(board: Dashboard) -> None:
    places = set()
    document = board.to_json()
    assert len({panel["id"] for panel in document["panels"]}) == len(document["panels"])
    titles = [panel["title"] for panel in panels(board)]
    assert len(set(titles)) == len(titles)
    for panel in panels(board):
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"] == DATA_SOURCE
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
def test_a_speedup_names_its_baseline(board: Dashboard) -> None:
    measured = [panel for panel in panels(board) if "speedup_measured" in json.dumps(panel["targets"])]
    assert measured
    for panel in measured:
        assert BASELINE in panel["description"], panel["title"]
        assert any("{{baseline}}" in target["legendFormat"] for target in panel["targets"]), panel["title"]


@each_board
def test_queries_ask_for_metrics_that_exist(board: Dashboard) -> None:
    assert [(expr, unknown) for expr in queries(board) if (unknown := unknown_names(expr))] == []


@pytest.mark.skipif(not SGLANG.exists(), reason="no .venv-sglang: make test-sglang makes it")
def test_sglang_exports_what_its_board_asks_for() -> None:
    (collector,) = SGLANG.glob("lib/python*/site-packages/sglang/srt/observability/metrics_collector.py")
    exported = set(re.findall(r'name="(sglang:\w+)"', collector.read_text()))
    asked = {name for board in BOARDS for expr in queries(board) for name in re.findall(r"sglang:\w+", expr)}
    assert len(asked) > 12
    assert {re.sub(r"_bucket$", "", name) for name in asked} <= exported


def test_what_the_loop_is_for_is_on_the_live_board() -> None:
    everything = "\n".join(queries(LIVE))
    for metric in (
        "speedup_measured_ratio_lower",
        "accept_length_by_version",
        "acceptance_by_position",
        "gate_decisions",
    ):
        assert metric in everything
    assert {annotation.name for annotation in LIVE.annotations} >= {"Draft swap", "Rollback"}


def test_provisioning_names_the_data_source_and_the_folder() -> None:
    (source,) = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert {"type": source["type"], "uid": source["uid"]} == DATA_SOURCE
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards" / "slipstream.yml").read_text())["providers"]
    services = yaml.safe_load((FOLDER.parents[2] / "docker-compose.yml").read_text())["services"]
    assert f"./deploy/grafana/dashboards:{provider['options']['path']}:ro" in services["grafana"]["volumes"]

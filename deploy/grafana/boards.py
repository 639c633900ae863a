"""The dashboards. `python -m deploy.grafana.boards` writes them to deploy/grafana/dashboards, as Grafana reads them."""

from __future__ import annotations

import json
from pathlib import Path

from deploy.grafana.live import LIVE
from deploy.grafana.panels import Dashboard
from deploy.grafana.sglang import SGLANG

FOLDER = Path(__file__).parent / "dashboards"
BOARDS = (LIVE, SGLANG)


def rendered(board: Dashboard) -> str:
    return json.dumps(board.to_json(), indent=2, ensure_ascii=False) + "\n"


def file_of(board: Dashboard) -> Path:
    return FOLDER / f"{board.uid}.json"


if __name__ == "__main__":
    for each in BOARDS:
        file_of(each).write_text(rendered(each))

"""A Prometheus with the shipped rules beside a test, and every query of the dashboards asked of it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from speculator.host import free_port

CONFIG = Path(__file__).parent.parent / "deploy" / "prometheus" / "prometheus.yml"
RULES = CONFIG.parent / "rules"
BOARDS = CONFIG.parents[1] / "grafana" / "dashboards"
LIVE, SGLANG = BOARDS / "slipstream-live.json", BOARDS / "slipstream-sglang.json"
RATE_INTERVAL = "1m"
"""What Grafana's `$__rate_interval` stands for here."""
_READY_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Asked:
    """A query where it stands: a panel or an annotation of a dashboard, or a rule."""

    where: str
    expr: str


@dataclass(frozen=True)
class Answer:
    asked: Asked
    series: Sequence[tuple[dict[str, str], float]]
    """(labels, value)"""

    @property
    def has_data(self) -> bool:
        """NaN is no data: a quotient of nothing by nothing."""
        return any(value == value for _, value in self.series)


@contextlib.contextmanager
def prometheus(folder: Path, targets: dict[str, int], *, interval: str = "500ms") -> Iterator[str]:
    """A Prometheus with our rules that scrapes loopback ports by job name; yields its URL, ends it afterwards."""
    shipped = {job["job_name"]: job for job in yaml.safe_load(CONFIG.read_text())["scrape_configs"]}
    config = {
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "rule_files": [f"{RULES}/*.yml"],
        "scrape_configs": [
            {
                "job_name": job,
                "static_configs": [{"targets": [f"127.0.0.1:{port}"]}],
                "metric_relabel_configs": shipped[job].get("metric_relabel_configs", []),
            }
            for job, port in targets.items()
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    arguments = [
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    url = f"http://127.0.0.1:{port}"
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(["prometheus", *arguments], stdout=log, stderr=log)
        try:
            _wait_until_ready(url, process, folder / "prometheus.log")
            yield url
        finally:
            process.terminate()
            process.wait(30)


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/-/ready", trust_env=False).status_code == 200:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"Prometheus does not start:\n{log.read_text()}")
        time.sleep(0.05)


def query(url: str, expr: str, at_s: float | None = None) -> list[tuple[dict[str, str], float]]:
    """An instant query; raises RuntimeError with what Prometheus says about a bad one."""
    parameters: dict[str, str | float] = {"query": expr} | ({} if at_s is None else {"time": at_s})
    reply = httpx.get(f"{url}/api/v1/query", params=parameters, trust_env=False).json()
    if reply["status"] != "success":
        raise RuntimeError(f"{expr}: {reply['error']}")
    return [(one["metric"], float(one["value"][1])) for one in reply["data"]["result"]]


def last_time_up(url: str, jobs: Sequence[str]) -> float:
    """The last scrape at which all of `jobs` answered, in Unix seconds."""
    all_up = f'sum(up{{job=~"{"|".join(jobs)}"}}) == {len(jobs)}'
    ((_, at_s),) = query(url, f"max_over_time(timestamp({all_up})[1h:1s])")
    return at_s


def rules(url: str) -> list[dict[str, Any]]:
    """What Prometheus says about each rule: health, last error, type."""
    groups = httpx.get(f"{url}/api/v1/rules", trust_env=False).json()["data"]["groups"]
    return [rule for group in groups for rule in group["rules"]]


def questions(path: Path) -> list[Asked]:
    """Every query of a dashboard of all engines, with its panel's or annotation's name."""
    board = json.loads(path.read_text())
    asked = [(panel["title"], query["expr"]) for panel in board["panels"] for query in panel.get("targets", ())]
    asked += [(f"marks: {mark['name']}", mark["target"]["expr"]) for mark in board["annotations"]["list"]]
    everything = {"$__rate_interval": RATE_INTERVAL, "$engine": ".*", "$model": ".*"}
    for variable, value in everything.items():
        asked = [(where, expr.replace(variable, value)) for where, expr in asked]
    return [Asked(*one) for one in asked]


def recorded() -> list[Asked]:
    """Every recording rule's result."""
    groups = yaml.safe_load((RULES / "recording.yml").read_text())["groups"]
    return [Asked("recorded", rule["record"]) for group in groups for rule in group["rules"]]


def answers(url: str, asked: Sequence[Asked], at_s: float) -> list[Answer]:
    return [Answer(one, query(url, one.expr, at_s)) for one in asked]

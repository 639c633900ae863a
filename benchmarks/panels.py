"""Every query of the dashboards, with its value from a live run.

    python -m benchmarks.panels --out panels.md -- --minutes 3
    .venv-sglang/bin/python -m benchmarks.panels --engine sglang --minutes 6 --out panels.md

The first runs `slipstream demo` with the arguments behind `--` and asks the live board; the second runs the services
of docker-compose.yml with real SGLang on the CPU under the demo's questions, and asks both boards. A Prometheus is
beside them with the rules of deploy/prometheus: Debian's package or any other on the path. The values are those at the
end of the traffic.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from deploy.grafana.live import LIVE
from deploy.grafana.panels import Dashboard
from deploy.grafana.sglang import SGLANG
from speculator.ports import free_port

CONFIG = Path(__file__).parent.parent / "deploy" / "prometheus" / "prometheus.yml"
RULES = CONFIG.parent / "rules"
RATE_INTERVAL = "1m"
"""What Grafana's `$__rate_interval` stands for here."""
_READY_TIMEOUT_S = 30.0
_MOST_SERIES = 8


@dataclass(frozen=True)
class Asked:
    """A query where it stands: a panel or an annotation of a dashboard, or a rule."""

    where: str
    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Answer:
    asked: Asked
    series: Sequence[tuple[dict[str, str], float]]
    """(labels, value)"""

    @property
    def has_data(self) -> bool:
        """NaN is no data: a quotient of nothing by nothing."""
        return any(value == value for _, value in self.series)

    def values(self) -> str:
        shown = [f"{_legend(self.asked, labels)}: {value:.4g}".lstrip(": ") for labels, value in self.series]
        more = len(shown) - _MOST_SERIES
        return "; ".join(shown[:_MOST_SERIES]) + (f"; {more} more" if more > 0 else "")


def _legend(asked: Asked, labels: dict[str, str]) -> str:
    if not asked.legend:
        return ", ".join(value for name, value in labels.items() if name not in ("__name__", "job", "instance"))
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), asked.legend)


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


def questions(board: Dashboard) -> list[Asked]:
    """Every query of a dashboard, with its panel's or annotation's name."""
    asked = [
        Asked(panel.title, query.expr, query.legend)
        for row in board.rows
        for panel in row.panels
        for query in panel.queries
    ]
    asked += [Asked(f"marks: {mark.name}", mark.expr, mark.text) for mark in board.annotations]
    return [Asked(one.where, one.expr.replace("$__rate_interval", RATE_INTERVAL), one.legend) for one in asked]


def recorded() -> list[Asked]:
    """Every recording rule's result."""
    groups = yaml.safe_load((RULES / "recording.yml").read_text())["groups"]
    return [Asked("recorded", rule["record"]) for group in groups for rule in group["rules"]]


def answers(url: str, asked: Sequence[Asked], at_s: float) -> list[Answer]:
    return [Answer(one, query(url, one.expr, at_s)) for one in asked]


def table(found: Sequence[Answer]) -> str:
    """The list as Markdown."""
    rows = [
        f"| {answer.asked.where} | `{_cell(answer.asked.expr)}` | {_cell(answer.values()) or 'nothing'} |"
        for answer in found
    ]
    return "\n".join(["| panel | query | value |", "|---|---|---|", *rows]) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="Markdown; the same as JSON beside it.")
    parser.add_argument("--engine", choices=("local", "sglang"), default="local")
    parser.add_argument("--minutes", type=float, default=6, help="How long SGLang is asked.")
    parser.add_argument("demo", nargs="*", help="Arguments for `slipstream demo`.")
    options = parser.parse_args()
    if shutil.which("prometheus") is None:
        raise SystemExit("prometheus is not on the path: install Debian's package `prometheus`")
    with tempfile.TemporaryDirectory() as scratch:
        if options.engine == "local":
            found = _from_the_demo(Path(scratch), options.demo)
        else:
            found = _from_sglang(Path(scratch), options.minutes)
    options.out.write_text(table(found))
    document = [{"where": one.asked.where, "expr": one.asked.expr, "series": one.series} for one in found]
    options.out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    print(f"{sum(one.has_data for one in found)} of {len(found)} queries have data")


def _from_the_demo(scratch: Path, arguments: Sequence[str]) -> list[Answer]:
    ports = {"gateway": free_port(), "trainer": free_port()}
    with prometheus(scratch, ports) as url:
        command = [sys.executable, "-m", "slipstream", "demo", "--port", str(ports["gateway"]), *arguments]
        environment = {**os.environ, "SLIPSTREAM_TRAINER_METRICS_PORT": str(ports["trainer"])}
        subprocess.run(command, env=environment, check=True)
        return answers(url, [*questions(LIVE), *recorded()], last_time_up(url, list(ports)))


def _from_sglang(scratch: Path, minutes: float) -> list[Answer]:
    from benchmarks.sglang_services import ask_for, services

    ports = {"gateway": free_port(), "trainer": free_port(), "sglang": free_port()}
    with prometheus(scratch / "prometheus", ports) as url:
        with services(scratch, ports) as gateway:
            print(f"asking {gateway} for {minutes:g} minutes", flush=True)
            print(f"{ask_for(gateway, minutes).requests} requests", flush=True)
        return answers(url, [*questions(SGLANG), *questions(LIVE), *recorded()], last_time_up(url, list(ports)))


if __name__ == "__main__":
    main()

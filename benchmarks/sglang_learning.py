"""Plot a live loop on SGLang: accept length, accepted tokens by source, and both speedups.

.venv-sglang/bin/python -m benchmarks.sglang_learning [--quick] [--json FILE] [--prompts FILE.jsonl] [--minutes 10]
                                                      [--head FOLDER] [--plot FILE.png] [--clients 4]

`slipstream serve --engine sglang` and `slipstream train` run with everything on, while clients stream answers through
the gateway. The first run begins from scratch. With `--head` there is a second one, in a store of its own, that begins
with a public head: `slipstream drafts import` takes it from that folder. No prompt comes twice in a run.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common.report import Target, fill_in, finish, parser
from serving.acceptance import SOURCES
from slipstream.children import Child, running_child
from slipstream.demo.servers import Scrape, wait_until_ready
from slipstream.demo.topics import Prompt, built_in_prompts, cycle_prompts, read_prompts
from slipstream.demo.traffic import Traffic
from slipstream.models import resolve_model
from speculator.host import free_port
from speculator.redis.embedded import EmbeddedRedis

_OPS = Path(__file__).parents[1] / "tests" / "sglang" / "ops"
"""Kernels for a CPU that SGLang's own package lacks."""
_SCRAPE_S = 5.0
_WINDOW_S = 30.0
"""Window that a point of the plot covers."""
_PLAIN_SHARE = 0.1
"""Share of steps in plain stretches: above a server's default, since ten minutes have few stretches."""
_MAX_TOKENS = 160
_READY_S = 400.0


@dataclasses.dataclass(frozen=True)
class Run:
    start: str
    failed: int
    requests: int
    scrapes: list[Scrape]
    versions: int
    """Number of versions that came into service."""

    def curve(self) -> list[dict[str, float | None]]:
        """A point for each scrape, of the window before it; speedups are those that the gateway shows then."""
        points = []
        for now in self.scrapes:
            before = next(one for one in self.scrapes if one.at_s >= now.at_s - _WINDOW_S)
            if now.at_s - before.at_s < _WINDOW_S / 2:
                continue
            gained = now.since(before)
            committed = gained.total("slipstream_round_tokens_total")
            points.append(
                {
                    "minute": round(now.at_s / 60, 2),
                    "version": now.total("slipstream_draft_version"),
                    "accept_length": _rounded(gained.accept_length),
                    **{
                        f"share_{source}": _rounded(
                            gained.total("slipstream_accepted_total", source=source) / committed if committed else None
                        )
                        for source in SOURCES
                    },
                    "speedup": _rounded(_shown(now, "slipstream_speedup_measured_ratio")),
                    "end_to_end": _rounded(_shown(now, "slipstream_speedup_end_to_end_ratio")),
                }
            )
        return points

    def to_dict(self) -> dict[str, Any]:
        curve = self.curve()
        thirds = {"first": curve[: len(curve) // 3], "last": curve[-(len(curve) // 3) :]}
        return {
            "requests": self.requests,
            "failed": self.failed,
            "versions": self.versions,
            **{
                f"{name}_{third}": _mean(point[name] for point in points)
                for third, points in thirds.items()
                for name in ("accept_length", *(f"share_{source}" for source in SOURCES))
            },
            "speedup": curve[-1]["speedup"],
            "end_to_end": curve[-1]["end_to_end"],
            "end_to_end_interval": [
                _rounded(_shown(self.scrapes[-1], f"slipstream_speedup_end_to_end_ratio_{end}"))
                for end in ("lower", "upper")
            ],
            "curve": curve,
        }


def main() -> None:
    options = parser("A live loop on SGLang as a plot")
    options.add_argument("--minutes", type=float, help="of live traffic a run; default 10, quick 1")
    options.add_argument("--head", type=Path, metavar="FOLDER", help="a public EAGLE-3 head to begin a second run with")
    options.add_argument("--plot", type=Path, metavar="FILE.png")
    options.add_argument("--clients", type=int, default=4)
    arguments = options.parse_args()
    fill_in(arguments, {"minutes": (1.0, 10.0)})
    prompts = read_prompts(arguments.prompts) if arguments.prompts else built_in_prompts()
    runs = [_run("from scratch", None, prompts, arguments)]
    if arguments.head is not None:
        runs.append(_run("from an imported head", arguments.head, prompts, arguments))
    found = {run.start.replace(" ", "_"): run.to_dict() for run in runs}
    if arguments.plot is not None:
        draw(runs, arguments.plot)
    rows: list[tuple[str, object]] = []
    for run in runs:
        of = found[run.start.replace(" ", "_")]
        low, high = of["end_to_end_interval"]
        rows += [
            (f"{run.start}: requests, failed, versions", f"{run.requests}, {run.failed}, {run.versions}"),
            ("   accept length, first and last third", f"{of['accept_length_first']}, {of['accept_length_last']}"),
            ("   accepted from the head, of committed", f"{of['share_head_first']}, {of['share_head_last']}"),
            ("   accepted from earlier text", f"{of['share_suffix_first']}, {of['share_suffix_last']}"),
            ("   decode speedup, end to end", f"{of['speedup']}, {of['end_to_end']} ({low} … {high})"),
        ]
    targets = []
    for run in runs:
        again = max(0, run.requests - len(prompts))
        targets.append(Target(f"{run.start}: failed requests", run.failed, 0, at_least=False))
        targets.append(Target(f"{run.start}: prompts that came twice", again, 0, at_least=False))
    finish(rows, targets, {"minutes": arguments.minutes, "starts": found}, arguments.json)


def _run(start: str, head: Path | None, prompts: list[Prompt], arguments: argparse.Namespace) -> Run:
    with tempfile.TemporaryDirectory() as name, EmbeddedRedis(Path(name) / "redis") as redis:
        folder, port, model_dir = Path(name), free_port(), resolve_model(arguments.model)
        store, model = folder / "drafts", ["--model", str(model_dir)]
        places = [*model, "--redis-url", redis.url, "--store", str(store)]
        if head is not None:
            # This child ends by itself.
            with running_child("drafts", ["import", str(head), *model, "--store", str(store)], folder) as importing:
                while importing.returncode is None:
                    time.sleep(0.1)
        os.environ |= {"PYTHONPATH": os.pathsep.join([*os.environ.get("PYTHONPATH", "").split(os.pathsep), str(_OPS)])}
        os.environ |= {"TORCHDYNAMO_DISABLE": "1"}
        serving = [*places, "--engine", "sglang", "--device", "cpu", "--port", str(port), "--name", "live", "--capture"]
        serving += ["--plain-share", str(_PLAIN_SHARE), "--share-groups"]
        training = [*places, "--state", str(folder / "state")]
        with running_child("serve", serving, folder) as serve:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(url, [serve], timeout_s=_READY_S)
            with running_child("train", training, folder) as train:
                return asyncio.run(_observed(start, url, cycle_prompts(prompts, 0), [serve, train], arguments))


async def _observed(
    start: str, url: str, prompts: Iterator[Prompt], children: Sequence[Child], arguments: argparse.Namespace
) -> Run:
    scrapes: list[Scrape] = []
    traffic = Traffic(url, "live", prompts, max_tokens=_MAX_TOKENS, temperature=0.0)
    async with traffic, httpx.AsyncClient(timeout=10, trust_env=False) as http:
        clients = asyncio.create_task(traffic.run(arguments.clients))
        begun_s = time.monotonic()
        while (at_s := time.monotonic() - begun_s) < 60 * arguments.minutes and not clients.done():
            for child in children:
                child.check()
            scrapes.append(Scrape.parse(at_s, (await http.get(f"{url}/metrics")).text))
            await asyncio.sleep(_SCRAPE_S)
        traffic.stop()
        await clients
    versions = len({one.total("slipstream_draft_version") for one in scrapes})
    return Run(start, traffic.stats.failed, traffic.stats.requests, scrapes, versions)


def draw(runs: Sequence[Run], path: Path) -> None:
    """Write a PNG: a column for each run."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    lines = (
        ("accept length\n(tokens a verification)", {"accept_length": ("", "#1f6feb")}, 1.0),
        (
            "share of the answers' tokens",
            {"share_head": ("proposed by the head", "#8250df"), "share_suffix": ("by earlier text", "#bf8700")},
            0.0,
        ),
        (
            "speedup over plain decoding",
            {"speedup": ("decode steps", "#1a7f37"), "end_to_end": ("end to end", "#bf3989")},
            1.0,
        ),
    )
    figure, axes = plt.subplots(3, len(runs), figsize=(6 * len(runs), 8), sharex=True, sharey="row", squeeze=False)
    figure.set_layout_engine("constrained")
    for column, run in enumerate(runs):
        curve = run.curve()
        swaps = [
            later["minute"] for earlier, later in itertools.pairwise(curve) if later["version"] != earlier["version"]
        ]
        for axis, (label, series, level) in zip(axes[:, column], lines, strict=True):
            for name, (called, color) in series.items():
                points = [(point["minute"], point[name]) for point in curve if point[name] is not None]
                if points:
                    axis.plot(*zip(*points, strict=True), color=color, linewidth=2, label=called)
            for minute in swaps:
                axis.axvline(minute, color="#8c959f", linewidth=0.7, linestyle=":")
            axis.axhline(level, color="#57606a", linewidth=0.8)
            axis.grid(axis="y", alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
            if column == 0:
                axis.set_ylabel(label)
            if len(series) > 1:
                axis.legend(loc="upper left", frameon=False, fontsize=9)
        axes[0, column].set_title(f"{run.start} (dotted: a new draft)", loc="left", fontsize=11)
        axes[-1, column].set_xlabel("minutes of live traffic")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _shown(scrape: Scrape, name: str) -> float | None:
    """Value of a gauge; None before its first measurement."""
    return scrape.total(name) or None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _mean(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.fmean(known), 4) if known else None


if __name__ == "__main__":
    main()

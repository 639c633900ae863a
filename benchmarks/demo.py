"""Measure `slipstream demo` after ten minutes, from a draft with random weights, on three workloads in turn.

    python -m benchmarks.demo [--quick] [--json FILE] [--prompts FILE.jsonl] [--model NAME] [--minutes 10]
                              [--workloads mixed editing groups] [--plots DIR]

* mixed: the prompts as they come, two clients, greedy.
* editing: every program among the prompts (domain `code`) with each of five small changes asked for, two clients,
  greedy. Without `--prompts` the programs are functions of this project.
* groups: eight answers to each prompt at temperature 0.8, one group at a time.

The target is for the speedup that the running service reports: decode rounds of its last two minutes over plain ones
in the same minutes. What a client saw and what the head added stand before it.
Once a prompt comes again, its first answer is in what suffixes are taken from: the table says how often each came.

Targets: 1.6 × on mixed traffic, 2.5 × on the other two.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import serving.local
from benchmarks.common.report import Target, fill_in, finish, parser, prompts_of, refusing
from benchmarks.common.workloads import EDITS, asks_for
from slipstream.demo.topics import Prompt
from speculator.errors import ConfigError
from speculator.host import free_port

MORE_EDITS = ("Add type hints to every function", "Print the arguments at the start of every function")


@dataclass(frozen=True)
class Workload:
    prompts: Sequence[Prompt]
    options: tuple[str, ...]
    target: float


@refusing
def main() -> None:
    options = parser("The live demo on three workloads")
    options.add_argument("--minutes", type=float, help="of traffic, each workload")
    options.add_argument("--workloads", nargs="+", choices=("mixed", "editing", "groups"))
    options.add_argument("--plots", type=Path, metavar="DIR", help="write a PNG of each workload here")
    arguments = options.parse_args()
    fill_in(arguments, {"minutes": (0.4, 10.0), "workloads": (("mixed", "editing", "groups"),) * 2})
    workloads = workloads_of(arguments.prompts, arguments.workloads)
    if arguments.plots:
        arguments.plots.mkdir(parents=True, exist_ok=True)
    rows: list[tuple[str, object]] = []
    targets, document = [], {}
    for name in arguments.workloads:
        plot = ("--plot", str(arguments.plots / f"{name}.png")) if arguments.plots else ()
        figures = _run(workloads[name], arguments, plot)
        found = figures["speedup"]["measured_last_two_minutes"] or 0.0
        lengths = ["–" if one is None else f"{one:.2f}" for one in figures["accept_length"].values()]
        client, ab = figures["client_speedup"], figures["ab"]
        rows += [
            (f"{name}: a client's speedup over plain decoding, prompts included", _times(client)),
            ("  both over earlier text alone, whole run", _times(ab["both_over_suffix_whole_run"])),
            ("  the same in the last two minutes", _times(ab["both_over_suffix"])),
            ("  both over plain rounds, last two minutes", _times(ab["both_over_plain"])),
            ("  the server's end-to-end speedup", _times(figures["speedup"]["end_to_end"])),
            ("  rounds until the poisoned draft was gone", figures["poisoned"]["rounds"]),
            (
                "  measured speedup of decode rounds",
                f"{found:.2f} ×  ({figures['speedup']['baseline_rounds']} control rounds)",
            ),
            ("  tokens a verification, first minute → last two", " → ".join(lengths)),
            (
                "  requests; times that each prompt came",
                f"{figures['requests']}; {figures['times_each_prompt_came']:.2f}",
            ),
        ]
        targets.append(Target(f"{name}_speedup", found, workloads[name].target))
        document[name] = figures
    finish(rows, targets, document, arguments.json)


def _times(bounded: Mapping[str, float | None]) -> str:
    estimate, low, high = (bounded[name] for name in ("median", "low", "high"))
    if estimate is None:
        return "–"
    return f"{estimate:.2f} ×" if low is None else f"{estimate:.2f} ×  ({low:.2f} … {high:.2f})"


def workloads_of(path: Path | None, chosen: Sequence[str]) -> dict[str, Workload]:
    """The workloads by name. Raises ConfigError when editing is chosen and the file has no program."""
    prompts = prompts_of(path)
    programs = [one.text for one in prompts if one.domain == "code"] if path else _functions_of_this_project()
    if "editing" in chosen and not programs:
        raise ConfigError(f'{path} has no lines whose "domain" is "code": editing needs programs')
    edits = [
        Prompt("editing", asks_for(edit, program.strip())) for program in programs for edit in (*EDITS, *MORE_EDITS)
    ]
    groups = ("--clients", "1", "--samples", "8", "--temperature", "0.8")
    return {
        "mixed": Workload(prompts, (), 1.6),
        "editing": Workload(edits, (), 2.5),
        "groups": Workload(prompts, groups, 2.5),
    }


def _functions_of_this_project() -> list[str]:
    sources = [path.read_text() for path in sorted(Path(serving.local.__path__[0]).rglob("*.py"))]
    found = [
        ast.get_source_segment(source, node) or ""
        for source in sources
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
    ]
    return [text for text in found if len(text) < 1000]


def _run(workload: Workload, arguments: argparse.Namespace, plot: tuple[str, ...]) -> dict[str, Any]:
    """Run one demo, with its output on the terminal, and return its figures."""
    with tempfile.TemporaryDirectory(prefix="slipstream-") as scratch:
        asked, written = Path(scratch) / "prompts.jsonl", Path(scratch) / "figures.json"
        lines = [json.dumps({"domain": one.domain, "prompt": one.text}) for one in workload.prompts]
        asked.write_text("\n".join(lines) + "\n")
        command = [sys.executable, "-m", "slipstream", "demo", *workload.options, *plot]
        command += ["--model", str(arguments.model), "--port", str(free_port())]
        command += ["--minutes", str(arguments.minutes), "--prompts", str(asked), "--json", str(written)]
        ports = {"SLIPSTREAM_TRAINER_METRICS_PORT": str(free_port())}
        subprocess.run(command, env={**os.environ, **ports}, check=True)
        figures: dict[str, Any] = json.loads(written.read_text())
        return figures


if __name__ == "__main__":
    main()

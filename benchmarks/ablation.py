"""Which loss learns fastest from the same traces: acceptance after equal trained tokens, and tokens to the baseline's.

    python -m benchmarks.ablation [--quick] [--json FILE] [--prompts FILE.jsonl] [--cache DIR] [--runs FILE.jsonl]
        [--workloads a,b,a>b] …

Workloads are domains of the prompts, `a+b`: both mixed, and `a>b`: traffic that shifts from a to b. Each is answered
once by the local engine, whose draft learns from the answers as it would in service (so that recorded proposals come
from versions of a draft that improves), and kept as a recording in the cache. Every loss then learns from that
recording with the same seeds, the same data and the same steps (`slipstream/replay.py`), with as many training-time-
test steps as the deepest chain, and is evaluated on held-out answers at each depth.

There are two baselines, both forward KL on committed text alone: `ordinary:forward_kl` begins and moves as drafts
usually do (benchmarks/ordinary.py), `forward_kl` as this trainer does, like all losses without `ordinary:`. Against
the first stands what training here is worth as a whole, against the second what the loss adds to it.

Target: the best loss needs at most 0.7 of the trained tokens that `ordinary:forward_kl` needs to reach that baseline's
final acceptance length, in the median over workloads, depths and seeds. A baseline's own tokens count up to where its
curve first reaches that length, not up to the end of the run: on a plateau that would flatter every loss. For a shift
the same is also printed for the answers of each phase alone, counted from where that phase comes.

With `--runs` each finished run is a line of that file at once, and what the file holds already is not run again: remove
it where the code or the trainer's settings have changed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing  # noqa: TID251 - between our own processes
import os
from concurrent.futures import ProcessPoolExecutor, as_completed  # noqa: TID251
from pathlib import Path
from typing import Any

import torch

from benchmarks.ablation_table import (
    BASELINE,
    ORDINARY,
    ORDINARY_BASELINE,
    Cell,
    Key,
    cells_of,
    finite,
    overall,
    phase_table,
    table,
)
from benchmarks.common import Target, fill_in, finish, parser
from benchmarks.ordinary import OrdinaryLearner, ordinary_draft
from benchmarks.workloads import RecordOptions, recorded
from slipstream.models import cache_root, resolve_model
from slipstream.replay import ReplayOptions, replay
from slipstream.topics import built_in_prompts, read_prompts
from speculator.json_lines import read_json_lines
from speculator.loss import DEFAULT_LOSS
from trainer.allocator import keep_freed_memory

LOSSES = (
    ORDINARY_BASELINE,
    BASELINE,
    DEFAULT_LOSS,
    "cross_entropy",
    "forward_kl=0.5,cross_entropy=0.5",
    "forward_kl=1,log_acceptance=1",
    "forward_kl,step_discount=1",
    "forward_kl=1,discard=1,verdicts=fresh",
    "forward_kl=1,discard=0.1,correction=topr",
    "forward_kl=1,policy_gradient=0.1,correction=cispo",
)
QUICK_LOSSES = (ORDINARY_BASELINE, BASELINE, DEFAULT_LOSS, "forward_kl=1,discard=1,correction=topr")


def main() -> None:
    arguments = _arguments()
    model_dir = resolve_model(arguments.model)
    prompts = read_prompts(arguments.prompts) if arguments.prompts else built_in_prompts()
    domains = list(dict.fromkeys(prompt.domain for prompt in prompts))
    workloads = arguments.workloads or [*domains[: 1 if arguments.quick else 3], ">".join(domains[:2])]
    record = RecordOptions(
        model_dir=model_dir,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        num_threads=arguments.threads,
    )
    recordings = {
        workload: recorded(workload, prompts, arguments.answers, record, arguments.cache) for workload in workloads
    }
    asked = {
        (workload, loss, seed): ReplayOptions(
            recordings=[path],
            model_dir=model_dir,
            depths=arguments.depths,
            loss=loss.removeprefix(ORDINARY),
            num_steps=arguments.steps,
            seed=seed,
            num_points=arguments.points,
        )
        # The losses one after the other: what is cut off is then a whole table of fewer.
        for loss in arguments.losses
        for workload, path in recordings.items()
        for seed in range(arguments.seeds)
    }
    runs = replay_all(asked, num_processes=arguments.jobs, log=arguments.runs)
    _finish(cells_of(runs, arguments.depths), runs, arguments)


def replay_all(
    asked: dict[Key, ReplayOptions], *, num_processes: int, log: Path | None = None
) -> dict[Key, dict[str, Any]]:
    """Every run, some at a time, each on one thread; they do not depend on each other or on how many run. `log` is
    read, and gets what it lacks.
    """
    runs = _logged(asked, log)
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn"), initializer=_prepare_process) as pool:
        running = {
            pool.submit(run_one, options, ordinary=key[1].startswith(ORDINARY)): key
            for key, options in asked.items()
            if key not in runs
        }
        for done in as_completed(running):
            key = running[done]
            workload, loss, seed = key
            runs[key] = done.result()
            if log is not None:
                with log.open("a") as file:
                    file.write(json.dumps({"key": _name(key, asked[key]), "run": runs[key]}) + "\n")
            length, seconds = runs[key]["accept_length"], runs[key]["seconds"]
            print(f"{workload}, seed {seed}, {loss}: {length} in {seconds} s", flush=True)
    return {key: runs[key] for key in asked}


def _prepare_process() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()


def run_one(options: ReplayOptions, *, ordinary: bool) -> dict[str, Any]:
    if ordinary:
        return replay(options, begin=ordinary_draft, learning=OrdinaryLearner)
    return replay(options)


def _logged(asked: dict[Key, ReplayOptions], log: Path | None) -> dict[Key, dict[str, Any]]:
    """The runs among `asked` that the log has."""
    if log is None or not log.exists():
        return {}
    lines = read_json_lines(log, dict[str, Any], example='{"key": "…", "run": {}}')
    found = {line["key"]: line["run"] for _, line in lines}
    names = {key: _name(key, options) for key, options in asked.items()}
    return {key: found[name] for key, name in names.items() if name in found}


def _name(key: Key, options: ReplayOptions) -> str:
    """Names a run: what it learns, from which recording, and how it is followed."""
    files = [path.name for path in options.recordings]
    return repr((*key, files, options.num_steps, list(options.depths), options.num_points))


def _finish(cells: list[Cell], runs: dict[Key, dict[str, Any]], arguments: argparse.Namespace) -> None:
    to_ordinary = overall(cells, lambda cell: cell.to_ordinary)
    to_baseline = overall(cells, lambda cell: cell.to_baseline)
    winner = min(to_ordinary, key=lambda loss: to_ordinary[loss])
    finish(
        [*table(cells), *phase_table(runs)],
        [Target(f"trained_tokens_to_ordinary of {winner}", to_ordinary[winner], arguments.target, at_least=False)],
        {
            "winner": winner,
            "median_to_ordinary": {loss: finite(ratio) for loss, ratio in to_ordinary.items()},
            "median_to_baseline": {loss: finite(ratio) for loss, ratio in to_baseline.items()},
            "cells": [cell.to_dict() for cell in cells],
            "runs": [{"workload": workload, "row": loss, **run} for (workload, loss, _), run in runs.items()],
        },
        arguments.json,
    )


def _arguments() -> argparse.Namespace:
    options = parser("Losses on the same recorded traces")
    options.add_argument("--cache", type=Path, default=cache_root() / "recordings", metavar="DIR")
    options.add_argument("--runs", type=Path, metavar="FILE.jsonl", help="keep every run here, and go on from it")
    options.add_argument(
        "--workloads", type=lambda text: text.split(","), help="domains, mixtures and shifts: code,qa+rag,qa>code"
    )
    options.add_argument("--answers", type=int, help="answers to record a workload")
    options.add_argument("--max-tokens", type=int, help="completion tokens an answer")
    options.add_argument("--temperature", type=float, default=0.0)
    options.add_argument("--depths", type=lambda text: [int(part) for part in text.split(",")], default=[3, 5])
    options.add_argument("--seeds", type=int, help="seeds 0, 1, …")
    options.add_argument("--steps", type=int, help="default: every trace about four times")
    options.add_argument("--points", type=int, default=12, help="points of each curve")
    options.add_argument("--losses", nargs="+", help=f"both baselines are always among them; {ORDINARY}LOSS: as there")
    options.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of the recording engine")
    options.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at the same time")
    options.add_argument("--target", type=float, default=0.7)
    arguments = options.parse_args()
    fill_in(arguments, {"answers": (24, 240), "max_tokens": (48, 128), "seeds": (1, 3), "steps": (24, None)})
    fill_in(arguments, {"losses": (QUICK_LOSSES, LOSSES)})
    arguments.losses = list(dict.fromkeys([ORDINARY_BASELINE, BASELINE, *arguments.losses]))
    arguments.depths.sort()
    return arguments


if __name__ == "__main__":
    main()

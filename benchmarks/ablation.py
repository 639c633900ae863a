"""Which loss learns fastest from the same traces: acceptance after equal trained tokens, and tokens to the baseline's.

    python -m benchmarks.ablation [--quick] [--json FILE] [--prompts FILE.jsonl] [--cache DIR] [--workloads a,b,a>b] …

Workloads are domains of the prompts, `a+b`: both mixed, and `a>b`: traffic that shifts from a to b. Each is answered
once by the local engine, whose draft learns from the answers as it would in service (so that recorded proposals come
from versions of a draft that improves), and kept as a recording in the cache. Every loss then learns from that
recording with the same seeds, the same data and the same steps (`slipstream/replay.py`), with as many training-time-
test steps as the deepest chain, and is evaluated on held-out answers at each depth. The baseline is forward KL on
committed text alone.

Target: the best loss needs at most 0.7 of the trained tokens that the baseline needs to reach the baseline's final
acceptance length, in the median over workloads, depths and seeds. The baseline's own tokens count up to where its curve
first reaches that length, not up to the end of the run: on a plateau that would flatter every loss, the baseline too.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing  # noqa: TID251 - between our own processes
import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed  # noqa: TID251
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Spread, Target, fill_in, finish, parser
from benchmarks.workloads import RecordOptions, recorded
from slipstream.models import cache_root, resolve_model
from slipstream.replay import ReplayOptions, replay
from slipstream.topics import built_in_prompts, read_prompts

BASELINE = "forward_kl"
LOSSES = (
    BASELINE,
    "cross_entropy",
    "forward_kl=0.5,cross_entropy=0.5",
    "cross_entropy=1,log_acceptance=1,step_discount=1",
    "forward_kl=1,log_acceptance=1",
    "forward_kl,step_discount=1",
    "forward_kl=1,discard=1",
    "forward_kl=1,discard=1,verdicts=fresh",
    "forward_kl=1,policy_gradient=0.1,correction=cispo",
)
QUICK_LOSSES = (BASELINE, "forward_kl=1,log_acceptance=1", "forward_kl=1,discard=1,correction=topr")
Key = tuple[str, str, int]
"""Workload, loss, seed."""


def tokens_to_reach(curve: Sequence[dict[str, Any]], length: float, depth: int) -> float:
    """Trained tokens at which the curve first reaches `length`, between two of its points linearly; inf if never."""
    points = [(point["trained_tokens"], point["accept_length_by_depth"][str(depth)]) for point in curve]
    if points[0][1] >= length:
        return 0.0
    for (tokens, before), (more_tokens, after) in itertools.pairwise(points):
        if after >= length:
            return float(tokens + (more_tokens - tokens) * (length - before) / (after - before))
    return float("inf")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One loss on one workload at one depth, over the seeds."""

    workload: str
    depth: int
    loss: str
    lengths: tuple[float, ...]
    """Acceptance lengths after all steps."""
    token_ratios: tuple[float, ...]
    """Trained tokens to the baseline's final acceptance length, as a share of those that the baseline needed."""

    def __str__(self) -> str:
        ratio = statistics.median(self.token_ratios)
        return f"{Spread.of(self.lengths)}   {'never' if ratio == float('inf') else f'{ratio:.2f} × tokens'}"

    def to_dict(self) -> dict[str, Any]:
        finite = [None if ratio == float("inf") else round(ratio, 4) for ratio in self.token_ratios]
        return {**vars(self), "lengths": [round(length, 4) for length in self.lengths], "token_ratios": finite}


def cells_of(runs: dict[Key, dict[str, Any]], depths: Sequence[int]) -> list[Cell]:
    """The table from runs by (workload, loss, seed)."""
    workloads = dict.fromkeys(workload for workload, _, _ in runs)
    losses = dict.fromkeys(loss for _, loss, _ in runs)
    seeds = dict.fromkeys(seed for _, _, seed in runs)
    cells = []
    for workload in workloads:
        for depth in depths:
            for loss in losses:
                lengths, ratios = [], []
                for seed in seeds:
                    run, baseline = runs[workload, loss, seed], runs[workload, BASELINE, seed]
                    goal = baseline["curve"][-1]["accept_length_by_depth"][str(depth)]
                    lengths.append(run["curve"][-1]["accept_length_by_depth"][str(depth)])
                    needed = max(tokens_to_reach(baseline["curve"], goal, depth), 1.0)
                    ratios.append(tokens_to_reach(run["curve"], goal, depth) / needed)
                cells.append(
                    Cell(workload=workload, depth=depth, loss=loss, lengths=tuple(lengths), token_ratios=tuple(ratios))
                )
    return cells


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
            loss=loss,
            num_steps=arguments.steps,
            seed=seed,
            num_points=arguments.points,
        )
        for workload, path in recordings.items()
        for seed in range(arguments.seeds)
        for loss in arguments.losses
    }
    runs = replay_all(asked, num_processes=arguments.jobs)
    _finish(cells_of(runs, arguments.depths), runs, arguments)


def replay_all(asked: dict[Key, ReplayOptions], *, num_processes: int) -> dict[Key, dict[str, Any]]:
    """Every run, some at a time, each on one thread; they do not depend on each other or on how many run."""
    with ProcessPoolExecutor(
        num_processes, multiprocessing.get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        running = {pool.submit(replay, options): key for key, options in asked.items()}
        runs = {}
        for done in as_completed(running):
            workload, loss, seed = key = running[done]
            runs[key] = done.result()
            length, seconds = runs[key]["accept_length"], runs[key]["seconds"]
            print(f"{workload}, seed {seed}, {loss}: {length} in {seconds} s", flush=True)
    return {key: runs[key] for key in asked}


def _finish(cells: list[Cell], runs: dict[Key, dict[str, Any]], arguments: argparse.Namespace) -> None:
    overall = {
        loss: statistics.median(ratio for cell in cells if cell.loss == loss for ratio in cell.token_ratios)
        for loss in arguments.losses
    }
    winner = min(overall, key=lambda loss: overall[loss])
    rows = [(f"{cell.workload}, depth {cell.depth}, {cell.loss}", cell) for cell in cells]
    totals = [(f"tokens to the baseline, all workloads, {loss}", f"{ratio:8.2f} ×") for loss, ratio in overall.items()]
    finish(
        [("", "acceptance length, median (min … max) over seeds; trained tokens to the baseline's"), *rows, *totals],
        [Target(f"trained_tokens_to_baseline of {winner}", overall[winner], arguments.target, at_least=False)],
        {
            "baseline": BASELINE,
            "winner": winner,
            "median_token_ratio": {loss: None if ratio == float("inf") else ratio for loss, ratio in overall.items()},
            "cells": [cell.to_dict() for cell in cells],
            "runs": [{"workload": workload, "seed_index": seed, **run} for (workload, _, seed), run in runs.items()],
        },
        arguments.json,
    )


def _arguments() -> argparse.Namespace:
    options = parser("Losses on the same recorded traces")
    options.add_argument("--cache", type=Path, default=cache_root() / "recordings", metavar="DIR")
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
    options.add_argument("--losses", nargs="+", help=f"the baseline {BASELINE} is always among them")
    options.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of the recording engine")
    options.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at the same time")
    options.add_argument("--target", type=float, default=0.7)
    arguments = options.parse_args()
    fill_in(arguments, {"answers": (24, 240), "max_tokens": (48, 128), "seeds": (1, 3), "steps": (24, None)})
    fill_in(arguments, {"losses": (QUICK_LOSSES, LOSSES)})
    arguments.losses = list(dict.fromkeys([BASELINE, *arguments.losses]))
    arguments.depths.sort()
    return arguments


if __name__ == "__main__":
    main()

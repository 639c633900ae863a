"""Paired comparison of replays: keep runs in a file, and compute the gain of one arm over another.

A run is one replay (slipstream/replay.py). Runs of one seed begin with the same weights, learn from the same traces and
are scored on the same held-out answers.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from speculator.host import read_json_lines
from trainer.statistics import AcceptanceCounts, Comparison, PairedScores, by_prompt, compare

_T90 = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895, 8: 1.860, 9: 1.833}
"""Student's t, 95% one-sided, by degrees of freedom."""

Runs = dict[tuple[str, int], dict[str, Any]]
"""Documents by arm and seed."""
Length = Callable[[Mapping[str, Any]], float]


def all_runs(
    log: Path | None,
    arms: Sequence[str],
    seeds: Sequence[int],
    *,
    about: str,
    run: Callable[[str, int], dict[str, Any]],
) -> Runs:
    """All runs by arm and seed; runs that the file `log` does not have are made now. `about` identifies the experiment
    in the file. Seeds are the outer loop, so that complete tables of fewer seeds exist early.
    """
    known: dict[str, dict[str, Any]] = {}
    if log is not None and log.exists():
        lines = read_json_lines(log, dict[str, Any], example='{"key": "…", "run": {}}')
        known = {line["key"]: line["run"] for _, line in lines}
    runs: Runs = {}
    for seed in seeds:
        for arm in arms:
            key = f"{arm} seed {seed}, {about}"
            if key not in known:
                known[key] = run(arm, seed)
                print(f"{key}: {known[key]['accept_length']} in {known[key]['seconds']} s", flush=True)
                if log is not None:
                    with log.open("a") as file:
                        file.write(json.dumps({"key": key, "run": known[key]}) + "\n")
            runs[arm, seed] = known[key]
    return runs


def last_length(run: Mapping[str, Any]) -> float:
    length: float = run["accept_length"]
    return length


def later_length(run: Mapping[str, Any]) -> float:
    """Mean over the curve's points in the later half."""
    return statistics.fmean(
        point["accept_length"] for point in run["curve"] if 2 * point["step"] > run["curve"][-1]["step"]
    )


def gains(arm: str, over: str, runs: Runs, seeds: Sequence[int], length: Length) -> list[float]:
    """Relative gain in accept length, by seed."""
    return [length(runs[arm, seed]) / length(runs[over, seed]) - 1 for seed in seeds]


def by_trace(arm: str, over: str, runs: Runs, seeds: Sequence[int]) -> Comparison:
    """The gain on the held-out traces after the last step, as the gate compares two drafts. A trace that several seeds
    hold out counts once. The bounds cover the choice of traces, not that of seeds.
    """
    pairs = [
        (trace_id.encode(), PairedScores(_acceptance(own), _acceptance(runs[over, seed]["held_out"][trace_id])))
        for seed in seeds
        for trace_id, own in runs[arm, seed]["held_out"].items()
    ]
    return compare(by_prompt(pairs))


def _acceptance(scores: Sequence[float]) -> AcceptanceCounts:
    num_committed, num_rounds = scores
    return AcceptanceCounts(num_committed=num_committed, num_rounds=num_rounds)


def lower_end(values: Sequence[float]) -> float:
    """Lower end of the 90% interval of the mean; minus infinity for a single value."""
    if len(values) < 2:
        return -math.inf
    t = _T90[min(len(values) - 1, max(_T90))]
    return statistics.fmean(values) - t * statistics.stdev(values) / math.sqrt(len(values))


def both_ends(values: Sequence[float]) -> tuple[float, float]:
    """Lower and upper end of the 90% interval of the mean; infinite for a single value."""
    return lower_end(values), -lower_end([-value for value in values])


def interval(values: Sequence[float]) -> str:
    """The mean as text, with its 90% interval where there are several values."""
    surely = " ({:+.2%} … {:+.2%})".format(*both_ends(values)) if len(values) > 1 else ""
    return f"{statistics.fmean(values):+.2%}{surely}"

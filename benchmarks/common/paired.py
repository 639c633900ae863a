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


class KeptRuns:
    """Finished runs, kept in a file where there is one; `about` identifies the experiment in the file."""

    def __init__(self, path: Path | None, about: str) -> None:
        self._path, self._about = path, about
        self._known: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            lines = read_json_lines(path, dict[str, Any], example='{"key": "…", "run": {}}')
            self._known = {line["key"]: line["run"] for _, line in lines}

    def run(
        self,
        key: str,
        make: Callable[[], dict[str, Any]],
        *,
        is_enough: Callable[[Mapping[str, Any]], bool] = lambda run: True,
    ) -> dict[str, Any]:
        """The run of this key; made now where the file has none, or none that is enough."""
        key = f"{key}, {self._about}"
        known = self._known.get(key)
        if known is None or not is_enough(known):
            known = self._known[key] = make()
            print(f"{key}: accept length {known['accept_length']}", flush=True)
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps({"key": key, "run": known}) + "\n")
        return known


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

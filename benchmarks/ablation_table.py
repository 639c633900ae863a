"""What the runs of an ablation say: acceptance after equal trained tokens, and tokens to a baseline's acceptance."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

BASELINE = "forward_kl"
"""Forward KL on committed text alone, with the start and the step of the trainer."""
ORDINARY = "ordinary:"
"""Before a loss: with the usual start and step (benchmarks/ordinary.py)."""
ORDINARY_BASELINE = ORDINARY + BASELINE
Key = tuple[str, str, int]
"""Workload, loss, seed."""


def tokens_to_reach(curve: Sequence[dict[str, Any]], length: float, depth: int) -> float:
    """Trained tokens at which the curve first reaches `length`, between two of its points linearly; inf if never."""
    return _reach([(point["trained_tokens"], point["accept_length_by_depth"][str(depth)]) for point in curve], length)


def _reach(points: Sequence[tuple[float, float]], length: float) -> float:
    """Of (tokens, length); tokens count from the first point."""
    start, first = points[0]
    if first >= length:
        return 0.0
    for (tokens, before), (more_tokens, after) in itertools.pairwise(points):
        if after >= length:
            return tokens + (more_tokens - tokens) * (length - before) / (after - before) - start
    return float("inf")


def token_ratio(run: dict[str, Any], baseline: dict[str, Any], depth: int) -> float:
    """Trained tokens to the baseline's final acceptance length, as a share of those that the baseline needed."""
    goal = baseline["curve"][-1]["accept_length_by_depth"][str(depth)]
    needed = max(tokens_to_reach(baseline["curve"], goal, depth), 1.0)
    return tokens_to_reach(run["curve"], goal, depth) / needed


def phase_ratio(run: dict[str, Any], baseline: dict[str, Any], phases: Sequence[str], index: int) -> float:
    """`token_ratio` on the answers of one phase of a shift at the deepest chains, tokens counted from where the phase
    comes: nobody learns it before.
    """

    def points(one: dict[str, Any]) -> list[tuple[float, float]]:
        curve = one["curve"]
        first = next(at for at, point in enumerate(curve) if point["step"] * len(phases) >= index * one["steps"])
        return [(point["trained_tokens"], point["accept_length_by_domain"][phases[index]]) for point in curve[first:]]

    goal = points(baseline)[-1][1]
    return _reach(points(run), goal) / max(_reach(points(baseline), goal), 1.0)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One loss on one workload at one depth: a value of each seed."""

    workload: str
    depth: int
    loss: str
    lengths: tuple[float, ...]
    """Acceptance lengths after all steps."""
    to_ordinary: tuple[float, ...]
    """`token_ratio` to forward KL with the ordinary start and step."""
    to_baseline: tuple[float, ...]
    """`token_ratio` to forward KL with the trainer's."""

    def to_dict(self) -> dict[str, Any]:
        return {
            **vars(self),
            "lengths": [round(length, 4) for length in self.lengths],
            "to_ordinary": [finite(ratio) for ratio in self.to_ordinary],
            "to_baseline": [finite(ratio) for ratio in self.to_baseline],
        }


def finite(ratio: float) -> float | None:
    """For JSON, which has no infinity."""
    return None if ratio == float("inf") else round(ratio, 4)


def cells_of(runs: dict[Key, dict[str, Any]], depths: Sequence[int]) -> list[Cell]:
    """A cell for every loss, workload and depth, from runs that hold both baselines."""
    workloads, losses, seeds = _parts(runs)

    def ratios(workload: str, loss: str, baseline: str, depth: int) -> tuple[float, ...]:
        pairs = ((runs[workload, loss, seed], runs[workload, baseline, seed]) for seed in seeds)
        return tuple(token_ratio(run, other, depth) for run, other in pairs)

    def lengths(workload: str, loss: str, depth: int) -> tuple[float, ...]:
        return tuple(runs[workload, loss, seed]["curve"][-1]["accept_length_by_depth"][str(depth)] for seed in seeds)

    return [
        Cell(
            workload=workload,
            depth=depth,
            loss=loss,
            lengths=lengths(workload, loss, depth),
            to_ordinary=ratios(workload, loss, ORDINARY_BASELINE, depth),
            to_baseline=ratios(workload, loss, BASELINE, depth),
        )
        for loss, workload, depth in itertools.product(losses, workloads, depths)
    ]


def overall(cells: Iterable[Cell], values: Callable[[Cell], Iterable[float]]) -> dict[str, float]:
    """The median over workloads, depths and seeds for each loss."""
    by_loss: dict[str, list[float]] = {}
    for cell in cells:
        by_loss.setdefault(cell.loss, []).extend(values(cell))
    return {loss: statistics.median(found) for loss, found in by_loss.items()}


def table(cells: Sequence[Cell]) -> list[tuple[str, str]]:
    """Both tables in Markdown: a name and the rest of each line."""
    columns = list(dict.fromkeys(f"{cell.workload}, {cell.depth}" for cell in cells))
    losses = list(dict.fromkeys(cell.loss for cell in cells))
    to_ordinary = overall(cells, lambda cell: cell.to_ordinary)
    to_baseline = overall(cells, lambda cell: cell.to_baseline)

    def row(loss: str, write: Callable[[Cell], str], *more: str) -> tuple[str, str]:
        return f"| `{loss}` ", _line(*(write(cell) for cell in cells if cell.loss == loss), *more)

    return [
        ("| acceptance length ", _line(*columns)),
        ("|---", "|---" * len(columns) + "|"),
        *(row(loss, lambda cell: _spread(cell.lengths, 3)) for loss in losses),
        ("", ""),
        ("| trained tokens ", _line(*columns, f"to `{ORDINARY_BASELINE}`'s", f"to `{BASELINE}`'s")),
        ("|---", "|---" * (len(columns) + 2) + "|"),
        *(
            row(
                loss,
                lambda cell: _spread(cell.to_ordinary, 2, " ×"),
                f"**{_number(to_ordinary[loss], 2, ' ×')}**",
                _number(to_baseline[loss], 2, " ×"),
            )
            for loss in losses
        ),
    ]


def phase_table(runs: dict[Key, dict[str, Any]]) -> list[tuple[str, str]]:
    """In Markdown, for shifts between single domains: tokens to the ordinary baseline's length on each of them."""
    workloads, losses, seeds = _parts(runs)
    shifts = {one: one.split(">") for one in workloads if ">" in one and "+" not in one}
    if not shifts:
        return []

    def cell(workload: str, loss: str, index: int) -> str:
        pairs = ((runs[workload, loss, seed], runs[workload, ORDINARY_BASELINE, seed]) for seed in seeds)
        return _spread([phase_ratio(run, other, shifts[workload], index) for run, other in pairs], 2, " ×")

    columns = [(workload, index) for workload, phases in shifts.items() for index in range(len(phases))]
    return [
        ("", ""),
        ("| trained tokens since it came ", _line(*(f"{one}: {shifts[one][index]}" for one, index in columns))),
        ("|---", "|---" * len(columns) + "|"),
        *((f"| `{loss}` ", _line(*(cell(one, loss, index) for one, index in columns))) for loss in losses),
    ]


def _parts(runs: dict[Key, dict[str, Any]]) -> tuple[list[str], list[str], list[int]]:
    """Workloads, losses and seeds, in the order of the runs."""
    workloads, losses, seeds = zip(*runs, strict=True)
    return list(dict.fromkeys(workloads)), list(dict.fromkeys(losses)), list(dict.fromkeys(seeds))


def _line(*parts: str) -> str:
    return "".join(f"| {part} " for part in parts) + "|"


def _spread(values: Sequence[float], digits: int, unit: str = "") -> str:
    low, median, high = min(values), statistics.median(values), max(values)
    return f"{_number(median, digits, unit)} ({_number(low, 2)} … {_number(high, 2)})"


def _number(value: float, digits: int, unit: str = "") -> str:
    return "never" if value == float("inf") else f"{value:.{digits}f}{unit}"

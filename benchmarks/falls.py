"""Verifications beside those that the best version so far would have needed, and where these were far fewer."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from benchmarks.replayed import Answer, Served, Step, Table

FLOOR = 0.9
APART = 10
"""Windows between two falls; with fewer they are one, or a draft that is 12% worse would fall again and again."""
RECENT = 24
"""Answers on which a promoted version is compared with the best one."""


class Seen(NamedTuple):
    """One verification, and what the best version would have needed for the same tokens."""

    round: int
    at_s: float
    version: int
    committed: int
    best_rounds: float


@dataclass(frozen=True, kw_only=True)
class Fall:
    """A stretch below the floor, short returns above it included; `versions` served in its windows."""

    at_s: float
    rounds: int
    seconds: float
    lowest: float
    versions: frozenset[int]

    def overrun(self, random_versions: frozenset[int]) -> float:
        """Its length over the promised one."""
        if self.versions & random_versions:
            return min(self.rounds / 50, self.seconds / 5)
        return self.rounds / 2000


def ratios(seen: Sequence[Seen], window: int) -> np.ndarray:
    """Served accept length over the best one's, of every `window` verifications in a row."""
    sums = np.concatenate([[0.0], np.cumsum([one.best_rounds for one in seen])])
    return (sums[window:] - sums[:-window]) / window


def falls(seen: Sequence[Seen], window: int) -> list[Fall]:
    """All of them, in their order."""
    if len(seen) < window:
        return []
    by_window = ratios(seen, window)
    below = np.flatnonzero(by_window < FLOOR)
    found = []
    for part in np.split(below, np.flatnonzero(np.diff(below) > APART * window) + 1):
        if not len(part):
            continue
        start, stop = int(part[0]), int(part[-1]) + 1
        inside = seen[start : stop - 1 + window]
        first, last = inside[window - 1], inside[-1]
        found.append(
            Fall(
                at_s=first.at_s,
                rounds=last.round - first.round + 1,
                seconds=last.at_s - first.at_s,
                lowest=float(by_window[start:stop].min()),
                versions=frozenset(one.version for one in inside),
            )
        )
    return found


def lengths(seen: Sequence[Seen]) -> tuple[float, float]:
    """Served and best accept length."""
    committed = sum(one.committed for one in seen)
    best = sum(one.best_rounds for one in seen)
    return (committed / len(seen), committed / best) if seen else (float("nan"), float("nan"))


class Best:
    """The best version so far, and every verification beside it."""

    def __init__(self, first: Served, table: Table) -> None:
        self.served, self._table = first, table
        self.seen: list[Seen] = []
        self.recent: deque[Answer] = deque(maxlen=RECENT)

    def take(self, steps: list[Step]) -> None:
        for step in steps:
            pace = self._table.chains(self.served, step.answer).pace
            needed = float(pace[step.stop] - pace[step.start])
            self.seen.append(Seen(step.round, step.at_s, step.version, step.stop - step.start, needed))
            if step.stop == step.answer.length:
                self.recent.append(step.answer)
        steps.clear()

    def meet(self, promoted: Served) -> None:
        if not self.recent or self._rounds(promoted) <= self._rounds(self.served):
            self.served = promoted

    def _rounds(self, served: Served) -> float:
        return sum(float(self._table.chains(served, answer).pace[-1]) for answer in self.recent)


def by_minute(seen: Sequence[Seen]) -> list[dict[str, float]]:
    minutes: dict[int, list[Seen]] = {}
    for one in seen:
        minutes.setdefault(int(one.at_s // 60), []).append(one)
    found = []
    for minute, part in minutes.items():
        served, best = lengths(part)
        found.append(
            {"minute": minute, "served": round(served, 4), "best": round(best, 4), "version": part[-1].version}
        )
    return found

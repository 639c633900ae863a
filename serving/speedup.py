"""Speedup that is measured: a small share of rounds runs at depth 0 and gives the baseline at the same batch size."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass

BASELINE = "depth0_same_batch"
"""Name of the baseline: plain decoding by the same engine, in the same minutes, at equal batch size."""


class ControlShare:
    """Decides which rounds decode plainly, independently of what the round holds."""

    def __init__(self, share: float, seed: int = 0) -> None:
        self._share, self._random = share, random.Random(seed)

    def is_control(self) -> bool:
        return self._random.random() < self._share


@dataclass(frozen=True)
class Speedup:
    """`ratio` = time a token at depth 0 over time a token with drafting; None until both were seen.

    Compared batch size by batch size and weighted by the time that drafting rounds spent in each.
    """

    ratio: float | None
    baseline_ms_per_token: float | None
    baseline_rounds: int
    speculative_rounds: int


class SpeedupMeter:
    """Keeps (batch, drafted?, seconds, tokens) of the rounds of the last `window_s` seconds; thread-safe."""

    def __init__(self, window_s: float = 120.0) -> None:
        self._window_s = window_s
        self._rounds: deque[tuple[float, int, bool, float, int]] = deque()
        self._lock = threading.Lock()

    def add(self, *, batch: int, drafted: bool, seconds: float, committed: int) -> None:
        now = time.monotonic()
        with self._lock:
            self._rounds.append((now, batch, drafted, seconds, committed))
            while self._rounds[0][0] < now - self._window_s:
                self._rounds.popleft()

    def measure(self) -> Speedup:
        with self._lock:
            rounds = list(self._rounds)
        seconds: dict[tuple[int, bool], float] = defaultdict(float)
        tokens: dict[tuple[int, bool], int] = defaultdict(int)
        for _, batch, drafted, spent, committed in rounds:
            seconds[batch, drafted] += spent
            tokens[batch, drafted] += committed
        num_baseline = sum(1 for row in rounds if not row[2])
        return speedup(seconds, tokens, baseline_rounds=num_baseline, speculative_rounds=len(rounds) - num_baseline)


def speedup(
    seconds: dict[tuple[int, bool], float],
    tokens: dict[tuple[int, bool], int],
    *,
    baseline_rounds: int,
    speculative_rounds: int,
) -> Speedup:
    """Measured speedup from sums keyed by (batch size, drafted?).

    With drafting, batch size b took S_b seconds for N_b tokens; without, t_b seconds a token. The same tokens would
    have taken Σ N_b·t_b plainly, so the ratio is Σ N_b·t_b / Σ S_b over the batch sizes that have both.
    """
    both = [b for b, drafted in tokens if drafted and tokens[b, True] and tokens.get((b, False))]
    if not both:
        return Speedup(None, None, baseline_rounds, speculative_rounds)
    plain_s = sum(tokens[b, True] * seconds[b, False] / tokens[b, False] for b in both)
    drafted_tokens = sum(tokens[b, True] for b in both)
    return Speedup(
        ratio=plain_s / sum(seconds[b, True] for b in both),
        baseline_ms_per_token=1000 * plain_s / drafted_tokens,
        baseline_rounds=baseline_rounds,
        speculative_rounds=speculative_rounds,
    )

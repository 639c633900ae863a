"""Each engine's prefill and decode costs, measured on the samples that it has run.

Prefill costs seconds a token that the engine reads. A decoded token costs seconds that grow with the batch: a straight
line, fitted by least squares. Newer measurements count more. An engine with few measurements counts as the mean of all,
so that at first all engines are equal.
"""

from __future__ import annotations

import math

_ENOUGH_TOKENS = 500
_MEMORY_TOKENS = 8192
"""So many tokens later a measurement has lost 63% of its weight."""
_OUTLIER = 4.0
"""A measurement above so many times the mean counts as this: an engine that paused is not slow."""


class _Line:
    """A fit of seconds a token to the batch."""

    def __init__(self) -> None:
        self.sums = [0.0] * 5
        """Over tokens: 1, batch, seconds, batch², seconds · batch."""

    def add(self, batch: int, num_tokens: int, seconds: float) -> None:
        """`seconds` for all these tokens."""
        if self.sums[0]:
            seconds = min(seconds, _OUTLIER * num_tokens * self.sums[2] / self.sums[0])
        keep, n = math.exp(-num_tokens / _MEMORY_TOKENS), num_tokens
        new = (n, n * batch, seconds, n * batch**2, seconds * batch)
        self.sums = [keep * old + more for old, more in zip(self.sums, new, strict=True)]

    def at(self, batch: int) -> float:
        """Seconds a token in such a batch."""
        mean_batch, mean_s, square, product = (one / self.sums[0] for one in self.sums[1:])
        slope = max(product - mean_batch * mean_s, 0.0) / (square - mean_batch**2 + 1)  # 1: flat if batches are alike
        return max(mean_s + slope * (batch - mean_batch), mean_s / _OUTLIER)


class Cost:
    """Seconds a token on each engine; `unknown_s` while nothing is measured."""

    def __init__(self, unknown_s: float) -> None:
        self._unknown_s, self._lines = unknown_s, dict[str, _Line]()

    def measured(self, engine: str, num_tokens: int, seconds: float, *, batch: int = 0) -> None:
        """So many tokens, read or decoded for one sample of a batch, took so long."""
        self._lines.setdefault(engine, _Line()).add(batch, num_tokens, seconds)

    def at(self, engine: str | None, batch: int = 0) -> float:
        """The cost on an engine; None: on the mean engine."""
        if engine in self._lines and self._lines[engine].sums[0] >= _ENOUGH_TOKENS:
            return self._lines[engine].at(batch)
        found = self._lines.values()
        return sum(line.at(batch) for line in found) / len(found) if found else self._unknown_s

    def forget(self, engine: str) -> None:
        self._lines.pop(engine, None)

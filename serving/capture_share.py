"""How much of the traffic is captured: all of it while Redis and the trainer keep up, less before anything is lost.

Three figures each ask for a share of the finished traces, and the smallest share counts:

* stream: bytes that nobody has acked, of the stream's cap. At the cap the oldest go, and are lost;
* memory: what Redis uses, of its `maxmemory`. There it refuses every write, of the draft pointer as well;
* trainer: how long it needs for what waits, at the speed at which it takes traces while some wait. What it would learn
  from in ten minutes is stale by then.

Each share falls from 1 to the floor as floor^x while its figure rises from one bound to the other (x from 0 to 1). The
share settles where as much is captured as is taken. Because it falls by a factor and not by an amount, how fast it
settles depends on what the trainer takes, not on how many engines there are: each looks for itself, and they need not
know of one another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # The command line needs the default floor, and no Redis client for it.
    from speculator.ledger import StreamLag

REASONS = ("sampled_stream", "sampled_memory", "sampled_trainer")
"""Why sampling leaves a trace out: the figure that asks for the smallest share."""

DEFAULT_FLOOR = 0.01
_STREAM = (0.3, 0.8)
_MEMORY = (0.7, 0.9)
_TRAINER_S = (60.0, 300.0)
_SPEED_OVER_S = 30.0
"""A trainer that steps, publishes and gates takes nothing for seconds; one that takes nothing for longer is slow."""
_LEAST_WATCHED_S = 25.0
"""Of a trainer that had kept up no speed is known: it may be gone for 50 s, a restart, before that counts as one."""
_LONGEST_S = 10.0
"""Between two looks that are further apart the trainer may have had nothing to do."""


@dataclass(frozen=True, kw_only=True)
class StreamFigures:
    """One look at the stream and its Redis."""

    unacked_bytes: float
    max_bytes: int
    undelivered: int
    """Entries that no trainer has taken."""
    taken: int
    """Entries that trainers took since the stream began."""
    memory_share: float | None = None
    """Of `maxmemory`; None where there is no limit, or this user may not ask."""

    @classmethod
    def of(cls, lag: StreamLag, *, max_bytes: int, memory_share: float | None) -> StreamFigures:
        mean_bytes = lag.bytes / lag.length if lag.length else 0.0
        return cls(
            unacked_bytes=mean_bytes * (lag.pending + lag.undelivered),
            max_bytes=max_bytes,
            undelivered=lag.undelivered,
            taken=lag.acked + lag.pending,
            memory_share=memory_share,
        )


class CaptureShare:
    """Of one engine. `share` is in [floor, 1], `reason` one of REASONS: what decided it last."""

    def __init__(self, floor: float) -> None:
        self._floor = floor
        self.share, self.reason = 1.0, REASONS[0]
        self._last: tuple[StreamFigures, float] | None = None
        self._watched_s = self._num_taken = 0.0
        """While entries waited: seconds, and what trainers took in them; of the last _SPEED_OVER_S, older ones fade."""

    def look(self, figures: StreamFigures, now_s: float) -> None:
        self._measure_trainer(figures, now_s)
        positions = (
            _position(figures.unacked_bytes / figures.max_bytes, _STREAM),
            _position(figures.memory_share or 0.0, _MEMORY),
            _position(self._delay_s(figures), _TRAINER_S),
        )
        highest, self.reason = max(zip(positions, REASONS, strict=True), key=lambda one: one[0])
        self.share = self._floor**highest

    def _measure_trainer(self, figures: StreamFigures, now_s: float) -> None:
        last, self._last = self._last, (figures, now_s)
        if last is None or figures.taken == 0:
            return
        before, seconds = last[0], now_s - last[1]
        # A trainer that emptied the stream in between was waiting for us: that says nothing about its speed.
        if not (before.undelivered and figures.undelivered and 0 < seconds <= _LONGEST_S):
            return
        fade = math.exp(-seconds / _SPEED_OVER_S)
        self._watched_s = fade * self._watched_s + seconds
        self._num_taken = fade * self._num_taken + max(figures.taken - before.taken, 0)

    def _delay_s(self, figures: StreamFigures) -> float:
        """Where no trainer has ever read, only the room counts."""
        if self._watched_s < _LEAST_WATCHED_S or figures.undelivered == 0:
            return 0.0
        return figures.undelivered * self._watched_s / self._num_taken if self._num_taken > 0 else math.inf


def _position(value: float, bounds: tuple[float, float]) -> float:
    """0 up to the lower bound, 1 from the upper one on."""
    low, high = bounds
    return min(max((value - low) / (high - low), 0.0), 1.0)

"""Choose the share of traffic that is captured: all while Redis and the trainer keep up, less before anything is lost.

Each of four figures gives a share of the traces, and the smallest share counts:

* stream: unacknowledged bytes over the stream's cap. At the cap Redis drops the oldest traces;
* memory: Redis's memory over its `maxmemory`. There it refuses every write, of the draft pointer as well;
* trainer: the time that it needs for the waiting traces at its measured speed. After ten minutes they are stale;
* buffer: the part of the engine's buffer that running requests hold, where that is bounded.

Each share falls from 1 to the floor as floor^x while its figure rises from one bound to the other (x from 0 to 1). The
share settles where as much is captured as the trainer takes. It falls by a factor and not by an amount, so how fast it
settles does not depend on the number of engines: each decides alone.

Traces are drawn at random, whatever they contain, so those that are kept represent the traffic.

Rows behind rejections have a share and a budget of their own: `BranchSampler`.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import structlog

from speculator.errors import StreamError, type_and_place

if TYPE_CHECKING:
    # The command line needs the default floor, and no Redis client for it.
    from speculator.redis.stream_accounting import StreamLag

SAMPLING_REASONS = ("sampled_stream", "sampled_memory", "sampled_trainer", "sampled_buffer")
"""Why sampling leaves a trace out: the figure that asks for the smallest share."""

DEFAULT_FLOOR = 0.01
POLL_EVERY_S = 1.0
_STREAM = (0.3, 0.8)
_MEMORY = (0.7, 0.9)
_TRAINER_S = (60.0, 300.0)
_BUFFER = (0.5, 0.9)
_SPEED_OVER_S = 30.0
"""Period over which the trainer's speed is measured: a step, a gate or a publication stops its reading for seconds."""
_LEAST_WATCHED_S = 25.0
"""Measured time below which the trainer's speed is unknown. A trainer that had kept up may be gone for 50 s, as in a
restart, before it counts as slow.
"""
_LONGEST_S = 10.0
"""Longest time between two looks that is measured: in a longer one the trainer may have been idle."""

BRANCH_OUTCOMES = ("kept", "budget", "cut")
"""What becomes of rows behind rejections that were drawn: they are in a trace, were over the budget, or lie behind the
end of their answer."""
DEFAULT_BRANCH_SHARE, MAX_BRANCH_SHARE = 0.02, 0.1
BRANCH_ROOM = 0.25
"""Most rows behind rejections for each committed one, which takes as many bytes in a trace."""

log = structlog.get_logger(__name__)


class BranchSampler:
    """Draws the verifications of captured requests that keep the rows of all their rejected proposals.

    A verification computes features and a distribution at every proposal, and a trace needs those of the committed
    ones. At most `BRANCH_ROOM` times as many are kept as were committed. For one thread: it never waits and needs
    nothing of the device. The same verifications are drawn in every run.
    """

    def __init__(self, share: float, *, over_budget: Callable[[int], object]) -> None:
        """`over_budget` is called with the number of rows that were drawn and had no room."""
        self._over_budget, self._rng = over_budget, random.Random(0)
        self._log_passed = math.log1p(-share) if share < 1 else -math.inf
        """Logarithm of the probability that a verification is not drawn."""
        self._room = 0.0
        self._ahead = self._gap()
        """How many verifications with rejections come before the next one that is drawn."""

    def drawn(self, committed: Sequence[int], rejected: Sequence[int]) -> list[int]:
        """Which of these verifications keep their rejected rows, by the rows of each that were committed and rejected.

        Call it for all verifications, since committed rows make room.
        """
        self._room += BRANCH_ROOM * sum(committed)
        candidates = [index for index, count in enumerate(rejected) if count > 0]
        kept = []
        while self._ahead < len(candidates):
            index = candidates[int(self._ahead)]
            if self._has_room(rejected[index]):
                kept.append(index)
            self._ahead += 1 + self._gap()
        self._ahead -= len(candidates)
        return kept

    def _gap(self) -> float:
        """How many are passed over before one is drawn: geometrically distributed, infinite for a share of 0."""
        return math.log(1 - self._rng.random()) // self._log_passed if self._log_passed else math.inf

    def _has_room(self, num_rows: int) -> bool:
        if num_rows > self._room:
            self._over_budget(num_rows)
            return False
        self._room -= num_rows
        return True


class WatchedStream(Protocol):
    """What the sampler needs of a `speculator.redis.trace_stream.TraceStream`."""

    max_bytes: int

    def lag(self) -> StreamLag: ...

    def memory_share(self) -> float | None: ...


class CaptureSampler:
    """One engine's share of kept traces, in [floor, 1]. While Redis is away the last share stands.

    `poll` and `poll_idle` are for one thread; `follows` and `keeps` draw at random, for any.
    """

    def __init__(
        self,
        stream: WatchedStream,
        *,
        floor: float,
        at_start: bool = False,
        buffer_share: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        """`at_start`: draw as an answer begins, because following it has a cost, and not at its end.

        `buffer_share` says how full the engine's buffer is, at the moment.
        """
        self._stream, self._floor, self._at_start = stream, floor, at_start
        self._buffer_share = buffer_share
        self._clock, self._rng = clock, rng or random.Random()
        self._looked_at = 1.0, SAMPLING_REASONS[0]
        """The smallest share at the last poll, and which of SAMPLING_REASONS asked for it."""
        self._polled_s = -math.inf
        self.num_acked: int | None = None
        """Traces that trainers had acknowledged since the stream began, at the last look; None before the first."""
        self._last: tuple[int, int, float] | None = None
        """Entries that waited, entries that trainers had ever taken, and when that was."""
        self._watched_s = self._num_taken = 0.0
        """While entries waited: seconds, and what trainers took in them; of the last _SPEED_OVER_S, older ones fade."""

    @property
    def share(self) -> float:
        return self._now[0]

    @property
    def reason(self) -> str:
        """Which of SAMPLING_REASONS decides the share."""
        return self._now[1]

    @property
    def _now(self) -> tuple[float, str]:
        of_buffer = self._floor ** _position(self._buffer_share(), _BUFFER)
        return (of_buffer, "sampled_buffer") if of_buffer < self._looked_at[0] else self._looked_at

    def follows(self) -> bool:
        """Draw whether to capture the answer that begins now."""
        return not self._at_start or self._rng.random() < self.share

    def keeps(self) -> bool:
        """Whether to keep a finished trace."""
        return self._at_start or self._rng.random() < self.share

    def poll(self) -> None:
        """Set the share anew where the last poll is old enough. Raises nothing: whatever fails, the share stands.

        A share below 1 must recover, and the trainer's speed shows only in polls that are close together: while no
        trace comes, call `poll_idle`.
        """
        now_s = self._clock()
        if now_s - self._polled_s < POLL_EVERY_S:
            return
        self._look(now_s, decides=True)
        # Set after the poll: one that waits for an unreachable Redis must not be due again at once.
        self._polled_s = self._clock()

    def poll_idle(self) -> None:
        """`poll` for times without a trace, when a share of 1 stands: traces may then wait for a trainer that is away,
        and nothing is lost.
        """
        if self.share < 1:
            self.poll()
        else:
            self._look(self._clock(), decides=False)

    def _look(self, now_s: float, *, decides: bool) -> None:
        try:
            lag = self._stream.lag()
            self.num_acked = lag.acked
            if decides:
                self._decide(lag, self._stream.max_bytes, self._stream.memory_share(), now_s)
        except StreamError as error:
            log.debug("the capture share is not updated", error=str(error))
        except Exception as error:
            log.error("the capture share is not updated, the stream cannot be read", error=type_and_place(error))

    def _decide(self, lag: StreamLag, max_bytes: int, memory_share: float | None, now_s: float) -> None:
        self._measure_trainer(lag, now_s)
        mean_bytes = lag.bytes / lag.length if lag.length else 0.0
        positions = (
            _position(mean_bytes * (lag.pending + lag.undelivered) / max_bytes, _STREAM),
            _position(memory_share or 0.0, _MEMORY),
            _position(self._delay_s(lag.undelivered), _TRAINER_S),
        )
        highest, reason = max(zip(positions, SAMPLING_REASONS[:3], strict=True), key=lambda one: one[0])
        self._looked_at = self._floor**highest, reason

    def _measure_trainer(self, lag: StreamLag, now_s: float) -> None:
        taken = lag.acked + lag.pending
        last, self._last = self._last, (lag.undelivered, taken, now_s)
        if last is None or taken == 0:
            return
        num_waited, taken_before, seconds = last[0], last[1], now_s - last[2]
        # A trainer that emptied the stream in between was waiting for us: that says nothing about its speed.
        if not (num_waited and lag.undelivered and 0 < seconds <= _LONGEST_S):
            return
        fade = math.exp(-seconds / _SPEED_OVER_S)
        self._watched_s = fade * self._watched_s + seconds
        self._num_taken = fade * self._num_taken + max(taken - taken_before, 0)

    def _delay_s(self, num_waiting: int) -> float:
        """Seconds that the trainer needs for what waits; 0 while its speed is unknown."""
        if self._watched_s < _LEAST_WATCHED_S or num_waiting == 0:
            return 0.0
        return num_waiting * self._watched_s / self._num_taken if self._num_taken > 0 else math.inf


def _position(value: float, bounds: tuple[float, float]) -> float:
    """0 up to the lower bound, 1 from the upper one on."""
    low, high = bounds
    return min(max((value - low) / (high - low), 0.0), 1.0)

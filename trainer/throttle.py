"""Rests of the trainer beside busy engines.

`Throttle` makes the trainer's share of its time fall as the load of the engines of its machine rises:

    share = 1 − busy · (1 − busy_share)

`busy` is the share of time in steps of this machine's busiest engine (speculator/redis/control_plane.py). A turn of the
loop that took t seconds is followed by a rest of t · (1/share − 1) seconds, on a CPU and on a GPU alike.

While all engines leave the draft head asleep, for `ASLEEP_S` and longer, and nothing suggests that more training would
wake it, the share is at most `RESTING_SHARE`: each new trace still gets a step now and then, so that drift is noticed.

On a GPU that an engine has, too, a step of one takes longer while the other computes. So the share is at most
`card_share` there from the moment on in which requests are known to run until none does. At 1% fewer than one in a
hundred of a client's tokens fall into a turn, however long that makes them.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from speculator.errors import StreamError
from speculator.redis.control_plane import are_heads_asleep, busiest_here, is_card_busy
from trainer.metrics import TrainerMetrics
from trainer.ranks import Ranks

ASLEEP_S = 60.0
RESTING_SHARE = 0.05
LOOK_S = 1.0
"""Between two looks at the engines' reports, during a rest too: a rest ends when they become idle."""
LONGEST_REST_S = 30.0
"""Even after a long turn: traces and orders to erase wait meanwhile."""
LONGEST_CARD_REST_S = 300.0
"""The same on a GPU that an engine has, too: that of a gate's decision of 3 s at 1%."""


class Throttle:
    """Rests after each turn of the training loop. Used by one thread.

    Several ranks rest together, as the machine of rank 0 asks for: otherwise one would wait for the other, count that
    as its own turn and rest the longer.
    """

    def __init__(
        self,
        engines: Callable[[], Mapping[str, Mapping[str, str]]],
        ranks: Ranks,
        metrics: TrainerMetrics,
        *,
        busy_share: float,
        card_share: float = 1.0,
        card: str = "",
        may_gain: Callable[[], bool] = lambda: True,
        tell_resting: Callable[[bool], None] = lambda is_resting: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`engines` gives the engines' reports or raises StreamError; `busy_share` is the trainer's share of its time
        beside an engine that is always busy, `card_share` that beside one of the same GPU, the `card`, both above 0
        and at most 1. `clock` gives seconds.
        """
        self._engines, self._ranks, self._metrics, self._clock = engines, ranks, metrics, clock
        self._busy_share, self._card_share, self._card = busy_share, card_share, card
        self._may_gain, self._tell_resting = may_gain, tell_resting
        self._share, self._longest_s = 1.0, LONGEST_REST_S
        self._asleep_s: float | None = None
        """Since when all heads have been asleep."""
        self._is_resting = False
        self._looked_s = -math.inf
        metrics.time_share.set(1.0)

    def rest(self, worked_s: float, stop: threading.Event) -> None:
        """Rest after a turn of `worked_s` seconds; not once `stop` is set."""
        began_s, rested_s = self._clock(), 0.0
        while pause_s := self._ranks.lead(partial(self._pause_ms, worked_s, rested_s)) / 1000:
            # Ranks go on in the same order where one is told to stop: it does not wait, and asks as often.
            stop.wait(pause_s)
            # A look at the engines takes time, too, where Redis hangs.
            rested_s = max(rested_s + pause_s, self._clock() - began_s)
        self._metrics.yielded.inc(self._clock() - began_s)

    def _pause_ms(self, worked_s: float, rested_s: float) -> int:
        """Until the rest is over, or until the next look."""
        self._look()
        owed_s = min(worked_s * (1 / self._share - 1), self._longest_s) - rested_s
        return int(1000 * min(max(owed_s, 0.0), LOOK_S))

    def _look(self) -> None:
        """Without Redis the engines are as busy as they were."""
        if self._clock() - self._looked_s < LOOK_S:
            return
        with suppress(StreamError):
            reports = self._engines()
            self._share, self._longest_s = 1 - busiest_here(reports) * (1 - self._busy_share), LONGEST_REST_S
            if self._card_share < self._share and is_card_busy(reports, self._card):
                self._share, self._longest_s = self._card_share, LONGEST_CARD_REST_S
            was_resting, self._is_resting = self._is_resting, self._is_unasked(reports)
            if self._is_resting:
                self._share = min(self._share, RESTING_SHARE)
            self._metrics.resting.set(self._is_resting)
            if self._is_resting or was_resting:
                self._tell_resting(self._is_resting)
        self._looked_s = self._clock()
        self._metrics.time_share.set(self._share)

    def _is_unasked(self, reports: Mapping[str, Mapping[str, str]]) -> bool:
        """Whether no engine has asked the head for long, and more training would hardly change that."""
        if not are_heads_asleep(reports):
            self._asleep_s = None
            return False
        if self._asleep_s is None:
            self._asleep_s = self._clock()
        return self._clock() - self._asleep_s >= ASLEEP_S and not self._may_gain()

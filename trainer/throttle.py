"""Pause the trainer beside busy engines.

`Throttle` lowers the share of time in which the trainer computes as the load of the engines on its machine rises:

    share = 1 − busy · (1 − busy_share)

`busy` is the share of time in steps of this machine's busiest engine (speculator/redis/control_plane.py). A turn of the
loop that took t seconds is followed by a rest of t · (1/share − 1) seconds, on a CPU and on a GPU alike.

When no engine has used the draft head for `ASLEEP_S`, and nothing suggests that more training would change that, the
share is at most `RESTING_SHARE`: each new trace still gets a step now and then, so that drift is noticed.

On a GPU that trainer and engine share, each slows the other's steps. There the share is at most `card_share` while
requests run. At 1% fewer than one in a hundred of a client's tokens are slowed down, by however much.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from speculator.errors import StreamError
from speculator.redis.control_plane import are_heads_asleep, busiest_local_engine, is_gpu_busy
from trainer.metrics import TrainerMetrics
from trainer.ranks import Ranks

ASLEEP_S = 60.0
RESTING_SHARE = 0.05
POLL_S = 1.0
"""Seconds between two reads of the engines' reports, during a rest too: a rest ends when the engines become idle."""
LONGEST_REST_S = 30.0
"""Limit even after a long turn: new traces wait meanwhile."""
LONGEST_CARD_REST_S = 300.0
"""Limit on a GPU shared with an engine: the rest after a gate decision of 3 s at 1%."""


class Throttle:
    """Rests after each turn of the training loop. Used by one thread.

    All ranks rest as long as rank 0's machine needs. Otherwise a rank would wait for another's rest, count that wait as
    work and rest longer itself.
    """

    def __init__(
        self,
        engines: Callable[[], Mapping[str, Mapping[str, str]]],
        ranks: Ranks,
        metrics: TrainerMetrics,
        *,
        busy_share: float,
        card_share: float = 1.0,
        gpu: str = "",
        may_gain: Callable[[], bool] = lambda: True,
        set_trainer_resting: Callable[[bool], None] = lambda is_resting: None,
        forget: Callable[[], None] = lambda: None,
        is_refused: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`engines` gives the engines' reports or raises StreamError. `busy_share` is the trainer's share of time
        beside an engine that is always busy, `card_share` that on a GPU (`gpu`) shared with one, both in (0, 1].
        `forget` carries out erasure orders; it must not wait for other ranks. `is_refused` says whether Redis refuses
        writes. `clock` gives seconds.
        """
        self._engines, self._ranks, self._metrics, self._clock = engines, ranks, metrics, clock
        self._busy_share, self._card_share, self._gpu = busy_share, card_share, gpu
        self._may_gain, self._tell_resting, self._forget = may_gain, set_trainer_resting, forget
        self._is_refused = is_refused
        self._reports: Mapping[str, Mapping[str, str]] = {}
        self._share, self._longest_s = 1.0, LONGEST_REST_S
        self._asleep_s: float | None = None
        """When all engines had stopped using the head, by `clock`; None while one uses it."""
        self._is_resting = False
        self._polled_s = -math.inf
        metrics.time_share.set(1.0)

    def rest(self, worked_s: float, stop: threading.Event) -> None:
        """Rest after a turn of `worked_s` seconds; not once `stop` is set."""
        began_s, rested_s = self._clock(), 0.0
        while pause_s := self._ranks.run_on_leader(partial(self._pause_ms, worked_s, rested_s)) / 1000:
            # A rank with `stop` set does not wait here, and still calls `run_on_leader` as often as the other ranks.
            stop.wait(pause_s)
            # A rest may outlast the time in which `slipstream tenants erase` expects a report.
            self._forget()
            # Reading the engines' reports takes time, too, where Redis hangs.
            rested_s = max(rested_s + pause_s, self._clock() - began_s)
        self._metrics.yielded.inc(self._clock() - began_s)

    def _pause_ms(self, worked_s: float, rested_s: float) -> int:
        """Milliseconds until the rest is over, or until the next read of the reports."""
        self._poll()
        owed_s = min(worked_s * (1 / self._share - 1), self._longest_s) - rested_s
        return int(1000 * min(max(owed_s, 0.0), POLL_S))

    def _poll(self) -> None:
        """Read the engines' reports and set the share; without Redis the last reports hold."""
        if self._clock() - self._polled_s < POLL_S:
            return
        with suppress(StreamError):
            reports = self._engines()
            if self._is_refused():
                # Busy engines' reports expire as well then: they cannot renew them.
                reports = {**self._reports, **reports}
            self._reports = reports
            self._share, self._longest_s = 1 - busiest_local_engine(reports) * (1 - self._busy_share), LONGEST_REST_S
            if self._card_share < self._share and is_gpu_busy(reports, self._gpu):
                self._share, self._longest_s = self._card_share, LONGEST_CARD_REST_S
            was_resting, self._is_resting = self._is_resting, self._is_head_unused(reports)
            if self._is_resting:
                self._share = min(self._share, RESTING_SHARE)
            self._metrics.resting.set(self._is_resting)
            if self._is_resting or was_resting:
                self._tell_resting(self._is_resting)
        self._polled_s = self._clock()
        self._metrics.time_share.set(self._share)

    def _is_head_unused(self, reports: Mapping[str, Mapping[str, str]]) -> bool:
        """Whether no engine has used the head for `ASLEEP_S`, and more training would hardly change that."""
        if not are_heads_asleep(reports):
            self._asleep_s = None
            return False
        if self._asleep_s is None:
            self._asleep_s = self._clock()
        return self._clock() - self._asleep_s >= ASLEEP_S and not self._may_gain()

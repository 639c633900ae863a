"""What became of published versions, as far as it steers the trainer: the lifecycle beside the store says it.

A version that was rolled back or barred is no base to go on from: the trainer starts again from the last good one. Two
versions in a row that engines rolled back mean that the gate does not see what live traffic sees, so publishing pauses:

    pause = publish_pause_s · 2^(n − 2), at most MAX_PAUSE_S, from the last of n ≥ 2 rollbacks in a row

Then one version is published on trial, and the next one waits for what becomes of it: promoted, everything is as
before; rolled back, the pause is twice as long. A promotion by an operator ends it at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import structlog

from speculator.errors import StoreError, StreamError
from speculator.versions.lifecycle import BARRED, Lifecycle, State
from trainer.metrics import TrainerMetrics

log = structlog.get_logger()

MAX_PAUSE_S = 24 * 3600.0
LOOK_INTERVAL_S = 1.0
_UNDECIDED = frozenset({State.SCORED, State.LIVE})


def pause_s(num_rollbacks: int, first_pause_s: float) -> float:
    """How long to publish nothing after so many rollbacks in a row, the last one of them just now."""
    if num_rollbacks < 2:
        return 0.0
    # Far below the largest exponent, and far above what MAX_PAUSE_S leaves of it.
    return min(first_pause_s * 2.0 ** min(num_rollbacks - 2, 100), MAX_PAUSE_S)


class RollbackWatch:
    """Rank 0's view of the lifecycle. What cannot be read now is read next time: learning goes on meanwhile."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        metrics: TrainerMetrics,
        *,
        published: Callable[[], int | None],
        first_pause_s: float,
        clock: Callable[[], float],
    ) -> None:
        """`published` gives the version that the pointer names, or raises StreamError; `clock` seconds since the epoch,
        as the lifecycle's transitions have them.
        """
        self._lifecycle, self._metrics, self._published = lifecycle, metrics, published
        self._first_pause_s, self._clock = first_pause_s, clock
        self._looked = (0, -math.inf)
        self.paused = False
        """Nothing may be published now."""
        metrics.publishing_paused.set(0)

    def look(self, version: int) -> int | None:
        """The version to start again from where `version`, the one that the weights descend from, is barred; None where
        nothing has to change. Looks at a version at most every LOOK_INTERVAL_S.
        """
        now_s, before = self._clock(), self._looked
        if version == before[0] and now_s - before[1] < LOOK_INTERVAL_S:
            return None
        self._looked = (version, now_s)
        try:
            self._heed_rollbacks(version, now_s)
            if self._lifecycle.state(version) not in BARRED:
                return None
            return self._lifecycle.last_good() or self._lifecycle.newest_servable()
        except StoreError as error:
            log.warning("the states of the drafts cannot be read", error=str(error))
            return None

    def _heed_rollbacks(self, version: int, now_s: float) -> None:
        rollbacks = self._lifecycle.rollbacks_in_a_row()
        until_s = 0.0
        if len(rollbacks) >= 2:
            until_s = rollbacks[-1].at_ms / 1000 + pause_s(len(rollbacks), self._first_pause_s)
        on_trial = len(rollbacks) >= 2 and self._is_on_trial(version)
        paused = now_s < until_s or on_trial
        if paused == self.paused:
            return
        self.paused = paused
        self._metrics.publishing_paused.set(paused)
        numbers = {"num_rollbacks": len(rollbacks), "until_ms": int(1000 * until_s), "on_trial": on_trial}
        if paused and not on_trial:
            log.error("publishing paused: engines rolled back one version after the other", **numbers)
        else:
            log.info("publishing waits for a trial" if paused else "publishing goes on", **numbers)
        self._lifecycle.events.append(
            "publishing_paused" if paused else "publishing_resumed", actor="trainer", **numbers
        )

    def _is_on_trial(self, version: int) -> bool:
        """Nobody tries what the pointer does not name, such as a version scored just before the trainer was killed."""
        if self._lifecycle.state(version) not in _UNDECIDED:
            return False
        try:
            return self._published() == version
        except StreamError:
            return True

"""The trainer gives way to the engines of its machine: it rests between steps, and the kernel runs it last.

`Throttle` makes the trainer's share of its time fall as the load of the engines rises:

    share = 1 − busy · (1 − busy_share)

`busy` is the share of time in steps of this machine's busiest engine (speculator/redis/control_plane.py). A turn of the
loop that took t seconds is followed by a rest of t · (1/share − 1) seconds, on a CPU and on a GPU alike.

Under SCHED_IDLE a thread runs where no other thread wants the core, and loses it at once. That alone is not enough: two
threads on two cores still share caches and memory.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import structlog

from speculator.errors import StreamError
from speculator.redis.control_plane import busiest_here
from trainer.metrics import TrainerMetrics
from trainer.ranks import Ranks

log = structlog.get_logger()

_CGROUPS = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_AUTOGROUP = Path("/proc/self/autogroup")
_AUTOGROUPS_ENABLED = Path("/proc/sys/kernel/sched_autogroup_enabled")

LOOK_S = 1.0
"""Between two looks at the engines' reports, during a rest too: a rest ends when they become idle."""
LONGEST_REST_S = 30.0
"""Even after a long turn: traces and orders to erase wait meanwhile."""


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`engines` gives the engines' reports or raises StreamError; `busy_share` is the trainer's share of its time
        beside an engine that is always busy, above 0 and at most 1. `clock` gives seconds.
        """
        self._engines, self._ranks, self._metrics, self._clock = engines, ranks, metrics, clock
        self._busy_share, self._share = busy_share, 1.0
        self._looked_s = -math.inf
        metrics.time_share.set(1.0)

    def rest(self, worked_s: float, stop: threading.Event) -> None:
        """Rest after a turn of `worked_s` seconds; not once `stop` is set."""
        if self._busy_share == 1:
            return
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
        owed_s = min(worked_s * (1 / self._share - 1), LONGEST_REST_S) - rested_s
        return int(1000 * min(max(owed_s, 0.0), LOOK_S))

    def _look(self) -> None:
        """Without Redis the engines are as busy as they were."""
        if self._clock() - self._looked_s < LOOK_S:
            return
        with suppress(StreamError):
            self._share = 1 - busiest_here(self._engines()) * (1 - self._busy_share)
        self._looked_s = self._clock()
        self._metrics.time_share.set(self._share)


def give_way_in_the_kernel() -> None:
    """Let this thread, and those that it starts, run where no other wants the core; for good. Only Linux can."""
    if not hasattr(os, "SCHED_IDLE"):
        return
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError as error:
        log.warning("this system refuses SCHED_IDLE: the trainer stays at its niceness", error=str(error))


def give_way_as_a_session(nice: int) -> None:
    """Tell the kernel, or whoever runs this process, that an engine's need of a core goes first.

    Linux weighs a control group with a CPU weight of its own, a container's or a service's, as a whole: niceness counts
    within it. Elsewhere, with `sched_autogroup_enabled`, it weighs sessions alike: a trainer at 19 takes half of the
    core that an engine of another session wants. A session that this process leads is its own, and is made as nice as
    it is, `nice`; another has more processes in it, and stays.
    """
    if nice <= 0 or not hasattr(os, "getsid"):
        return
    if _has_cpu_share():
        log.info(
            "niceness counts within this container or service alone: give it less of the CPU than the engine "
            "(cpu_shares in compose, CPUWeight= in systemd, CPU requests in Kubernetes)"
        )
        return
    if not _has_autogroups():
        return
    if os.getsid(0) != os.getpid():
        log.info("niceness counts within this session alone: start the trainer with setsid beside an engine elsewhere")
        return
    try:
        _AUTOGROUP.write_text(str(nice))
    except OSError as error:
        log.warning("this session's share of a core stays as it is", error=str(error))


def _has_cpu_share() -> bool:
    """Whether this process is in a control group, of either version, for which the kernel shares the CPU by weights."""
    try:
        groups = [line.split(":", 2) for line in _CGROUPS.read_text().splitlines()]
    except OSError:
        return False
    for _, controllers, group in groups:
        if "cpu" in controllers.split(","):
            return group != "/"
        if not controllers:
            # Only the root has no weight; a container may see its own group as the root's path.
            folder = _CGROUP_ROOT / group.strip("/")
            return any((each / "cpu.weight").exists() for each in (folder, *folder.parents))
    return False


def _has_autogroups() -> bool:
    try:
        return _AUTOGROUP.exists() and _AUTOGROUPS_ENABLED.read_text().strip() == "1"
    except OSError:
        return False

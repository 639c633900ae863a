"""The trainer gives way to serving on its machine, in the middle of a step.

Each module that the trainer's thread runs, forward and backward, in training, a review or the gate's comparison, and
the optimiser, first asks `Sharing` whether there is room, and waits where there is none. None of the code that computes
knows of it. (To ask before every operation, with a TorchDispatchMode, made steps 10 to 40% longer.)

Beneath that the kernel gives way too: under SCHED_IDLE a thread runs where no other thread wants the core, and loses it
at once. That alone is not enough: two threads on two cores still share caches and memory.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import structlog
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from speculator.cores import num_cores
from speculator.pulse import EngineStep, PulseBoard, Serving
from trainer.config import TrainerConfig
from trainer.metrics import TrainerMetrics
from trainer.sharing import SHORTEST_SLICE_S, Sharing

log = structlog.get_logger()

_CGROUPS = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_AUTOGROUP = Path("/proc/self/autogroup")
_AUTOGROUPS_ENABLED = Path("/proc/sys/kernel/sched_autogroup_enabled")

POLL_S = 0.005
"""How long idle cores may go unnoticed."""
_LOOK_EVERY_NS = 300_000
_MERGE_NS = 1_000_000
_REMEMBERED_S = 30.0
"""Longer than any step of an engine."""


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


def idle_threads(config: TrainerConfig) -> int:
    """CPU threads while no engine works."""
    if config.idle_threads is not None:
        return config.idle_threads
    return max(num_cores(), config.num_threads)


@contextmanager
def yielding(
    config: TrainerConfig,
    metrics: TrainerMetrics,
    device: torch.device,
    stop: threading.Event,
    *,
    num_ranks: int = 1,
) -> Iterator[None]:
    """What computes within it gives way to the engines of `config.pulse_dir`, until `stop` is set.

    Processes that train together do not: one that paused would keep the others waiting, at last for too long.
    """
    if config.pulse_dir is not None and num_ranks > 1:
        log.warning("processes that train together do not pause for serving, they have their niceness alone")
    if config.pulse_dir is None or num_ranks > 1:
        yield
        return
    board = PulseBoard(config.pulse_dir)
    with ExitStack() as opened:
        opened.callback(board.close)
        opened.enter_context(
            Yielding(
                board,
                Sharing(budget=config.serving_budget),
                metrics,
                num_threads=config.num_threads,
                idle_threads=idle_threads(config),
                # What was launched on a GPU goes on there: while serving is busy each module ends before the next.
                drain=torch.cuda.synchronize if device.type == "cuda" else _nothing,
                stop=stop,
            )
        )
        yield


class _Stretch(NamedTuple):
    """The trainer computed; `is_beside`: with leave to, although serving was busy."""

    begin_ns: int
    end_ns: int
    is_beside: bool


class Yielding:
    """While it is entered, what the thread that entered it computes may wait."""

    def __init__(
        self,
        board: PulseBoard,
        sharing: Sharing,
        metrics: TrainerMetrics,
        *,
        num_threads: int,
        idle_threads: int,
        drain: Callable[[], object],
        stop: threading.Event,
        clock: Callable[[], int] = time.monotonic_ns,
        cpu_clock: Callable[[], int] = time.process_time_ns,
    ) -> None:
        """`num_threads` beside a busy engine or where no engine is known, `idle_threads` while all of them rest."""
        self._board, self._sharing, self._metrics = board, sharing, metrics
        self._num_threads, self._idle_threads = num_threads, idle_threads
        self._drain, self._stop = drain, stop
        self._clock, self._cpu_clock = clock, cpu_clock
        self._serving = Serving()
        self._looked_ns = self._began_ns = self._began_cpu_ns = 0
        self._threads = 0
        self._thread = 0
        self._stretches: deque[_Stretch] = deque()
        self._hooks = ExitStack()

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        self._began_ns, self._began_cpu_ns = self._clock(), self._cpu_clock()
        self._set_threads(self._num_threads)
        for hook in (
            register_module_forward_hook(self._after_module),
            register_optimizer_step_pre_hook(self._before_update),
        ):
            self._hooks.callback(hook.remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.close()
        self._set_threads(self._num_threads)

    # The hooks are everybody's: who else computes in this process, an engine perhaps, goes on.

    def _before_update(self, *_: object) -> None:
        if threading.get_ident() == self._thread:
            self._breathe()

    def _after_module(self, module: nn.Module, inputs: object, output: object) -> None:
        if threading.get_ident() != self._thread:
            return
        self._breathe()
        if isinstance(output, Tensor) and output.requires_grad:
            # In the backward pass, before this module's part of it; on a GPU that is another thread, while ours waits.
            output.register_hook(lambda _: self._breathe())  # type: ignore[no-untyped-call]

    def _breathe(self) -> None:
        """Between two pieces of work."""
        if self._serving.is_busy:
            self._drain()
        now_ns, used_ns = self._clock(), self._cpu_clock() - self._began_cpu_ns
        # What it did not compute it waited, for traces or for a core.
        self._computed(max(self._began_ns, now_ns - used_ns), now_ns)
        if now_ns - self._looked_ns >= _LOOK_EVERY_NS:
            self._wait_for_room(now_ns)
        self._began_ns, self._began_cpu_ns = self._clock(), self._cpu_clock()

    def _wait_for_room(self, now_ns: int) -> None:
        """Return as soon as the trainer may compute, with the threads that it may use, or at the stop."""
        while not self._may_compute(now_ns) and not self._stop.is_set():
            self._metrics.trainer_threads.set(0)
            self._stop.wait(POLL_S)
            before_ns, now_ns = now_ns, self._clock()
            self._metrics.yielded.inc((now_ns - before_ns) / 1e9)
        self._looked_ns = now_ns
        is_idle = self._serving.num_engines > 0 and not self._serving.is_busy
        self._set_threads(self._idle_threads if is_idle else self._num_threads)

    def _may_compute(self, now_ns: int) -> bool:
        self._serving = self._board.look()
        for step in self._board.steps():
            self._observe(step)
        found, slice_s = self._sharing.found, self._sharing.slice_s
        may = self._sharing.may_compute(now_ns / 1e9, self._serving)
        if self._sharing.found != found:
            self._report(found, slice_s)
        return may

    def _observe(self, step: EngineStep) -> None:
        """Set a step's time against the trainer's own computing during it."""
        beside_ns = 0
        for stretch in reversed(self._stretches):
            if stretch.end_ns <= step.begin_ns:
                break
            overlap_ns = min(stretch.end_ns, step.end_ns) - max(stretch.begin_ns, step.begin_ns)
            if overlap_ns > 0:
                if not stretch.is_beside:
                    # An operation that began while serving was idle: that is neither alone nor how a slice looks.
                    return
                beside_ns += overlap_ns
        self._sharing.observe((step.engine, step.shape), (step.end_ns - step.begin_ns) / 1e9, beside_ns / 1e9)

    def _computed(self, begin_ns: int, end_ns: int) -> None:
        stretches, is_beside = self._stretches, self._serving.is_busy
        if stretches:
            last = stretches[-1]
            if last.is_beside == is_beside and begin_ns - last.end_ns < _MERGE_NS:
                stretches[-1] = last._replace(end_ns=end_ns)
                return
        stretches.append(_Stretch(begin_ns, end_ns, is_beside))
        while end_ns - stretches[0].end_ns > 1e9 * _REMEMBERED_S:
            stretches.popleft()

    def _set_threads(self, threads: int) -> None:
        self._metrics.trainer_threads.set(threads)
        if threads != self._threads:
            torch.set_num_threads(threads)
            self._threads = threads

    def _report(self, found_before: float, slice_before_s: float) -> None:
        """A conclusion was drawn."""
        sharing = self._sharing
        self._metrics.serving_slowdown.set(sharing.found)
        self._metrics.slice_seconds.set(sharing.slice_s)
        slowdown = round(sharing.found, 4)
        if found_before <= sharing.budget < sharing.found:
            log.info("serving is slowed beside training: pausing", slowdown=slowdown, rest_s=sharing.rest_s)
        elif slice_before_s == SHORTEST_SLICE_S < sharing.slice_s:
            log.info("serving is not slowed beside training", slowdown=slowdown, budget=sharing.budget)


def _nothing() -> None:
    """On a CPU an operation has ended when it returns."""

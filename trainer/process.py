"""The trainer process: from its settings to a clean exit."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import structlog
import torch
from prometheus_client import CollectorRegistry, ProcessCollector

from speculator.errors import ConfigError
from trainer.config import LOWEST, TrainerConfig, choose_device, local_rank
from trainer.loop import Trainer, train_until
from trainer.ranks import Ranks, join_ranks

log = structlog.get_logger()

# oneDNN keeps compiled kernels for the last 1,024 shapes, 0.7 MB each, and steps have fewer that come again
# (trainer/learning/ttt.py). Read when the first matrix is multiplied, so it is in time here.
_KERNEL_CACHE = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
_PR_SET_PDEATHSIG = 1
_STOPS = (signal.SIGTERM, signal.SIGINT)


def run_trainer(config: TrainerConfig, *, on_training: Callable[[], None] = lambda: None) -> None:
    """Train until SIGTERM or SIGINT; returns after the last checkpoint. Call from the main thread of its own process.
    `on_training` is called once everything is loaded.

    Under `torchrun` it is one of several (trainer/ranks.py); a signal to any of them ends all, and PeerLostError
    says that one was killed.

    The launcher sets OMP_NUM_THREADS=1 and OMP_WAIT_POLICY=PASSIVE before torch is imported: a spinning OpenMP thread
    takes more from the engine beside it than training does. It also sets MALLOC_MMAP_THRESHOLD_ and
    MALLOC_TRIM_THRESHOLD_, so that glibc keeps the memory that the next step allocates again
    (slipstream/children.py). Raises ConfigError, StreamError, StoreError, DraftFileError or DraftMismatchError
    when it cannot start, and StoreError when it cannot save its checkpoint.
    """
    os.environ.setdefault(*_KERNEL_CACHE)
    _end_with_torchrun()
    give_way_as_a_session(os.nice(config.nice))
    torch.set_num_threads(config.num_threads)
    device = choose_device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ranks = join_ranks(device)
    # Not before: who waits for a rank that does not come hears no handler, and has nothing to put in order.
    stop = stop_on_signals()
    if ranks.size > 1:
        structlog.contextvars.bind_contextvars(rank=ranks.rank)
    try:
        _train(config, ranks, device, stop, on_training)
    finally:
        ranks.close()


def _train(
    config: TrainerConfig,
    ranks: Ranks,
    device: torch.device,
    stop: threading.Event,
    on_training: Callable[[], None],
) -> None:
    # Port 0 is any free one.
    port = config.metrics_port and config.metrics_port + local_rank()
    if port is not None:
        _check_port(config.metrics_host, port)
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    trainer = Trainer(config, registry, ranks=ranks, device=device)
    if port is not None:
        trainer.metrics.serve(config.metrics_host, port)
    log.info("training", device=str(device), num_steps=trainer.learner.num_steps)
    on_training()
    # The thread that answers Prometheus has begun and stays as it is; those that compute come from this one.
    give_way_in_the_kernel(config.nice, ranks.size)
    train_until(stop, trainer)
    log.info("trainer ended", num_steps=trainer.learner.num_steps)


def _check_port(host: str, port: int) -> None:
    """Before anything is read or written: `/metrics` opens only when all is. Raises ConfigError."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise ConfigError(
            f"--metrics-port {port} of {host} cannot be taken ({error.strerror}): choose another, or stop who has it"
        ) from None


def stop_on_signals() -> threading.Event:
    """Set at the first SIGTERM or SIGINT, by a thread of its own. Python's handlers run on the main thread: one that
    comes while that waits for the event would wait for the lock held there, for ever. Call from the main thread.
    """
    stop, (woken, waking) = threading.Event(), os.pipe()
    os.set_blocking(waking, False)

    def wait() -> None:
        while os.read(woken, 1)[0] not in _STOPS:
            pass
        stop.set()

    threading.Thread(target=wait, name="stop", daemon=True).start()
    # Whatever the main thread does, the system's own handler writes the number there.
    signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    for number in _STOPS:
        signal.signal(number, lambda *_: None)
    return stop


def _end_with_torchrun() -> None:
    """Processes that outlived a killed `torchrun` would go on by themselves, and beside those of the next one: two
    trainers with one checkpoint. On Linux the system ends them first.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def give_way_in_the_kernel(nice: int, num_ranks: int) -> None:
    """Let this thread, and those that it starts, run where no other wants the core; for good. Only Linux can.

    Only a single process at the lowest niceness does so: of several ranks one would stand still on a busy machine, and
    the others would give it up.
    """
    if nice < LOWEST or num_ranks > 1 or not hasattr(os, "SCHED_IDLE"):
        return
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError as error:
        log.warning("this system refuses SCHED_IDLE: the trainer stays at its niceness", error=str(error))


def give_way_as_a_session(nice: int, autogroup: Path = Path("/proc/self/autogroup")) -> None:
    """Make the session that this process leads as nice as it is, `nice`.

    With `sched_autogroup_enabled` Linux shares a core by sessions first: a trainer at 19 takes half of the core that an
    engine of another session wants. A session that another process leads has more processes in it, and stays.
    """
    if nice <= 0 or not autogroup.exists():
        return
    if os.getsid(0) != os.getpid():
        log.info(
            "niceness may count within this session, container or service alone: beside an engine elsewhere start the "
            "trainer with setsid, or give it less of the CPU (cpu_shares, CPUWeight=, CPU requests)"
        )
        return
    try:
        autogroup.write_text(str(nice))
    except OSError as error:
        log.warning("this session's share of a core stays as it is", error=str(error))

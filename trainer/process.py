"""The trainer process: from its settings to a clean exit."""

from __future__ import annotations

import ctypes
import fcntl
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
from speculator.host import stop_signals
from speculator.redis.client import connect
from trainer.config import LOWEST, TrainerConfig, choose_device, local_rank
from trainer.loop import Trainer, train_until
from trainer.ranks import Ranks, join_ranks

log = structlog.get_logger()

# By default oneDNN keeps compiled kernels for the last 1,024 shapes, 0.7 MB each; training repeats fewer shapes
# (trainer/learning/ttt.py). oneDNN reads this when it multiplies the first matrix, which is after this import.
_KERNEL_CACHE = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")
_PR_SET_PDEATHSIG = 1


def run_trainer(config: TrainerConfig, *, on_training: Callable[[], None] = lambda: None) -> None:
    """Train until one of `stop_signals`; returns after the last checkpoint. Call from the main thread of its own
    process. `on_training` is called once everything is loaded.

    Under `torchrun` this is one of several processes (trainer/ranks.py). A signal to any of them ends all; where one
    was killed, the others raise PeerLostError.

    The launcher sets OMP_NUM_THREADS=1 and OMP_WAIT_POLICY=PASSIVE before torch is imported: a spinning OpenMP thread
    takes more from the engine beside it than training does. It also sets MALLOC_MMAP_THRESHOLD_ and
    MALLOC_TRIM_THRESHOLD_, so that glibc keeps the memory that the next step allocates again
    (slipstream/children.py). Raises ConfigError, StreamError, StoreError, DraftFileError or DraftMismatchError
    when it cannot start, and StoreError when it cannot save its checkpoint.
    """
    os.environ.setdefault(*_KERNEL_CACHE)
    _end_with_torchrun()
    set_session_niceness(os.nice(config.nice))
    torch.set_num_threads(config.num_threads)
    device = choose_device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ranks = join_ranks(device)
    # After joining: a process that still waits for other ranks would not run the handler, and has nothing to save.
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
    # Before the lock, which makes the folder: a wrong URL must leave nothing behind.
    connect(config.redis_url).close()
    ranks.run_on_leader(lambda: lock_state(config.state_dir))
    trainer = Trainer(config, registry, ranks=ranks, device=device)
    if port is not None:
        trainer.metrics.serve(config.metrics_host, port)
    log.info("training", device=str(device), num_steps=trainer.learner.num_steps, loss=config.loss)
    on_training()
    # The thread that answers Prometheus runs already and keeps its priority; this one starts those that compute.
    use_idle_scheduler(config.nice, ranks.size)
    train_until(stop, trainer)
    log.info("trainer ended", num_steps=trainer.learner.num_steps)


def lock_state(folder: Path) -> int:
    """Lock a trainer's state until this process ends, however it does; returns the lock's descriptor.

    Two trainers with one state would overwrite each other's checkpoint and take each other's traces. Raises ConfigError
    where another trainer holds the lock, or the folder cannot be written.
    """
    try:
        # Private: it will hold prompts and answers.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder} ({error.strerror}): set --state to another folder") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(f"another trainer uses {folder}: stop it, or set --state to another folder") from None
    except OSError as error:
        log.warning("this file system has no locks: start no second trainer with this state", error=str(error))
    return lock


def _check_port(host: str, port: int) -> None:
    """Check that the port is free before anything is loaded: `/metrics` opens only then. Raises ConfigError."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise ConfigError(
            f"cannot listen on --metrics-port {port} of {host} ({error.strerror}): choose another, or stop what uses it"
        ) from None


def stop_on_signals() -> threading.Event:
    """An event that a thread sets at the first of `stop_signals`. Call from the main thread.

    Python's handlers run on the main thread. A handler that sets the event while that thread waits for it would
    deadlock on the event's lock.
    """
    stop, (woken, waking), stops = threading.Event(), os.pipe(), stop_signals()
    os.set_blocking(waking, False)

    def wait() -> None:
        while os.read(woken, 1)[0] not in stops:
            pass
        stop.set()

    threading.Thread(target=wait, name="stop", daemon=True).start()
    # The interpreter's C handler writes the signal's number there at once, whatever the main thread does.
    signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    for number in stops:
        signal.signal(number, lambda *_: None)
    return stop


def _end_with_torchrun() -> None:
    """Let Linux kill this process when its `torchrun` is killed. Otherwise it would train on beside the processes of
    the next `torchrun`: two trainers with one checkpoint.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def use_idle_scheduler(nice: int, num_ranks: int) -> None:
    """Give this thread, and those that it starts, Linux's SCHED_IDLE: they run only where no other wants the core.

    Only for a single process at the lowest priority: of several ranks one could stall on a busy machine until the
    others time out. There is no way back.
    """
    if nice < LOWEST or num_ranks > 1 or not hasattr(os, "SCHED_IDLE"):
        return
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError as error:
        log.warning("this system refuses SCHED_IDLE: the trainer stays at its niceness", error=str(error))


def set_session_niceness(nice: int, autogroup: Path = Path("/proc/self/autogroup")) -> None:
    """Give the session that this process leads the niceness `nice`.

    With `sched_autogroup_enabled` Linux divides a core among sessions first: a trainer at niceness 19 takes half of the
    core that an engine of another session wants. A session that another process leads is left alone: it has others.
    """
    if nice <= 0 or not autogroup.exists():
        return
    if os.getsid(0) != os.getpid():
        log.info(
            "the trainer's niceness may not count against engines outside its session, container or service: start the "
            "trainer with setsid, or give it less of the CPU (cpu_shares, CPUWeight=, CPU requests)"
        )
        return
    try:
        autogroup.write_text(str(nice))
    except OSError as error:
        log.warning("cannot lower the session's CPU priority", error=str(error))

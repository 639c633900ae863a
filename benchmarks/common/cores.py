"""Which cores the processes of a benchmark run on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import psutil


def pin(launcher: int, core: int) -> None:
    """Pin all threads of all processes of a server to a core."""
    for process in _processes(launcher):
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            for thread in process.threads():
                os.sched_setaffinity(thread.id, {core})


@contextlib.contextmanager
def core_for_schedulers() -> Iterator[int | None]:
    """Keep the first core free of this process and of those that it starts, for `give_core`.

    None on a machine with one core, which all share.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) == 1:
        yield None
        return
    os.sched_setaffinity(0, cores[1:])
    try:
        yield cores[0]
    finally:
        os.sched_setaffinity(0, cores)


def give_core(launcher: int, core: int | None) -> None:
    """Let the thread that runs SGLang's model have this core; its other threads and processes stay on theirs.

    It is the first thread of the process that takes most memory.
    """
    if core is not None:
        largest = max(_processes(launcher), key=lambda process: process.memory_info().rss)
        os.sched_setaffinity(largest.pid, {core})


def _processes(launcher: int) -> list[psutil.Process]:
    process = psutil.Process(launcher)
    return [process, *process.children(recursive=True)]

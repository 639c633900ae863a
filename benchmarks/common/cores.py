"""Which cores the processes of a benchmark run on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psutil


def pin(process_group: int, core: int) -> None:
    """Pin all threads of all processes of a server to a core."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(status.read_text().rpartition(")")[2].split()[2]) == process_group:
                for thread in (status.parent / "task").iterdir():
                    os.sched_setaffinity(int(thread.name), {core})


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
        processes = psutil.Process(launcher).children(recursive=True)
        os.sched_setaffinity(max(processes, key=lambda process: process.memory_info().rss).pid, {core})

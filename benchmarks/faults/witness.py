"""Run services that log what they do with each trace: a parent process that forks one child for each start.

    python -m benchmarks.faults.witness NOTES LOG

The process has everything imported, so that a service is there in no time. For each line that it reads, a JSON list of
the words of a `slipstream` command, it forks a child that runs it; it says the child's process id, and how the child
ended, before it reads the next. Notes are one line each, written with one call, so a kill leaves them whole:

    acknowledged ID     Redis has confirmed the append to the engine
    used ID             the trainer is done with a trace: learnt from, held out, or not needed
    dead ID             the trainer is about to set it aside
    saving DIGEST       a checkpoint with these accounts is about to be written
    resumed DIGEST      the trainer goes on from it
"""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import torch

import trainer.loop
import trainer.process
from slipstream.cli.main import main
from speculator.redis.trace_stream import TraceStream
from trainer.checkpoint import Progress
from trainer.replay.reservoirs import Stored
from trainer.replay.trace_source import TraceSource
from trainer.session import Training


def digest(progress: Progress) -> str:
    return hashlib.blake2b(msgspec.json.encode(progress), digest_size=16).hexdigest()


def watch(notes: int) -> None:
    """Patch this process so that it writes notes to a file descriptor."""

    def note(kind: str, what: str) -> None:
        os.write(notes, f"{kind} {what}\n".encode())

    def around(
        owner: Any,
        name: str,
        *,
        before: Callable[..., object] | None = None,
        after: Callable[..., object] | None = None,
    ) -> None:
        """Wrap `owner`'s function `name`: call `before` with its arguments, `after` with its result and arguments."""
        call = getattr(owner, name)

        @functools.wraps(call)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before(*args, **kwargs)
            result = call(*args, **kwargs)
            if after is not None:
                after(result, *args, **kwargs)
            return result

        setattr(owner, name, watched)

    mark_used = TraceSource.mark_used

    def marked(self: TraceSource, traces: Iterable[Stored]) -> None:
        traces = list(traces)
        in_hand = [stored.trace_id for stored in traces if stored.trace_id in self.unused_trace_ids]
        mark_used(self, traces)
        for trace_id in dict.fromkeys(in_hand):
            note("used", trace_id)

    around(TraceStream, "append", after=lambda _, stream, payload, *, trace_id: note("acknowledged", trace_id))
    around(TraceStream, "dead_letter", before=lambda stream, entry, reason: note("dead", entry.trace_id))
    around(Training, "resume", after=lambda progress, training: note("resumed", digest(progress)))
    around(trainer.loop, "save_checkpoint", before=lambda folder, state, progress: note("saving", digest(progress)))
    TraceSource.mark_used = marked  # type: ignore[method-assign]


def _nursery(notes_path: str, log_path: str) -> None:
    import slipstream.start.local  # noqa: F401 - so that a child has it

    torch.set_num_threads(1)
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "of the threads, a fork has one"
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _live(json.loads(line), notes_path, log_path)
        os.write(1, f"{child}\n".encode())
        os.write(1, f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n".encode())


def _live(words: list[str], notes_path: str, log_path: str) -> None:
    log, notes = (os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for path in (log_path, notes_path))
    for standard in (1, 2):
        os.dup2(log, standard)
    status = 1
    try:
        watch(notes)
        sys.argv = ["slipstream", *words]
        main()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _nursery(*sys.argv[1:])
    os._exit(0)  # skips destructors of imported libraries, some of which report leaks

"""A process that has imported what services need, and becomes one by forking that logs what it does with each trace.

A start imports nothing (tests/fixtures/preloaded.py). Notes are one line each, written with one call, so a kill leaves
them whole:

    acknowledged ID     Redis has confirmed the append to the engine
    used ID             the trainer is done with a trace: learnt from, held out, or not needed
    dead ID             the trainer is about to set it aside
    saving DIGEST       a checkpoint with these accounts is about to be written
    resumed DIGEST      the trainer goes on from it
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

import trainer.loop
import trainer.process
from slipstream.cli.main import main
from speculator.redis.trace_stream import TraceStream
from tests.fixtures.preloaded import Order, take_orders
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


def _run(order: Order) -> None:
    """Run the `slipstream` command whose words follow the file for its notes."""
    notes, *words = order.words
    watch(os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    sys.argv = ["slipstream", *words]
    main()


if __name__ == "__main__":
    take_orders(("slipstream.start.local",), _run)

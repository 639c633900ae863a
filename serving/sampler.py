"""What capture keeps, decided on the recorder's thread before anything is encoded or written.

The share (serving/capture_share.py) comes from a look at the stream, the choice (serving/selection.py) from the trace.
Where following an answer costs more than the choice, as in SGLang, only some answers are followed to their end:
FOLLOWED_PER_KEPT for each that will be kept, so that there is something to choose from.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from serving.capture_share import CaptureShare, StreamFigures
from serving.selection import Selection
from speculator.errors import StreamError
from speculator.ledger import StreamLag
from speculator.trace import Trace

FOLLOWED_PER_KEPT = 4
LOOK_EVERY_S = 1.0

log = logging.getLogger(__name__)


class WatchedStream(Protocol):
    """What the sampler needs of a `speculator.stream.TraceStream`."""

    max_bytes: int

    def lag(self) -> StreamLag: ...

    def memory_share(self) -> float | None: ...


class CaptureSampler:
    """Keeps all, or as little as `floor` of what is finished. While Redis is away the last share stands."""

    def __init__(
        self,
        open_stream: Callable[[], WatchedStream],
        *,
        floor: float,
        follows_all: bool = True,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        """`follows_all`: every answer comes to `choose`, none is asked about at its beginning (`follows`)."""
        self._open_stream, self._clock = open_stream, clock
        self._policy, self._follows_all = CaptureShare(floor), follows_all
        self._rng = rng or random.Random()
        self._selection = Selection(self._rng)
        self._stream: WatchedStream | None = None
        self._looked_s = -LOOK_EVERY_S

    @property
    def share(self) -> float:
        return self._policy.share

    @property
    def reason(self) -> str:
        """Why a trace is left out, of serving.capture_share.REASONS."""
        return self._policy.reason

    def follows(self) -> bool:
        """Whether to follow an answer that begins now. For another thread than the rest."""
        return self._rng.random() < self._followed

    def choose(self, trace: Trace) -> Trace | None:
        """The trace, marked where it was preferred; None where it is left out."""
        self.look()
        choice = self._selection.choose(trace, self.share / self._followed)
        if choice != "preferred":
            return trace if choice else None
        return dataclasses.replace(trace, header=msgspec.structs.replace(trace.header, preferred=True))

    def look(self) -> None:
        """Where the last look is old enough. Call it also while no trace comes: a share below 1 must find its way back,
        and the trainer's speed shows only in looks that are close together.
        """
        if self._clock() - self._looked_s < LOOK_EVERY_S:
            return
        try:
            stream = self._stream = self._stream or self._open_stream()
            figures = StreamFigures.of(stream.lag(), max_bytes=stream.max_bytes, memory_share=stream.memory_share())
            self._policy.look(figures, self._clock())
        except StreamError as error:
            self._stream = None
            log.debug("the capture share stands: %s", error)
        # After the look: one that waits for a Redis that is away must not be due again at once.
        self._looked_s = self._clock()

    @property
    def _followed(self) -> float:
        """Share of the answers. One that began under another share is judged by this one: a few too many or too few."""
        return 1.0 if self._follows_all else min(1.0, FOLLOWED_PER_KEPT * self.share)

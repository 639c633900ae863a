"""How long decode steps take: on a GPU by events on the stream, elsewhere by the wall clock."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class StepTime:
    """One measured step, with whatever `stop` was told about it."""

    seconds: float
    about: Any


class StepClock:
    """Times steps that may still be running on the device when the next one starts; used by one thread."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._started: Any = None
        self._running: deque[tuple[Any, Any, Any]] = deque()

    def start(self) -> None:
        self._started = self._mark()

    def stop(self, about: Any) -> None:
        self._running.append((self._started, self._mark(), about))

    def finished(self) -> list[StepTime]:
        """The steps that have ended since the last call, oldest first; never waits."""
        times = []
        while self._running and (not self._is_cuda or self._running[0][1].query()):
            start, end, about = self._running.popleft()
            times.append(StepTime(start.elapsed_time(end) / 1000 if self._is_cuda else end - start, about))
        return times

    def _mark(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

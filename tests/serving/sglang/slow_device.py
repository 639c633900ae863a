"""Stands in for a GPU: what the main stream is told is done when the test says so, and the order of it all is noted."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from torch import Tensor

from serving.sglang.device import HostDevice, Mark


class SlowMark:
    def __init__(self, at_s: float) -> None:
        self.at_s, self.reached = at_s, threading.Event()

    def wait(self) -> None:
        assert self.reached.wait(10), "nobody has let the device finish"

    @property
    def is_reached(self) -> bool:
        return self.reached.is_set()

    def seconds_since(self, earlier: SlowMark) -> float:
        return self.at_s - earlier.at_s


class SlowDevice(HostDevice):
    """Marks hold the device's time, `now_s`. What a side stream is told is done at once."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.log: list[str] = []
        self._beside = threading.local()
        self._marks: list[SlowMark] = []

    def finish(self) -> None:
        """The main stream has done all that it was told."""
        marks, self._marks = self._marks, []
        for mark in marks:
            mark.reached.set()

    @property
    def _stream(self) -> str:
        return "side" if getattr(self._beside, "depth", 0) else "main"

    def mark(self) -> Mark:
        self.log.append(f"{self._stream}: mark")
        mark = SlowMark(self.now_s)
        if self._stream == "side":
            mark.reached.set()
        else:
            self._marks.append(mark)
        return mark

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        self._beside.depth = getattr(self._beside, "depth", 0) + 1
        try:
            yield
        finally:
            self._beside.depth -= 1

    def follow(self, mark: Mark) -> None:
        self.log.append(f"{self._stream}: follow")

    def to_host(self, tensor: Tensor) -> Tensor:
        self.log.append(f"{self._stream}: to host")
        return tensor.clone()

    def settle(self) -> None:
        self.log.append("settle")
        self.finish()

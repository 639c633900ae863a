"""Time decode steps on the device, and sum them up."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from serving.metrics import TEXTS
from serving.sglang.device import Device, DeviceEvent


@dataclass(frozen=True)
class StepTime:
    """One measured step, and what was passed to `stop` for it."""

    committed_s: float
    """Seconds until it had its tokens."""
    whole_s: float
    """Seconds with the draft's reading of its tokens."""
    before_s: float
    """Seconds of other work, such as prefills, between the step before and this one."""
    about: Any


_LONGEST_GAP_S = 1.0
"""The longest gap between two steps that counts as part of the second; a longer one has other causes."""


class StepClock:
    """Times decode steps on the device, where one may still run when the next one starts; used by one thread.

    A step begins where the one before it ended: SGLang's work in between is part of it, since clients wait for that,
    too.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._started = device.record_event()
        self._committed: DeviceEvent | None = None
        self._last: DeviceEvent | None = None
        """The end of the step before, where nothing has come between."""
        self._between: DeviceEvent | None = None
        """When other work after the step before began."""
        self._stopped_s = 0.0
        self._running: deque[tuple[DeviceEvent, DeviceEvent, DeviceEvent, DeviceEvent, Any]] = deque()

    def start(self) -> None:
        if time.monotonic() - self._stopped_s > _LONGEST_GAP_S:
            self._last = None
        self._started = self._last or self._device.record_event()
        self._committed = None

    def commit(self) -> None:
        """Mark that the step has its tokens, before `stop`; without this call, it has them at its end."""
        self._committed = self._device.record_event()

    def stop(self, about: Any) -> None:
        """The step is over."""
        over = self._device.record_event()
        self._last, self._stopped_s = over, time.monotonic()
        self._running.append((self._between or self._started, self._started, self._committed or over, over, about))
        self._between = None

    def interrupt(self, *, is_idle: bool) -> None:
        """Mark that other work runs before the next step; `is_idle` where there was nothing to run until now."""
        if is_idle or (self._between is None and self._last is None):
            self._between = self._device.record_event()
        elif self._between is None:
            self._between = self._last
        self._last = None

    def finished(self) -> list[StepTime]:
        """The steps that have ended since the last call, oldest first; never waits."""
        times = []
        while self._running and self._running[0][3].is_reached:
            between, start, committed, over, about = self._running.popleft()
            seconds = (committed.seconds_since(start), over.seconds_since(start), start.seconds_since(between))
            times.append(StepTime(*seconds, about))
        return times


_MODES = ("speculative", "control")
_MOST_PROPOSALS = 64
"""Positions that are counted."""


class RoundTally:
    """Sums over the decode steps since the start. Written by the scheduler's thread, read by the follower's."""

    def __init__(self) -> None:
        self._rounds, self._tokens = dict.fromkeys(_MODES, 0), dict.fromkeys(_MODES, 0)
        self._seconds = dict.fromkeys(_MODES, 0.0)
        self._of_head, self._of_text = np.zeros((2, 2, _MOST_PROPOSALS + 1), np.int64)
        """[2, positions] proposals, and the accepted ones; position 0 stays empty."""
        self._by_source = np.zeros(len(TEXTS))
        """Accepted proposals from earlier text."""

    def add(
        self,
        *,
        drafted: bool,
        depths: tuple[int, int],
        seconds: float,
        committed: int,
        accepted: Sequence[int],
        from_text: Sequence[bool],
        ended: Sequence[bool],
        sources: np.ndarray | None,
    ) -> None:
        """Add a step with its `committed` tokens and the accepted proposals of each request; `from_text` says whose
        proposals were earlier text, and `sources` [B] whose text that was (a `TextSource`), None where there was none.
        Those for requests that had `ended` do not count.

        `depths` are the proposals of a request from the head, and from earlier text.
        """
        mode = "speculative" if drafted else "control"
        self._rounds[mode] += 1
        self._seconds[mode] += seconds
        accepted_B, counts_B = np.array(accepted, np.int64), ~np.array(ended, bool)
        is_text_B = np.array(from_text, bool) & counts_B
        self._tokens[mode] += committed
        for most, counts, sums in (
            (depths[0], accepted_B[~is_text_B & counts_B], self._of_head),
            (depths[1], accepted_B[is_text_B], self._of_text),
        ):
            depth = min(most, _MOST_PROPOSALS)
            ended_at = np.bincount(np.minimum(counts, depth), minlength=depth + 1)
            sums[0, 1 : depth + 1] += len(counts)
            sums[1, 1 : depth + 1] += ended_at[::-1].cumsum()[-2::-1] if depth else 0
        if sources is not None:
            self._by_source += np.bincount(sources[is_text_B], accepted_B[is_text_B], len(TEXTS))

    def report(self) -> dict[str, str]:
        """Fields of the engine's report, each `name=count,…`."""
        return {
            "rounds": _counts(self._rounds),
            "decode_ms": _counts({mode: round(1000 * seconds) for mode, seconds in self._seconds.items()}),
            "round_tokens": _counts(self._tokens),
            **_by_position("", self._of_head),
            **_by_position("text_", self._of_text),
            "accepted_text": _counts(dict(zip(TEXTS, map(int, self._by_source), strict=True))),
        }


def _by_position(source: str, sums: np.ndarray) -> dict[str, str]:
    proposals, accepted = sums.tolist()
    seen = [position for position, count in enumerate(proposals) if count]
    return {
        f"{source}proposals": _counts({position: proposals[position] for position in seen}),
        f"{source}accepted": _counts({position: accepted[position] for position in seen}),
    }


def _counts(counts: Mapping[str, int] | Mapping[int, int]) -> str:
    return ",".join(f"{name}={count}" for name, count in counts.items())

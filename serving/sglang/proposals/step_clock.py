"""How long decode steps take, and what they add up to."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serving.sglang.device import Device, Mark


@dataclass(frozen=True)
class StepTime:
    """One measured step, with whatever `stop` was told about it."""

    committed_s: float
    """Until it had its tokens."""
    whole_s: float
    """With the draft's reading of them."""
    before_s: float
    """What else ran between the step before and this one, as prefills do."""
    about: Any


_LONGEST_GAP_S = 1.0
"""Between two steps. What waits longer was held up by something else than its steps."""


class StepClock:
    """How long decode steps take on the device, where one may run on when the next one starts; used by one thread.

    A step begins where the one before it ended: what SGLang does in between, and a client waits for, is part of it.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._started = device.mark()
        self._committed: Mark | None = None
        self._last: Mark | None = None
        """The end of the step before, where nothing has come between."""
        self._between: Mark | None = None
        """When what came between began."""
        self._stopped_s = 0.0
        self._running: deque[tuple[Mark, Mark, Mark, Mark, Any]] = deque()

    def start(self) -> None:
        if time.monotonic() - self._stopped_s > _LONGEST_GAP_S:
            self._last = None
        self._started = self._last or self._device.mark()
        self._committed = None

    def commit(self) -> None:
        """The step has its tokens, before `stop`; where nobody says so, it has them at its end."""
        self._committed = self._device.mark()

    def stop(self, about: Any) -> None:
        """The step is over."""
        over = self._device.mark()
        self._last, self._stopped_s = over, time.monotonic()
        self._running.append((self._between or self._started, self._started, self._committed or over, over, about))
        self._between = None

    def interrupt(self, *, is_idle: bool) -> None:
        """Something else runs before the next step; `is_idle` where nothing was there to run until now."""
        if is_idle or (self._between is None and self._last is None):
            self._between = self._device.mark()
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


class RoundTally:
    """What decode steps add up to since the start. Written by the scheduler's thread, read by the follower's."""

    def __init__(self) -> None:
        self._rounds, self._tokens = dict.fromkeys(_MODES, 0), dict.fromkeys(_MODES, 0)
        self._seconds = dict.fromkeys(_MODES, 0.0)
        self._proposals, self._accepted = Counter[int](), Counter[int]()
        self._text_proposals, self._text_accepted = Counter[int](), Counter[int]()

    def add(
        self,
        *,
        drafted: bool,
        depths: tuple[int, int],
        seconds: float,
        accepted: Sequence[int],
        from_text: Sequence[bool],
    ) -> None:
        """A step of so many accepted proposals; `from_text` are the requests whose proposals are earlier text.

        `depths` of the others, which are the head's, and of these.
        """
        mode = "speculative" if drafted else "control"
        self._rounds[mode] += 1
        self._seconds[mode] += seconds
        self._tokens[mode] += len(accepted) + sum(accepted)
        by_text = [count for count, is_text in zip(accepted, from_text, strict=True) if is_text]
        by_head = [count for count, is_text in zip(accepted, from_text, strict=True) if not is_text]
        for depth, counts, proposals, right in (
            (depths[0], by_head, self._proposals, self._accepted),
            (depths[1], by_text, self._text_proposals, self._text_accepted),
        ):
            for position in range(1, depth + 1) if counts else ():
                proposals[position] += len(counts)
                right[position] += sum(count >= position for count in counts)

    def report(self) -> dict[str, str]:
        """Fields of the engine's report, each `name=count,…`."""
        return {
            "rounds": _counts(self._rounds),
            "decode_ms": _counts({mode: round(1000 * seconds) for mode, seconds in self._seconds.items()}),
            "round_tokens": _counts(self._tokens),
            # Copied in one piece: the other thread may be adding a position.
            "proposals": _counts(self._proposals.copy()),
            "accepted": _counts(self._accepted.copy()),
            "text_proposals": _counts(self._text_proposals.copy()),
            "text_accepted": _counts(self._text_accepted.copy()),
        }


def _counts(counts: Mapping[str, int] | Mapping[int, int]) -> str:
    return ",".join(f"{name}={count}" for name, count in counts.items())

"""Counts what became of hostile inputs: refused (and how), taken, or the two that must not be: a failure, a hang."""

from __future__ import annotations

import contextlib
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType

DEADLINE_S = 30.0
"""For one input, with the machine doing other things: transformers may compile its 400 models meanwhile."""

Choose = Callable[[int], int]
"""Picks one of 0 … n−1, such as `random.Random(seed).randrange`."""

Outcome = str
"""What an input led to, such as a status or the name of an exception that was raised on purpose."""

Inputs = Iterator[tuple[str, Callable[[], Outcome]]]
"""Names, and what tries each: it returns the outcome, and raises whatever nobody meant to raise."""


class FailureError(Exception):
    """The input did harm: a server error, or an exception that nobody meant to raise."""


class HangError(BaseException):
    """No answer within the deadline. Not an Exception, so that nothing on its way takes it for one that it handles."""


@dataclass
class Tally:
    """The inputs of one surface."""

    surface: str
    deadline_s: float = DEADLINE_S
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    slowest_s: float = 0.0

    @property
    def num_inputs(self) -> int:
        return self.outcomes.total() + len(self.failures) + len(self.hangs)

    def take(self, name: str, attempt: Callable[[], Outcome]) -> None:
        """Try one input; `attempt` returns what became of it and lets pass what nobody meant to raise."""
        started_s = time.perf_counter()
        try:
            with deadline(self.deadline_s):
                self.outcomes[attempt()] += 1
        except HangError:
            self.hangs.append(name)
        except Exception as failure:
            self.failures.append(f"{name}: {type(failure).__name__}: {failure}"[:300])
        self.slowest_s = max(self.slowest_s, time.perf_counter() - started_s)

    def check(self) -> None:
        """Raise AssertionError where an input did harm."""
        assert self.num_inputs > 0, f"{self.surface}: nothing was tried"
        assert not self.failures, f"{self.surface}: {self.failures[:5]}"
        assert not self.hangs, f"{self.surface}: no answer to {self.hangs[:5]}"


def tallied(surface: str, inputs: Inputs) -> Tally:
    tally = Tally(surface)
    for name, attempt in inputs:
        tally.take(name, attempt)
    return tally


def garbled(raw: bytes, choose: Choose, *, head: int = 0, inserted: Sequence[bytes] = ()) -> bytes:
    """`raw` with one to five places changed, removed, doubled or made longer by one of `inserted`; never empty.

    Half of the changes are in the first `head` bytes, unless it is 0.
    """
    changed = bytearray(raw)
    for _ in range(1 + choose(5)):
        at = choose(min(len(changed), head)) if head and choose(2) else choose(len(changed))
        match choose(5 if inserted else 4):
            case 0:
                changed[at] ^= 1 << choose(8)
            case 1:
                del changed[at : at + 1 + choose(20)]
            case 2:
                changed[at:at] = changed[at : at + 1 + choose(20)]
            case 3:
                changed[at] = choose(256)
            case _:
                changed[at:at] = inserted[choose(len(inserted))]
        changed = changed or bytearray(b"{")
    return bytes(changed)


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise HangError inside the block after `seconds`, also in the middle of a system call. Main thread only."""

    def ring(_: int, __: FrameType | None) -> None:
        raise HangError(f"not done within {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    # Again and again: one that is raised inside a destructor or a callback is lost.
    outer_s, _ = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        # A test runner may count on an alarm of its own.
        signal.setitimer(signal.ITIMER_REAL, outer_s)
        signal.signal(signal.SIGALRM, before)

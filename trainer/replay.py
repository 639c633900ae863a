"""What the trainer can learn from: new traces first, and a bounded memory of the older ones.

Each trace waits in `waiting` until its first step and is then kept for more: a live service brings too few tokens to
use them once only. Memory is bounded in bytes; the oldest trace goes first.
"""

from __future__ import annotations

import random
from collections import deque

from trainer.batch import Example


class Replay:
    """Owned by the training loop; not thread-safe."""

    def __init__(self, *, max_bytes: int, max_waiting: int, rng: random.Random) -> None:
        self._max_bytes = max_bytes
        self._max_waiting = max_waiting
        self._rng = rng
        self._waiting: deque[Example] = deque()
        self._learnt: deque[Example] = deque()
        self.num_bytes = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._learnt)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def room(self) -> int:
        """How many more new traces may wait; at 0 the trainer is behind and the rest waits in Redis."""
        return max(self._max_waiting - len(self._waiting), 0)

    def add(self, example: Example) -> None:
        """Take a new trace."""
        self._waiting.append(example)
        self._count(example, 1)
        self._evict()

    def restore(self, example: Example) -> None:
        """Take a trace that was learnt from before a restart."""
        self._learnt.append(example)
        self._count(example, 1)
        self._evict()

    def draw(self, num_tokens: int) -> list[Example]:
        """Different traces for one batch, of about `num_tokens` bases: a new one where there is one, and old ones drawn
        evenly. When as many new ones wait as may wait, the trainer is behind and the batch has nothing else.
        """
        behind = self.room == 0
        old = iter(self._rng.sample(self._learnt, min(len(self._learnt), num_tokens)))
        chosen: list[Example] = []
        while sum(example.num_bases for example in chosen) < num_tokens:
            if self._waiting and (behind or not chosen):
                example = self._waiting.popleft()
                self._learnt.append(example)
            elif (drawn := next(old, None)) is not None:
                example = drawn
            else:
                break
            chosen.append(example)
        return chosen

    def discard(self, examples: list[Example]) -> None:
        """Forget traces that were drawn and cannot be learnt from."""
        for example in examples:
            kept = [other for other in self._learnt if other is not example]
            if len(kept) < len(self._learnt):
                self._count(example, -1)
            self._learnt = deque(kept)

    def _evict(self) -> None:
        while self.num_bytes > self._max_bytes and self._learnt:
            self._count(self._learnt.popleft(), -1)

    def _count(self, example: Example, sign: int) -> None:
        self.num_bytes += sign * example.num_bytes
        self.num_tokens += sign * example.num_bases

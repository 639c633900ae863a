"""Whether the target's weights are still those of the start, or those announced last: this would notice if not.

What an engine says is the target's own text only as long as they are. So when they have changed, by whatever it was,
the engine says so in its metrics and in its reports, which stops the trainer's publishing (trainer/rollback.py), and
its traces are no longer recorded: they would teach drafts another model. Only a restart ends that, or a new target that
is announced (serving/targets.py): its weights are the new truth.

Looked at after every swap, and now and then besides. A look reads every weight once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

from speculator.errors import type_and_place

LOOK_INTERVAL_S = 600.0

T = TypeVar("T")

log = logging.getLogger(__name__)


class TargetGuard:
    """A checksum over all weights; for any thread."""

    def __init__(
        self,
        weights: Callable[[], Iterable[Tensor]],
        *,
        on_change: Callable[[], object] = lambda: None,
        on_renewal: Callable[[], object] = lambda: None,
        interval_s: float = LOOK_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`weights` gives the same tensors in the same order each time; `on_change` is called when they have
        changed, once, and `on_renewal` when another target takes the place of one that had.
        """
        self._weights, self._on_change, self._on_renewal = weights, on_change, on_renewal
        self._interval_s, self._clock = interval_s, clock
        # A target that is just being moved is not looked at.
        self._lock = threading.Lock()
        self._checksum: int | None = self._compute()
        """None where there was no memory to look at a target that had moved: the next look takes it as it is."""
        self._looked_s = clock()
        self.is_unchanged = True

    def look(self) -> bool:
        """Compare now; once they were changed they stay so. Where there is no memory for it, what was known stands."""
        with self._lock:
            return self._look()

    def move(self, change: Callable[[], T]) -> T:
        """Let `change` move the target, and take the weights that it leaves for the right ones."""
        with self._lock:
            result = change()
            self._checksum = self._try_to_compute()
            was_changed, self.is_unchanged = not self.is_unchanged, True
        if was_changed:
            self._on_renewal()
        return result

    def _look(self) -> bool:
        self._looked_s = self._clock()
        found = self._try_to_compute()
        if self._checksum is None:
            self._checksum = found
        if self.is_unchanged and found not in (None, self._checksum):
            self.is_unchanged = False
            log.critical("the target's weights have changed: the text can no longer be trusted, restart the engine")
            self._on_change()
        return self.is_unchanged

    def look_at_times(self) -> bool:
        """What is known; compares where the last time is long ago."""
        return self.look() if self._clock() - self._looked_s >= self._interval_s else self.is_unchanged

    def _try_to_compute(self) -> int | None:
        try:
            return self._compute()
        except RuntimeError as error:
            log.warning("the target's weights could not be looked at: %s", type_and_place(error))
            return None

    def _compute(self) -> int:
        total = 0
        for index, tensor in enumerate(self._weights()):
            # As it lies in memory: a transposed one would be copied.
            order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
            bytes_N = tensor.detach().permute(order).contiguous().view(-1).view(torch.uint8)
            first = -bytes_N.storage_offset() % 8
            end = first + (len(bytes_N) - first) // 8 * 8
            # As 64-bit words, which wrap around: a flipped bit changes the sum, and no conversion takes any time.
            words, rest = bytes_N[first:end].view(torch.int64), (bytes_N[:first], bytes_N[end:])
            total = (total * 31 + index + int(words.sum()) + sum(int(part.sum()) for part in rest)) % (1 << 64)
        return total

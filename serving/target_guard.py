"""Whether the target's weights are still those of the start: nothing of ours writes to them, and this would notice.

What an engine says is the target's own text only as long as they are. So when they have changed, by whatever it was,
the engine says so in its metrics and in its reports, which stops the trainer's publishing (trainer/rollback.py), and
its traces are no longer recorded: they would teach drafts another model. Only a restart ends that.

Looked at after every swap, and now and then besides. A look reads every weight once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from speculator.errors import type_and_place

LOOK_INTERVAL_S = 600.0

log = logging.getLogger(__name__)


class TargetGuard:
    """A checksum over all weights; used by the draft follower's thread, read by any."""

    def __init__(
        self,
        weights: Callable[[], Iterable[Tensor]],
        *,
        on_change: Callable[[], object] = lambda: None,
        interval_s: float = LOOK_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`weights` gives the same tensors in the same order each time; `on_change` is called once."""
        self._weights, self._on_change = weights, on_change
        self._interval_s, self._clock = interval_s, clock
        self._checksum = self._compute()
        self._looked_s = clock()
        self.is_unchanged = True

    def look(self) -> bool:
        """Compare now; once they were changed they stay so. Where there is no memory for it, what was known stands."""
        self._looked_s = self._clock()
        try:
            is_same = self._compute() == self._checksum
        except RuntimeError as error:
            log.warning("the target's weights could not be looked at: %s", type_and_place(error))
            return self.is_unchanged
        if self.is_unchanged and not is_same:
            self.is_unchanged = False
            log.critical("the target's weights have changed: the text can no longer be trusted, restart the engine")
            self._on_change()
        return self.is_unchanged

    def look_at_times(self) -> bool:
        """What is known; compares where the last time is long ago."""
        return self.look() if self._clock() - self._looked_s >= self._interval_s else self.is_unchanged

    def _compute(self) -> int:
        total = 0
        for index, tensor in enumerate(self._weights()):
            # As it lies in memory: a transposed one would be copied.
            order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
            bytes_N = tensor.detach().permute(order).contiguous().view(-1).view(torch.uint8)
            words = bytes_N[: len(bytes_N) // 4 * 4].view(torch.int32)
            rest = bytes_N[len(words) * 4 :]
            total = (total * 31 + index + int(words.sum(dtype=torch.int64)) + int(rest.sum())) % (1 << 61)
        return total

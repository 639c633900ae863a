"""Is the draft in training fit to be published? What not-finite steps mean, as a small state machine.

    healthy ──(a step is not finite)──▶ suspect ──(GOOD_STEPS good ones in a row)──▶ healthy
                                           └──(BAD_STEPS bad ones in a row)──▶ restore the last good weights ──▶ suspect

A suspect draft goes on learning and is not published. Bad traces and bad weights look the same in one step; the next
steps tell them apart. Where a good one follows, the traces of the bad ones were at fault and are discarded. Where none
does, the weights are taken back, and the traces are believed once more: if it goes on, it is the traces after all.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

GOOD_STEPS = 20
"""About a second of training here; the averaged draft forgets a bad moment in as many steps."""
BAD_STEPS = 8


class Guard:
    """Fed with every step; steps without any label say nothing and are left out by the caller."""

    def __init__(self) -> None:
        self._num_good = GOOD_STEPS
        self._num_bad = 0
        self._restored = False

    @property
    def healthy(self) -> bool:
        """The draft may be published."""
        return self._num_good >= GOOD_STEPS

    @property
    def must_restore(self) -> bool:
        """So many bad steps in a row that the weights are not to be trusted."""
        return self._num_bad >= BAD_STEPS

    @property
    def blames_traces(self) -> bool:
        """No step was good since the weights were taken back: they cannot be what is wrong."""
        return self._restored

    def observe(self, *, finite: bool) -> None:
        self._restored = self._restored and not finite
        self._num_good = self._num_good + 1 if finite else 0
        self._num_bad = 0 if finite else self._num_bad + 1

    def restored(self) -> None:
        """The last good weights are back; they are published again after GOOD_STEPS good steps."""
        self._num_bad = self._num_good = 0
        self._restored = True


def all_finite(state: Mapping[str, Tensor]) -> bool:
    """No weight, average or moment is NaN or infinite."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in state.values())

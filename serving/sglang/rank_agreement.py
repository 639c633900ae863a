"""Agree on what the ranks of a tensor-parallel group do in the same step, over its CPU group.

All ranks run the same steps in the same order, so they can meet at agreed step numbers, every `MEETING_STEPS` steps.
They swap a draft at the first meeting at which every rank has staged the same version. Depth follows from step times,
which differ between ranks: all plan with rank 0's. Only rank 0 watches a new draft, and it says which version the
others stage.

Only rank 0 looks for earlier text to propose, on a thread of its own. It broadcasts what it has found at each decode
step, as SGLang broadcasts new requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from serving.sglang.proposals.depth import TimedStep
from serving.sglang.proposals.remembered_text import Continuations

MEETING_STEPS = 32
"""Steps between two meetings. A meeting costs a few hundred microseconds; a swap waits at most a second or two for one.
"""
_MOST_TIMES = 2 * MEETING_STEPS
"""Step times that one meeting passes on."""


class Agreement:
    """One rank's part in the agreement. A rank without others treats every step as a meeting and communicates with
    nobody.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group if group is not None and dist.get_world_size(group) > 1 else None

    @property
    def is_alone(self) -> bool:
        return self._group is None

    def is_meeting(self, step: int) -> bool:
        return self._group is None or step % MEETING_STEPS == 0

    def first(self, number: int) -> int:
        """Rank 0's number, on every rank; call at a meeting."""
        if self._group is None:
            return number
        wanted = torch.tensor([number], dtype=torch.int64)
        dist.broadcast(wanted, dist.get_global_rank(self._group, 0), group=self._group)
        return int(wanted[0])

    def all(self, holds: bool) -> bool:
        """Whether `holds` is true on every rank; call at a meeting, on every rank."""
        if self._group is None:
            return holds
        found = torch.tensor([int(holds)])
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self._group)
        return bool(found[0])

    def all_staged(self, version: int) -> bool:
        """Whether every rank has staged this version, 0 for none; call at a meeting, on every rank."""
        if self._group is None:
            return version != 0
        # The smallest and the largest in one reduction.
        bounds = torch.tensor([version, -version], dtype=torch.int64)
        dist.all_reduce(bounds, dist.ReduceOp.MIN, group=self._group)
        return bool(bounds[0] == -bounds[1]) and int(bounds[0]) != 0

    def times(self, own: list[TimedStep]) -> list[TimedStep]:
        """The step times that rank 0 has measured, the newest of them; call at a meeting, on every rank."""
        if self._group is None:
            return own
        table = torch.full((_MOST_TIMES, len(TimedStep._fields)), float("nan"), dtype=torch.float64)
        if own:
            newest = torch.tensor(own[-_MOST_TIMES:], dtype=torch.float64)
            table[: len(newest)] = newest
        dist.broadcast(table, dist.get_global_rank(self._group, 0), group=self._group)
        known = table[~table[:, 0].isnan()].tolist()
        return [
            TimedStep(int(batch), int(depth), seconds, bool(uses_head), reading_s)
            for batch, depth, seconds, uses_head, reading_s in known
        ]

    def text(self, found: Continuations | None, requests: Sequence[Any], width: int) -> Continuations | None:
        """Rank 0's continuations of these requests, at most `width` tokens each; call at each decode step, on every
        rank.
        """
        if self._group is None:
            return found
        packed = np.zeros((len(requests), 3 + 2 * width), np.int32) if found is None else found.packed()
        dist.broadcast(torch.from_numpy(packed), dist.get_global_rank(self._group, 0), group=self._group)
        # Rank 0 also plans with the values that it broadcast: packing rounds them.
        return Continuations.unpacked(packed, requests) if packed[:, 0].any() else None

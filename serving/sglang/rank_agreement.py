"""What the ranks of a tensor-parallel group must do in the same step, agreed over its CPU group.

All ranks run the same steps in the same order, so a step number is a meeting point. A draft is exchanged in the first
meeting at which every rank has staged the same version. Depth follows from times, which differ between ranks, and from
what the operator asks for, which they would hear of at different steps: all plan by the times that rank 0 has measured
and by what it was told. It alone watches a new draft and says which version the others stage. For this they meet every
few steps.

Earlier text is found by rank 0 alone, on a thread of its own. It passes on what it has at each decode step, as SGLang
does with the requests that have come.
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
"""A meeting costs a few hundred microseconds; a swap waits for one at most a second or two."""
_MOST_TIMES = 2 * MEETING_STEPS
"""Step times that one meeting passes on."""


class Agreement:
    """One rank's side. Without a group, or alone in it, every step is a meeting and nobody else has to be asked."""

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

    def limit(self, limit: int | None) -> int | None:
        """How deep rank 0 was told to draft at most; call at a meeting, on every rank."""
        agreed = self.first(-1 if limit is None else limit)
        return None if agreed < 0 else agreed

    def all(self, holds: bool) -> bool:
        """Whether it holds on every rank; call at a meeting, on every rank."""
        if self._group is None:
            return holds
        found = torch.tensor([int(holds)])
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self._group)
        return bool(found[0])

    def all_staged(self, version: int) -> bool:
        """Whether every rank waits with this version; call at a meeting, on every rank. 0 means none."""
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
        """How these texts may go on as rank 0 has found, at most `width` tokens of each; call at each decode step."""
        if self._group is None:
            return found
        packed = np.zeros((len(requests), 2 + 2 * width), np.int32) if found is None else found.packed()
        dist.broadcast(torch.from_numpy(packed), dist.get_global_rank(self._group, 0), group=self._group)
        # Rank 0 plans by what went over the wire, too: it is rounded.
        return Continuations.unpacked(packed, requests) if packed[:, 0].any() else None

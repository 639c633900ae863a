"""What the draft has read: the target's features of every slot, and pairs of them with the next token, read in time.

Shape letters: B batch, d hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from serving.local.draft.draft import ServingDraft
from serving.local.request import Generation
from serving.local.target.model import Target

_MAX_PAIRS_A_PASS = 64
"""After a long time at depth 0 the draft catches up in passes of this many pairs."""


class DraftReader:
    """Owns the features that draft and capture read."""

    def __init__(self, target: Target, draft: ServingDraft) -> None:
        self._draft = draft
        slots, length = target.cache.num_slots, target.cache.length
        width = 3 * target.embed.shape[1]
        self._features = torch.zeros(slots, length, width, dtype=target.embed.dtype, device=target.device)

    def keep(self, slot: int, start: int, aux_Tw: Tensor) -> None:
        """Features [T, 3d] of positions from `start` on."""
        self._features[slot, start : start + len(aux_Tw)] = aux_Tw

    def features(self, slot: int, start: int, end: int) -> Tensor:
        """A copy of the features [end − start, 3d] of positions start … end − 1, in the bfloat16 of traces."""
        return self._features[slot, start:end].to("cpu", torch.bfloat16, copy=True)

    def move_slot(self, source: int, destination: int, length: int) -> None:
        self._draft.cache.move(source, destination, length)
        self._features[destination, :length] = self._features[source, :length]

    def read(self, slot: int, generation: Generation, num_pairs: int) -> None:
        """Read up to `num_pairs` pairs of one request, where it has any that are unread."""
        if generation.num_pairs_unread:
            self._read(slot, [generation], num_pairs)

    def read_all(self, generations: Sequence[Generation]) -> tuple[Tensor, int]:
        """Read every pair that there is; the draft's output [B, d] at each request's newest pair, and how many."""
        num_pairs = sum(generation.num_pairs_unread for generation in generations)
        for slot, generation in enumerate(generations):
            self._catch_up(slot, generation)
        return self._read(0, generations, _MAX_PAIRS_A_PASS), num_pairs

    def read_one(self, slot: int, generation: Generation) -> Tensor:
        """Read every pair of one request; the draft's output [1, d] at its newest pair."""
        self._catch_up(slot, generation)
        return self._read(slot, [generation], _MAX_PAIRS_A_PASS)

    def _catch_up(self, slot: int, generation: Generation) -> None:
        while generation.num_pairs_unread > _MAX_PAIRS_A_PASS:
            self.read(slot, generation, _MAX_PAIRS_A_PASS)

    def _read(self, first_slot: int, generations: Sequence[Generation], num_pairs: int) -> Tensor:
        """Up to `num_pairs` of each, at least one; returns the draft's output [B, d] at the last pair of each."""
        tokens, features, starts = [], [], []
        for slot, generation in enumerate(generations, first_slot):
            start = generation.num_pairs_read
            ids = generation.tokens[start + 1 : start + 1 + num_pairs]
            tokens.append(ids)
            features.append(self._features[slot, start : start + len(ids)])
            starts.append(start)
            generation.num_pairs_read += len(ids)
        return self._draft.read(tokens, torch.cat(features), first_slot=first_slot, starts=starts)

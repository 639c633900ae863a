"""What the draft has read: the target's features of every slot, and pairs of them with the next token, read in time.

Shape letters: B batch, M pairs to read, d hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from serving.local.draft import ServingDraft
from serving.local.generation import Generation
from serving.local.target import Target

_MAX_PAIRS_A_PASS = 64  # after a long time at depth 0 the draft catches up in passes of this many pairs


class DraftReader:
    """Owns the features that draft and capture read."""

    def __init__(self, target: Target, draft: ServingDraft) -> None:
        self._draft, self._device = draft, target.device
        slots, length = target.cache.keys.shape[1], target.cache.keys.shape[3]
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

    def read(self, first_slot: int, generations: Sequence[Generation], width: int) -> Tensor:
        """Read up to `width` pairs of each request, shorter ones padded on the right; returns [B, width, d]."""
        tokens, features, starts = [], [], []
        for slot, generation in enumerate(generations, first_slot):
            start = generation.num_pairs_read
            ids = generation.tokens[start + 1 : start + 1 + width]
            tokens.append(ids + [0] * (width - len(ids)))
            features.append(self._features[slot, start : start + width])
            starts.append(start)
            generation.num_pairs_read += len(ids)
        tokens_BM = torch.tensor(tokens, device=self._device)
        return self._draft.read(tokens_BM, torch.stack(features), first_slot=first_slot, starts=starts)

    def read_all(self, generations: Sequence[Generation]) -> tuple[Tensor, int]:
        """Read every pair that there is; the draft's output [B, d] at each request's newest pair, and how many."""
        lengths = [len(generation.tokens) for generation in generations]
        num_pairs = sum(lengths) - len(lengths) - sum(generation.num_pairs_read for generation in generations)
        for slot, generation in enumerate(generations):
            while len(generation.tokens) - 1 - generation.num_pairs_read > _MAX_PAIRS_A_PASS:
                self.read(slot, [generation], _MAX_PAIRS_A_PASS)
        unread = [length - 1 - g.num_pairs_read for g, length in zip(generations, lengths, strict=True)]
        out_BMd = self.read(0, generations, max(unread))
        rows = torch.arange(len(unread), device=out_BMd.device)
        return out_BMd[rows, torch.tensor(unread, device=out_BMd.device) - 1], num_pairs

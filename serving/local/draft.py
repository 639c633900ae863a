"""The draft in service: the EAGLE-3 network over its own key/value slots, with weights that change in place.

Shape letters: N pairs to read, B requests, H heads of queries, keys and values, h head size, L positions, d hidden
size, D draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from serving.local.attention import KVSlots
from serving.local.fused_draft import FusedDraft
from serving.local.noise import shared_noise
from speculator.checkpoint import check_state, draft_state
from speculator.model import Eagle3Draft
from speculator.sampling import SamplingParams


@dataclass(frozen=True)
class DraftSource:
    """How one request draws its proposals: its sampling parameters and the seed of its noise."""

    sampling: SamplingParams
    seed: int


@dataclass(frozen=True)
class StagedDraft:
    """A verified version, fused and packed as the draft in service and ready to be copied over it."""

    version: int
    tensors: dict[str, Tensor]


class ServingDraft:
    """An `Eagle3Draft` that reads (next token, feature) pairs and proposes chains.

    `version` is stamped on every round. Weights change only through `install`, between two rounds; the keys of running
    requests stay as the older weights computed them, which costs a little acceptance for a moment and never a token.
    """

    def __init__(self, model: Eagle3Draft, version: int, *, num_slots: int, length: int) -> None:
        self._config, self._d2t, self._target_ids = model.config, model.d2t, model.target_ids
        self._fused = FusedDraft(model)
        self.storage = self._fused.weights
        """Every weight in service; addresses never change."""
        like = model.norm.weight
        self.cache = KVSlots(1, num_slots, model.config.num_key_value_heads, length, model.config.head_dim, like)
        self._positions = torch.arange(length, device=like.device)
        self._installed = self.stage(version, draft_state(model))

    @property
    def version(self) -> int:
        return self._installed.version

    def stage(self, version: int, state: dict[str, Tensor]) -> StagedDraft:
        """Check and convert a loaded version; for any thread. Raises DraftFileError or DraftMismatchError."""
        check_state(self._config, self._d2t, state)
        return StagedDraft(version, self._fused.fused(state))

    def install(self, staged: StagedDraft) -> None:
        """Copy a staged version into the same storage; on any failure the previous weights are put back."""
        try:
            _copy(self.storage, staged.tensors)
        except BaseException:
            _copy(self.storage, self._installed.tensors)
            raise
        self._installed = staged

    def read(
        self, tokens: Sequence[Sequence[int]], aux_Nw: Tensor, *, first_slot: int, starts: Sequence[int]
    ) -> Tensor:
        """Read pairs of the requests in slots `first_slot`…; returns the output [B, d] at each one's newest pair.

        `tokens` has, by request, token t+1 of the pairs at positions t = start, start + 1, …, at least one;
        `aux_Nw` the target's features [N, 3d] of those positions, request after request.
        """
        counts = [len(ids) for ids in tokens]
        lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        index = [
            list(itertools.chain.from_iterable(tokens)),
            [slot for slot, count in enumerate(counts, first_slot) for _ in range(count)],
            [position for start, length in zip(starts, lengths, strict=True) for position in range(start, length)],
        ]
        tokens_N, slots_N, positions_N = torch.tensor(index, device=aux_Nw.device)
        feature_Nd = self._fused.features(aux_Nw)
        qkv_NHh = self._fused.project(tokens_N, feature_Nd, positions_N)
        self._write(self.cache.lines(slots_N, positions_N[:, None]), qkv_NHh)
        if len(tokens_N) > len(counts):
            newest_B = torch.tensor([end - 1 for end in itertools.accumulate(counts)], device=aux_Nw.device)
            feature_Nd, qkv_NHh = feature_Nd[newest_B], qkv_NHh[newest_B]
        return self._layer(feature_Nd, qkv_NHh, first_slot, lengths)

    def chain(
        self, output_Bd: Tensor, *, lengths: Sequence[int], sources: Sequence[DraftSource]
    ) -> Iterator[tuple[list[int], list[float]]]:
        """Draw one proposal after the other for slots 0…B−1 whose committed lengths are `lengths`, newest included.

        `output_Bd` is what `read` returned. Each item is computed when it is asked for: by request, target ids and
        the draft's log-probabilities under the sampling that the request is served with.
        """
        lengths = list(lengths)
        slots_B = torch.arange(len(lengths), device=output_Bd.device)
        positions_B = torch.tensor(lengths, device=output_Bd.device) - 1
        lines = self.cache.lines(slots_B, positions_B[:, None])
        while True:
            ids_B, logprob_B = self._draw(output_Bd, lengths, sources)
            yield ids_B.tolist(), logprob_B.tolist()
            qkv_BHh = self._fused.project(ids_B, output_Bd, positions_B)
            self._write(lines, qkv_BHh)
            output_Bd = self._layer(output_Bd, qkv_BHh, 0, lengths)
            lengths = [length + 1 for length in lengths]
            positions_B, lines = positions_B + 1, lines + 1  # positions of a slot are neighbours

    def _write(self, lines: Tensor, qkv_NHh: Tensor) -> None:
        self.cache.write(0, lines, qkv_NHh[:, self._config.num_attention_heads :])

    def _layer(self, feature_Bd: Tensor, qkv_BHh: Tensor, first_slot: int, lengths: Sequence[int]) -> Tensor:
        """The layer's output for the newest position of slots that hold `lengths` of them."""
        longest = max(lengths)
        ((keys, values),) = self.cache.read(slice(first_slot, first_slot + len(lengths)), longest)
        mask_B11L = None
        if min(lengths) < longest:
            length_B111 = torch.tensor(lengths, device=feature_Bd.device)[:, None, None, None]
            mask_B11L = self._positions[:longest] < length_B111
        attended_Bw = self._fused.attend(qkv_BHh[:, : self._config.num_attention_heads], keys, values, mask_B11L)
        return self._fused.finish(feature_Bd, attended_Bw)

    def _draw(
        self, output_Bd: Tensor, positions: Sequence[int], sources: Sequence[DraftSource]
    ) -> tuple[Tensor, Tensor]:
        logits_BD = self._fused.logits(output_Bd)
        wide = torch.float64 if logits_BD.dtype == torch.float64 else torch.float32
        if all(source.sampling.temperature == 0 for source in sources):
            best = logits_BD.log_softmax(-1, dtype=wide).max(-1)
            return self._target_ids[best.indices], best.values.float()
        # Top-k and top-p cut the target's distribution; the draft keeps its own tail and lets verification decide.
        temperatures = [source.sampling.temperature or 1.0 for source in sources]
        logits_BD = logits_BD.to(wide) / torch.tensor(temperatures, dtype=wide, device=logits_BD.device)[:, None]
        noise_BD = torch.stack([self._noise(*row).to(wide) for row in zip(sources, positions, strict=True)])
        # Not argmax: on CPU it is slower.
        chosen_B1 = (logits_BD + noise_BD).max(-1, keepdim=True).indices
        logprob_B = logits_BD.log_softmax(-1).gather(-1, chosen_B1)[:, 0]
        return self._target_ids[chosen_B1[:, 0]], logprob_B.float()

    def _noise(self, source: DraftSource, position: int) -> Tensor:
        """The Gumbel noise [D] that verification adds at this position; none for a greedy request."""
        if source.sampling.temperature == 0:
            return torch.zeros(len(self._target_ids), device=self._target_ids.device)
        noise_V = shared_noise(source.seed, position, self._config.vocab_size, self._target_ids.device)
        return noise_V[self._target_ids]


def _copy(storage: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, place in storage.items():
            place.copy_(tensors[name])

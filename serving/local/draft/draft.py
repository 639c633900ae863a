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

from serving.local.draft.fused import FusedDraft, Span
from serving.local.kernels.build import found_kernels
from serving.local.kernels.draft import KernelDraft, fits
from serving.local.noise import shared_draws
from speculator.draft.checkpoint import check_state, draft_state
from speculator.draft.eagle3 import Eagle3Draft
from speculator.draft.sampling_params import SamplingParams
from speculator.draft.verification import gumbel


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
        self._drawn_ids = model.target_ids.cpu().numpy()
        kernels = found_kernels() if fits(model) else None
        self._fused: FusedDraft | KernelDraft
        if kernels is None:
            self._fused = FusedDraft(model, num_slots=num_slots, length=length)
        else:
            self._fused = KernelDraft(model, kernels, num_slots=num_slots, length=length)
        self.cache = self._fused.cache
        self.storage = self._fused.weights
        """Every weight in service; addresses never change."""
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
        spans = [Span(start, len(ids)) for start, ids in zip(starts, tokens, strict=True)]
        ids_N = list(itertools.chain.from_iterable(tokens))
        return self._fused.layer(ids_N, self._fused.features(aux_Nw), spans, first_slot=first_slot)

    def chain(
        self, output_Bd: Tensor, *, lengths: Sequence[int], sources: Sequence[DraftSource]
    ) -> Iterator[tuple[list[int], list[float]]]:
        """Draw one proposal after the other for slots 0…B−1 whose committed lengths are `lengths`, newest included.

        `output_Bd` is what `read` returned. Each item is computed when it is asked for: by request, target ids and
        the draft's log-probabilities under the sampling that the request is served with.
        """
        lengths = list(lengths)
        while True:
            ids_B, logprob_B = self._draw(output_Bd, lengths, sources)
            ids = ids_B.tolist()
            yield ids, logprob_B.tolist()
            newest = [Span(length - 1, 1) for length in lengths]
            output_Bd = self._fused.layer(ids, output_Bd, newest, first_slot=0)
            lengths = [length + 1 for length in lengths]

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
        uniform_V = shared_draws(source.seed, position, self._config.vocab_size)
        return torch.from_numpy(gumbel(uniform_V[self._drawn_ids])).to(self._target_ids.device)


def _copy(storage: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, place in storage.items():
            place.copy_(tensors[name])

"""The draft in service: the EAGLE-3 network over its own key/value slots, with weights that change in place.

Shape letters: B batch, M pairs to read, d hidden size, D draft vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from serving.local.attention import KVSlots, SlotWindow
from serving.local.packed import PackedLinear, pack, pack_linears
from speculator.checkpoint import check_state, draft_state
from speculator.model import Attend, Eagle3Draft
from speculator.sampling import SamplingParams
from speculator.verify import emit, gumbel_noise


@dataclass(frozen=True)
class DraftSource:
    """How one request draws its proposals: its sampling parameters and the seed of its noise."""

    sampling: SamplingParams
    seed: int


@dataclass(frozen=True)
class StagedDraft:
    """A verified version, converted to the storage types of the draft in service and ready to be copied over it."""

    version: int
    tensors: dict[str, Tensor]


class ServingDraft:
    """An `Eagle3Draft` that reads (next token, feature) pairs and proposes chains; takes over `model`.

    `version` is stamped on every round. Weights change only through `install`, between two rounds; the keys of running
    requests stay as the older weights computed them, which costs a little acceptance for a moment and never a token.
    """

    def __init__(self, model: Eagle3Draft, version: int, *, num_slots: int, length: int) -> None:
        self.model = model.eval().requires_grad_(False)
        config = model.config
        self.cache = KVSlots(1, num_slots, config.num_key_value_heads, length, config.head_dim, model.norm.weight)
        self._target_ids = model.target_ids
        state = draft_state(model)
        if model.norm.weight.device.type == "cpu":
            pack_linears(model)
        self.storage = _storage(model)
        """Every weight in service by its name in a draft file; addresses never change."""
        self._installed = self.stage(version, state)

    @property
    def version(self) -> int:
        return self._installed.version

    def stage(self, version: int, state: dict[str, Tensor]) -> StagedDraft:
        """Check and convert a loaded version; for any thread. Raises DraftFileError or DraftMismatchError."""
        check_state(self.model, state)
        tensors = {
            name: pack(state[name]) if place.is_mkldnn else state[name].to(place)
            for name, place in self.storage.items()
        }
        return StagedDraft(version, tensors)

    def install(self, staged: StagedDraft) -> None:
        """Copy a staged version into the same storage; on any failure the previous weights are put back."""
        try:
            _copy(self.storage, staged.tensors)
        except BaseException:
            _copy(self.storage, self._installed.tensors)
            raise
        self._installed = staged

    def _attend(self, window: SlotWindow) -> Attend:
        return lambda q, k, v: window.attend(self.cache, 0, q, k, v, None)

    def read(self, tokens_BM: Tensor, aux_BMw: Tensor, *, first_slot: int, starts: Sequence[int]) -> Tensor:
        """Read M pairs a request (token t+1, target features [B, M, 3d] of position t); returns features [B, M, d].

        Rows may be padded on the right: what padding writes lies past the committed pairs and is overwritten.
        """
        window = SlotWindow(first_slot, list(starts), tokens_BM.shape[1], self.model.norm.weight)
        return self.model(tokens_BM, self.model.fuse(aux_BMw), window.positions_BT, self._attend(window))  # type: ignore[no-any-return]

    def chain(
        self, feature_Bd: Tensor, *, lengths: Sequence[int], sources: Sequence[DraftSource]
    ) -> Iterator[tuple[list[int], list[float]]]:
        """Draw one proposal after the other for slots 0…B−1 whose committed lengths are `lengths`, newest included.

        `feature_Bd` is `read`'s output at each request's newest pair. Each item is computed when it is asked for: by
        request, target ids and the draft's log-probabilities under the sampling that the request is served with.
        """
        for step in itertools.count():
            ids_B, logprob_B = self._draw(feature_Bd, [length + step for length in lengths], sources)
            yield ids_B.tolist(), logprob_B.tolist()
            window = SlotWindow(0, [length - 1 + step for length in lengths], 1, self.model.norm.weight)
            feature_B1d = self.model(ids_B[:, None], feature_Bd[:, None], window.positions_BT, self._attend(window))
            feature_Bd = feature_B1d[:, 0]

    def _draw(
        self, feature_Bd: Tensor, positions: Sequence[int], sources: Sequence[DraftSource]
    ) -> tuple[Tensor, Tensor]:
        logits_BD = self.model.logits(feature_Bd)
        wide = torch.float64 if logits_BD.dtype == torch.float64 else torch.float32
        if all(source.sampling.temperature == 0 for source in sources):
            best = logits_BD.log_softmax(-1, dtype=wide).max(-1)
            return self._target_ids[best.indices], best.values.float()
        rows = zip(logits_BD.to(wide), positions, sources, strict=True)
        chosen_B = torch.stack([self._draw_one(*row) for row in rows])
        temperature_B1 = torch.tensor([[source.sampling.temperature or 1.0] for source in sources])
        logprob_BD = (logits_BD / temperature_B1.to(logits_BD)).log_softmax(-1, dtype=wide)
        return self._target_ids[chosen_B], logprob_BD.gather(-1, chosen_B[:, None])[:, 0].float()

    def _draw_one(self, logits_D: Tensor, position: int, source: DraftSource) -> Tensor:
        if source.sampling.temperature == 0:
            return logits_D.argmax(-1)
        noise_V = gumbel_noise(source.seed, position, self.model.config.vocab_size, device=logits_D.device)
        # Top-k and top-p cut the target's distribution; the draft keeps its own tail and lets verification decide.
        tempered = SamplingParams(temperature=source.sampling.temperature)
        return emit(logits_D, tempered, noise_V[self._target_ids])


def _storage(model: Eagle3Draft) -> dict[str, Tensor]:
    packed = {
        f"{name}.weight": module.packed for name, module in model.named_modules() if isinstance(module, PackedLinear)
    }
    return {**dict(model.named_parameters()), **packed}


def _copy(storage: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, place in storage.items():
            place.copy_(tensors[name])

"""Copies from the device to the host, and the draft's own log-probability of every proposal.

Copies never block the device: they take a side stream and pinned memory (serving/sglang/device.py).

SGLang keeps only the draft's top token and discards the logits, so `DraftLogprobRecorder` reads them as they are
computed. It writes into buffers that live as long as the worker: CUDA graphs record the writes like any other kernel
and repeat them at every replay. A value is read in the step that made it, on the same stream.

A chain (topk 1) proposes the likeliest token: its log-probability is max z − log Σ exp z. The first proposal of a round
comes out of the pass that brings the draft up to date at the end of the step before, so it is kept by request slot. A
tree has cumulative scores; a node's own log-probability is its score minus its parent's, taken when the tree is read.

Shape letters: B requests, P proposals a round, D draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from serving.sglang.device import Device, DeviceEvent

LEAST_PROBABILITY = 1e-30
"""Lower bound of a proposal's probability, so that its logarithm is finite."""


@dataclass(frozen=True)
class TextRows:
    """Which proposals of a verification are earlier text."""

    is_text_at: Tensor
    """[B, P] bool; a row's text may be shorter than its chain."""
    logprobs: Tensor
    """[B, P] float32, valid where `is_text_at` is true."""
    num_of_head: int
    """The head's proposals in a row without text; tokens after them are filler."""

    @property
    def is_text(self) -> Tensor:
        """[B] bool"""
        return self.is_text_at[:, 0]

    def num_proposals(self) -> Tensor:
        """[B] the number of proposals of each row."""
        return torch.where(self.is_text, self.is_text_at.sum(1), self.num_of_head)


class HostCopy:
    """Named tensors on their way to the host; `wait` blocks the calling thread, never the device."""

    def __init__(self, tensors: Callable[[], dict[str, Tensor]], num_bytes: int, done: DeviceEvent) -> None:
        self._tensors, self._done = tensors, done
        self.num_bytes = num_bytes

    def wait(self) -> dict[str, Tensor]:
        self._done.wait()
        return self._tensors()


class HostCopier:
    """Starts copies from one device; used by the thread that runs the model."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def start(self, tensors: dict[str, Tensor]) -> HostCopy:
        """Copy tensors as of this point of the current stream; nobody may write to them afterwards."""
        if self._device.is_host:
            return HostCopy(
                lambda: tensors, sum(tensor.nbytes for tensor in tensors.values()), self._device.record_event()
            )
        packed = Packed.of(tensors)
        made = self._device.record_event()
        with self._device.side_stream():
            self._device.wait_event(made)
            host = self._device.to_host(packed.data)
            return HostCopy(lambda: unpacked(host, packed.places), host.nbytes, self._device.record_event())


Places = tuple[tuple[str, torch.dtype, torch.Size], ...]


class Packed(NamedTuple):
    """Tensors one behind the other, as bytes: one allocation and one copy, whatever their number."""

    data: Tensor
    places: Places
    """Name, type and shape of each, in order; the widest types come first, so that each is aligned."""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Packed:
        ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
        data = torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in ordered])
        return cls(data, tuple((name, tensor.dtype, tensor.shape) for name, tensor in ordered))


def unpacked(data: Tensor, places: Places) -> dict[str, Tensor]:
    """The packed tensors, as views of `data` where they are aligned."""
    tensors, address = {}, data.data_ptr()
    sizes = [shape.numel() * dtype.itemsize for _, dtype, shape in places]
    for (name, dtype, shape), part in zip(places, torch.split(data, sizes), strict=True):
        # Packed bytes inside other packed bytes may be misaligned.
        tensors[name] = (part.clone() if address % dtype.itemsize else part).view(dtype).view(shape)
        address += len(part)
    return tensors


class DraftLogprobRecorder:
    """Records the log-probabilities of one worker's draft; `logprobs` belongs to the round that was drafted last."""

    def __init__(self, *, num_slots: int, max_batch: int, max_proposals: int, topk: int, device: torch.device) -> None:
        self._topk = topk
        self._first = torch.zeros(num_slots, dtype=torch.float32, device=device)
        self._later = torch.zeros(max_batch, max_proposals, dtype=torch.float32, device=device)
        self._scores = torch.zeros(max_batch, max_proposals, dtype=torch.float32, device=device)
        self._step = 0
        self._is_drafting = False
        self._extended: Any = None

    def around_draft(self, draft: Callable[[], Any]) -> Any:
        """Run the drafting of a round; `on_forward` is called for each of its passes."""
        self._is_drafting, self._step = True, 0
        try:
            return draft()
        finally:
            self._is_drafting = False

    def on_forward(self, output: Any) -> None:
        """A pass of the draft: inside a round pass i gives proposal i + 1, outside it was the catch-up pass."""
        if not self._is_drafting:
            self._extended = output
            return
        self._step += 1
        if self._topk == 1:
            logits = output.next_token_logits
            self._later[: len(logits), self._step].copy_(_best_logprob(logits))

    def on_extend(self, req_pool_indices: Tensor) -> None:
        """Keep the log-probability of the next round's first proposal, from the logits of the catch-up pass."""
        output, self._extended = self._extended, None
        if output is not None and self._topk == 1 and len(output.next_token_logits) == len(req_pool_indices):
            self._first[req_pool_indices.long()] = _best_logprob(output.next_token_logits)

    def on_skip(self, req_pool_indices: Tensor) -> None:
        """Keep for these that the draft, which has read nothing, would hardly have proposed what stands there."""
        self._first.index_fill_(0, req_pool_indices.long(), math.log(LEAST_PROBABILITY))

    def on_tree(self, scores: list[Tensor], chosen: Tensor) -> None:
        """Keep the scores of a round's tree: cumulative probabilities of all candidates, and which became its nodes [B,
        P].
        """
        flat = torch.cat(scores, dim=1).flatten(1)
        self._scores[: len(chosen), : chosen.shape[1]].copy_(flat.gather(1, chosen).clamp_min(LEAST_PROBABILITY).log())

    def logprobs(self, req_pool_indices: Tensor, num_proposals: int) -> Tensor:
        """[B, P] float32: log q of each proposal given its parent for a chain, of its whole path for a tree."""
        num_requests = len(req_pool_indices)
        if self._topk > 1:
            return self._scores[:num_requests, :num_proposals]
        first = self._first.index_select(0, req_pool_indices)
        return torch.cat([first[:, None], self._later[:num_requests, 1:num_proposals]], dim=1)


def _best_logprob(logits: Tensor) -> Tensor:
    logits = logits.float()
    return logits.amax(-1) - logits.logsumexp(-1)

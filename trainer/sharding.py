"""Who keeps what of a draft in training where several ranks train it: each of them everything, or each its part.

    at rest     a rank keeps 1/N of the weights, of their running average and of the optimiser's moments
    in a step   the weights are gathered, each rank differentiates the loss of its own batch, the sum of the gradients
                is scattered, each rank changes its part, and what was gathered is freed

PyTorch's `fully_shard` (FSDP2) keeps the parts and gathers them. What it does around a forward and a backward is left
out, as it expects the same of each rank (see `Ranks.add_up`): that hangs on the module which is given to it, and here
this is a container around the draft that nobody calls.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from trainer.distributed import Ranks, exchange


class Replicated:
    """Every rank keeps everything. Alone, nothing is exchanged."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def keep(self, module: nn.Module) -> dict[str, Tensor]:
        """What this rank keeps of a module's weights, to be changed in place; from then on the module has all of them
        in `whole` only.
        """
        return dict(module.named_parameters())

    @contextlib.contextmanager
    def whole(self, module: nn.Module) -> Iterator[None]:
        """All ranks enter together. Gradients are gone afterwards where the ranks keep parts."""
        yield

    def add_up(self, gradients: Sequence[Tensor], squares: Tensor) -> tuple[list[Tensor], Tensor]:
        """The sums over the ranks: of each gradient what belongs to the weights that this rank keeps, and the squares.
        Alone: the given ones.
        """
        *sums, squares = self._ranks.add_up([*gradients, squares])
        return sums, squares

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Of the whole gradient, from what `add_up` returned; the same on every rank."""
        return nn.utils.get_total_norm(gradients)

    def part(self, whole: Tensor) -> Tensor:
        """What this rank keeps of a weight or a moment."""
        return whole

    def joined(self, part: Tensor, shape: torch.Size) -> Tensor | None:
        """The whole from the parts of all ranks, which all call it; rank 0 alone gets it where there are parts."""
        return part.detach()


class Sharded(Replicated):
    """Each rank keeps a slice of the first dimension of every weight, all slices equally long but for the last. Needs
    several ranks, and weights on a device of each.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        super().__init__(ranks)
        self._mesh = ranks.mesh(device)
        self._containers: dict[nn.Module, FSDPModule] = {}

    def keep(self, module: nn.Module) -> dict[str, Tensor]:
        self._containers[module] = fully_shard(nn.Sequential(module), mesh=self._mesh)
        with torch.no_grad():
            return {
                name: weight.to_local() for name, weight in module.named_parameters() if isinstance(weight, DTensor)
            }

    @contextlib.contextmanager
    def whole(self, module: nn.Module) -> Iterator[None]:
        with exchange():
            self._containers[module].unshard()
        try:
            yield
        finally:
            module.zero_grad(set_to_none=True)
            self._containers[module].reshard()

    def add_up(self, gradients: Sequence[Tensor], squares: Tensor) -> tuple[list[Tensor], Tensor]:
        return [self._scattered(gradient) for gradient in gradients], self._ranks.add_up([squares])[0]

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        own = nn.utils.get_total_norm(gradients)
        return own.new_tensor(math.sqrt(self._ranks.sum([own.item() ** 2])[0]))

    def part(self, whole: Tensor) -> Tensor:
        length = self._length(len(whole))
        return whole[self._ranks.rank * length :][:length]

    def joined(self, part: Tensor, shape: torch.Size) -> Tensor | None:
        """In the CPU's memory, where all of them together find more room than beside the draft."""
        length = self._length(shape[0])
        whole = part.new_empty(self._ranks.size * length, *shape[1:])
        with exchange():
            dist.all_gather_into_tensor(whole, _padded(part, length))
        return whole[: shape[0]].cpu() if self._ranks.leads else None

    def _scattered(self, gradient: Tensor) -> Tensor:
        length = self._length(len(gradient))
        part = gradient.new_empty(length, *gradient.shape[1:])
        with exchange():
            dist.reduce_scatter_tensor(part, _padded(gradient, self._ranks.size * length))
        return part[: len(self.part(gradient))]

    def _length(self, whole: int) -> int:
        """Of a slice."""
        return math.ceil(whole / self._ranks.size)


def _padded(tensor: Tensor, length: int) -> Tensor:
    missing = length - len(tensor)
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor.contiguous()

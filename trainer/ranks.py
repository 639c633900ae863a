"""Several trainer processes that learn as one: data parallel under `torchrun`, or a single process, with the same code.

Each rank reads its own share of the stream into its own replay and computes the gradient of its own batch. The sum of
all gradients is every rank's step, so their weights stay the same. (A rank that had nothing to learn from adds zeros.)

Every number that decides how the loop goes on is the same on every rank to the last bit: a sum over the ranks, added up
in the order of their numbers, or a value of rank 0. Ranks that disagreed once would wait for each other for ever. So
all ranks must call every method of `Ranks` in the same order; in a single process a method returns its input.

When a rank dies, all end: the others lose its connection at the next exchange and raise PeerLostError, and `torchrun`
starts all of them again from the checkpoint. For a rank that hangs the others wait _TIMEOUT.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

# Imported before any process group exists: its functions keep the group of that moment as a default argument. The first
# optimiser step imports it too. Then the group would outlive `close`, and its threads sometimes abort the exit.
import torch.distributed.nn
from torch import Tensor

from speculator.errors import ConfigError, PeerLostError, StoreError

# The slowest thing that one rank does while the others wait is to write a large checkpoint to a slow disk.
_TIMEOUT = timedelta(minutes=10)


@contextlib.contextmanager
def _exchange() -> Iterator[None]:
    """Turn the RuntimeError of a collective operation into PeerLostError. Put nothing else inside."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise PeerLostError(
            f"a process that trains with this one has ended: torchrun --max-restarts starts all of them again ({error})"
        ) from error


class Ranks:
    """This process's number among all that train together. The default is a process that trains alone."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @property
    def is_leader(self) -> bool:
        """Rank 0: it alone writes the checkpoint, the store and the pointer."""
        return self.rank == 0

    def owns(self, trace_id: str) -> bool:
        """Whether this rank's replay restores a trace after a restart; true on exactly one rank."""
        return zlib.crc32(trace_id.encode()) % self.size == self.rank

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each value's sum over the ranks; exact for integers below 2⁵³."""
        return list(values) if self.size == 1 else [sum(column) for column in zip(*self._rows(values), strict=True)]

    def max(self, value: int) -> int:
        return value if self.size == 1 else int(max(row[0] for row in self._rows([value])))

    def any(self, value: bool) -> bool:
        return self.sum([value])[0] > 0

    def all_equal(self, *values: float) -> bool:
        """All ranks gave the same numbers."""
        return self.size == 1 or all(row == list(map(float, values)) for row in self._rows(values))

    def run_on_leader(self, action: Callable[[], int | None]) -> int:
        """Run `action` on rank 0 while the others wait; all return its result, and 0 for None.

        Where it raises, rank 0 raises the same and the others StoreError, so that none goes on as if it were done.
        """
        if self.size == 1:
            return action() or 0
        result, error = 0, None
        if self.is_leader:
            try:
                result = action() or 0
            except Exception as raised:
                error = raised
        failed, result = map(int, self._rows([error is not None, result])[0])
        if error is not None:
            raise error
        if failed:
            raise StoreError("rank 0 cannot go on: its own message says why")
        return result

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, by rank; only on rank 0, [] elsewhere."""
        if self.size == 1:
            return [data]
        sizes = [int(row[0]) for row in self._rows([len(data)])]
        padded = torch.frombuffer(bytearray(data.ljust(max(sizes), b"\0")), dtype=torch.uint8)
        received = [torch.empty_like(padded) for _ in sizes] if self.is_leader else None
        with _exchange():
            dist.gather(padded, received)
        return [part.numpy().tobytes()[:size] for part, size in zip(received or [], sizes, strict=False)]

    def sum_tensors(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Each tensor's sum over the ranks, as views of one new buffer; the given ones stay. Alone: the given ones.

        DistributedDataParallel does not fit: it reduces during the backward pass of one forward call, and expects the
        same calls on every rank. Here a step calls parts of the draft (`fuse`, the keys of the context, the layer, the
        logits) a number of times that depends on the data, and not at all on a rank without a batch. One reduction
        after the backward pass needs none of that; overlapping the two would gain little in a network of one layer.
        """
        if self.size == 1:
            return list(tensors)
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        with _exchange():
            dist.all_reduce(flat)
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]

    def close(self) -> None:
        """Leave the process group. Drop every learner before: it may keep the group and its threads alive."""
        if self.size > 1:
            dist.destroy_process_group()

    def _rows(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's values, by rank. Tensors on the CPU travel over gloo, wherever the gradients are."""
        own = torch.tensor(list(values), dtype=torch.float64)
        rows = [torch.empty_like(own) for _ in range(self.size)]
        with _exchange():
            dist.all_gather(rows, own)
        return [row.tolist() for row in rows]


def join_ranks(device: torch.device) -> Ranks:
    """Join the processes that `torchrun` started, by its environment variables; without them, a single rank.

    Raises ConfigError where a variable is missing or the other processes do not join.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Ranks()
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # Restarted ranks would read the addresses of the ended ones there (pytorch/pytorch#135712).
        raise ConfigError(
            "after a restart torchrun's store still has the addresses of the ended ranks: for --max-restarts set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, and pass --standalone or --rdzv-backend c10d"
        )
    # One group with both backends: the tensor's device picks one.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=_TIMEOUT)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"WORLD_SIZE asks for several processes, and they cannot connect: start them with torchrun ({error})"
        ) from error
    return Ranks(dist.get_rank(), dist.get_world_size())

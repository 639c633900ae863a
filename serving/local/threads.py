"""With how many threads an engine computes: by default all cores but one, which is left to everybody else."""

from __future__ import annotations

import torch

from serving.local.kernels.library import compute_with
from speculator.host import num_cores


def spare_cores() -> int:
    """All that this process may use, but one."""
    return max(1, num_cores() - 1)


def use_threads(num_threads: int | None, *, own_kernels: bool) -> None:
    """What the calling thread computes from now on."""
    num_threads = num_threads or spare_cores()
    compute_with(num_threads)
    # What PyTorch does between two passes of our kernels is too small to be worth waking another thread.
    torch.set_num_threads(1 if own_kernels else num_threads)

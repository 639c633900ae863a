"""Where the trainer computes."""

from __future__ import annotations

import os
from typing import Literal

import torch

from speculator.errors import ConfigError

DeviceSetting = Literal["auto", "cpu", "cuda"]


def local_rank() -> int:
    """This process's number among those that `torchrun` started on this machine; 0 without it."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def choose_device(setting: DeviceSetting) -> torch.device:
    """The GPU with this process's number on its machine, or the CPU; "auto" takes a GPU where there are any.

    CUDA_VISIBLE_DEVICES says which GPUs there are. Raises ConfigError where the GPU does not exist.
    """
    num_gpus = torch.cuda.device_count() if setting != "cpu" else 0
    if setting == "cpu" or (setting == "auto" and not num_gpus):
        return torch.device("cpu")
    if local_rank() >= num_gpus:
        raise ConfigError(
            f"process {local_rank()} of this machine has no GPU, there are {num_gpus}: set --nproc-per-node to at most "
            "that, or set SLIPSTREAM_TRAINER_DEVICE=cpu"
        )
    return torch.device("cuda", local_rank())

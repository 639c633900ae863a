"""What the plugin reads of SGLang's EAGLE worker, its target and its batches."""

from __future__ import annotations

from typing import Any

import torch

from speculator.errors import ConfigError


def depths_of(worker: Any) -> list[int]:
    """Between which it can choose. Raises ConfigError where it could never go without the draft."""
    controller = worker.adaptive_controller
    depths = controller.candidate_steps if controller is not None else [worker.speculative_num_steps]
    if controller is not None and 0 not in depths:
        raise ConfigError("--speculative-adaptive-config has no candidate 0: add it, the baseline needs it")
    return list(depths)


def device_of(worker: Any) -> torch.device:
    device: torch.device = next(worker.target_worker.model_runner.model.parameters()).device
    return device


def tensor_parallel_group() -> Any:
    from sglang.srt.distributed.parallel_state import get_tp_group

    return get_tp_group()

"""Whether products take two inputs at a time on this CPU: what is faster is measured at the start.

AMD's CPUs do two with the instruction for pairs in the time of one in float; Intel's take longer for that instruction
than for two in float. Neither is near the ratio that is asked for here, so that what is chosen, and with it a text's
last bits, is the same at every start.
"""

from __future__ import annotations

import time

import torch
from torch import nn

from serving.local.kernels.layers import KernelLinear
from serving.local.kernels.library import PANEL, Kernels

_WIDTH, _TOKENS, _TURNS = 256, 384, 9
_FASTER = 1.2


def faster_in_pairs(kernels: Kernels) -> bool:
    """Takes a millisecond: the best of some turns of either. The weight is one panel, and so for one thread, and in the
    nearest cache.
    """
    if not (kernels.has_pairs and torch.cpu.get_capabilities().get("avx512_bf16", False)):
        return False
    # Nobody else's random numbers are drawn.
    linear = nn.Linear(_WIDTH, PANEL, bias=False, dtype=torch.bfloat16, device="meta").to_empty(device="cpu")
    linear.requires_grad_(False).weight.fill_(1)
    ways = [KernelLinear(linear, kernels, in_pairs=in_pairs) for in_pairs in (False, True)]
    x = torch.ones(_TOKENS, _WIDTH, dtype=torch.bfloat16)
    seconds = [float("inf")] * len(ways)
    for _ in range(_TURNS):
        for way, module in enumerate(ways):
            began = time.perf_counter()
            kernels.linear(module.layer, x)
            seconds[way] = min(seconds[way], time.perf_counter() - began)
    return _FASTER * seconds[1] < seconds[0]

"""Where matrices in bfloat16 are multiplied faster than in float32."""

from __future__ import annotations

import torch


def is_fast(device: torch.device) -> bool:
    """On a CPU oneDNN has to have it, which wants AVX-512 or AVX-NE-CONVERT: PyTorch's own loop takes several times as
    long as float32 does.
    """
    if device.type != "cpu":
        return True
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def autocast(device: torch.device, *, is_wanted: bool) -> torch.autocast:
    """Matrices in bfloat16 where that is wanted and fast."""
    return torch.autocast(device.type, torch.bfloat16, enabled=is_wanted and is_fast(device))

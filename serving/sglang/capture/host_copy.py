"""Device results to the host without holding the device up: a side stream, pinned memory, and an event to wait for."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from speculator.errors import ConfigError


class HostCopy:
    """Named tensors on their way to the host; `wait` blocks the calling thread, never the device."""

    def __init__(self, tensors: dict[str, Tensor], done: torch.cuda.Event | None) -> None:
        self._tensors, self._done = tensors, done
        self.num_bytes = sum(tensor.nbytes for tensor in tensors.values())

    def wait(self) -> dict[str, Tensor]:
        if self._done is not None:
            self._done.synchronize()
        return self._tensors


class HostCopier:
    """Starts copies from one device; used by the thread that runs the model."""

    def __init__(self, device: torch.device) -> None:
        """Raises ConfigError for a device whose copies it cannot wait for."""
        if device.type not in ("cuda", "cpu"):
            raise ConfigError(f"capture has no way to copy from {device.type}: leave capture off")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def start(self, shared: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> HostCopy:
        """Copy tensors as they are at this point of the current stream.

        `shared` ones may be overwritten right afterwards; nobody writes to the `own` ones any more.
        """
        # A graph overwrites its outputs at the next replay: a copy on the device is cheap, waiting for the host is not.
        staged = {**{name: tensor.clone() for name, tensor in shared.items()}, **own}
        if self._stream is None:
            return HostCopy(staged, None)
        self._stream.wait_stream(torch.cuda.current_stream())
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        host: dict[str, Tensor] = {}
        with torch.cuda.stream(self._stream):
            for name, tensor in staged.items():
                tensor.record_stream(self._stream)
                host[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                host[name].copy_(tensor, non_blocking=True)
            done.record()
        return HostCopy(host, done)

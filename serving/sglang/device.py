"""Streams and events of the device that SGLang runs on. All waiting between host and device goes through here.

A GPU executes calls later, in order within a stream. A `DeviceEvent` is a point in the work of the stream that was
current when it was recorded. A CPU has finished when a call returns, so its events are reached when they are recorded.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from speculator.errors import ConfigError

_KEPT_INDICES = 64
"""Cached index tensors: the captured requests of a batch rarely change from step to step."""


class DeviceEvent(Protocol):
    """A point in a stream's work."""

    def wait(self) -> None:
        """Block the calling thread until it is reached; the device goes on."""

    @property
    def is_reached(self) -> bool:
        """Whether all work before it is done; never waits."""

    def seconds_since(self, earlier: Any) -> float:
        """Seconds between two reached events of one device."""


class Device(Protocol):
    """One device, for any thread. Only `side_stream` changes the current stream."""

    is_host: bool
    """Whether it is a CPU: its memory is the host's, and its calls are synchronous."""

    def index(self, numbers: tuple[int, ...]) -> Tensor:
        """[n] int64 on the device, by which its tensors can be indexed without waiting for it."""

    def upload(self, numbers: Sequence[int]) -> Tensor:
        """As `index`, without caching."""

    def upload_table(self, numbers: np.ndarray) -> Tensor:
        """The matrix on the device, without caching; the caller must not write to it afterwards."""

    def record_event(self) -> DeviceEvent:
        """Record the end of the current stream's work so far."""

    def side_stream(self) -> contextlib.AbstractContextManager[object]:
        """Run the block's work on this object's side stream, from any thread.

        The side stream waits for no other: to read what another stream computes, call `wait_event` first.
        """

    def wait_event(self, event: DeviceEvent) -> None:
        """Let later work of the current stream wait for the event."""

    def record_stream(self, tensors: Iterable[Tensor]) -> None:
        """Keep the memory of tensors that another stream made until the current stream has read them."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """Copy another stream's tensor, which nobody may write to; the copy is complete when the current stream reaches
        this point.
        """

    def synchronize(self) -> None:
        """Block the calling thread until all streams of the device are done."""


class _CpuEvent:
    """An event of a CPU: the moment when it was recorded."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def wait(self) -> None:
        pass

    @property
    def is_reached(self) -> bool:
        return True

    def seconds_since(self, earlier: Any) -> float:
        return self._at_s - float(earlier._at_s)


class CpuDevice:
    """A CPU, which has no streams."""

    is_host = True

    def index(self, numbers: tuple[int, ...]) -> Tensor:
        return self.upload(numbers)

    def upload(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64)

    def upload_table(self, numbers: np.ndarray) -> Tensor:
        return torch.from_numpy(numbers)

    def record_event(self) -> DeviceEvent:
        return _CpuEvent()

    def side_stream(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def wait_event(self, event: DeviceEvent) -> None:
        pass

    def record_stream(self, tensors: Iterable[Tensor]) -> None:
        pass

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor

    def synchronize(self) -> None:
        pass


class _CudaEvent:
    """An event of a GPU."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.event.record()

    def wait(self) -> None:
        self.event.synchronize()

    @property
    def is_reached(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def seconds_since(self, earlier: Any) -> float:
        return float(earlier.event.elapsed_time(self.event)) / 1000


class CudaDevice:
    """One GPU. Each object has a side stream of its own."""

    is_host = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.index = functools.lru_cache(_KEPT_INDICES)(self.upload)

    def upload(self, numbers: Sequence[int]) -> Tensor:
        # A copy from memory that is not pinned would wait for all earlier work of the device.
        return torch.tensor(numbers, dtype=torch.int64, pin_memory=True).to(self._device, non_blocking=True)

    def upload_table(self, numbers: np.ndarray) -> Tensor:
        return torch.from_numpy(numbers).pin_memory().to(self._device, non_blocking=True)

    def record_event(self) -> DeviceEvent:
        return _CudaEvent()

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        # A new thread starts on the first GPU, whichever one SGLang's own thread uses.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def wait_event(self, event: DeviceEvent) -> None:
        assert isinstance(event, _CudaEvent)
        torch.cuda.current_stream().wait_event(event.event)

    def record_stream(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            tensor.record_stream(torch.cuda.current_stream())

    def to_host(self, tensor: Tensor) -> Tensor:
        self.record_stream([tensor])
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


def device_layer(device: torch.device) -> Device:
    """The `Device` of a CPU or CUDA GPU; raises ConfigError for other kinds."""
    # PyTorch calls AMD's GPUs cuda, too.
    match "ROCm" if device.type == "cuda" and torch.version.hip else device.type:
        case "cpu":
            return CpuDevice()
        case "cuda":
            return CudaDevice(device)
        case other:
            raise ConfigError(f"the plugin cannot wait for {other}: run SGLang on a CUDA GPU or a CPU")

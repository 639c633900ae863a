"""Streams and events of the device that SGLang runs on. All waiting between host and device goes through here.

A GPU works on what it is told later, stream by stream. A `Mark` is a point in the work of the stream that was current
when it was made. A CPU has done its work when it returns, so its marks are reached when they are made.
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
"""Which requests of a batch are captured stays the same from step to step."""


class Mark(Protocol):
    """A point in a stream's work."""

    def wait(self) -> None:
        """Block the calling thread until it is reached; the device goes on."""

    @property
    def is_reached(self) -> bool:
        """Whether all work before it is done; never waits."""

    def seconds_since(self, earlier: Any) -> float:
        """Seconds between two reached marks of one device."""


class Device(Protocol):
    """One device, for any thread. `beside` alone changes what the current stream is."""

    is_host: bool
    """Its memory is the host's, and it computes what it is told at once."""

    def index(self, numbers: tuple[int, ...]) -> Tensor:
        """[n] int64 on the device, by which its tensors can be indexed without waiting for it."""

    def upload(self, numbers: Sequence[int]) -> Tensor:
        """The same for numbers that will not come again."""

    def upload_table(self, numbers: np.ndarray) -> Tensor:
        """A matrix of numbers that will not come again; nobody writes to it any more."""

    def mark(self) -> Mark:
        """The current stream's work so far."""

    def beside(self) -> contextlib.AbstractContextManager[object]:
        """The block's work goes to a stream of its own, on this device whatever thread runs it.

        It begins behind nothing: whoever reads what another stream computes calls `follow` first.
        """

    def follow(self, mark: Mark) -> None:
        """What the current stream is told from now on begins behind the mark."""

    def borrow(self, tensors: Iterable[Tensor]) -> None:
        """The current stream reads these, which another one made: until it has, nobody is given their memory."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """A tensor of another stream that nobody writes to, on the host once the current stream has come here."""

    def settle(self) -> None:
        """Block the calling thread until all streams of the device are done."""


class _Reached:
    """A mark on a CPU: the moment when it was made."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def wait(self) -> None:
        pass

    @property
    def is_reached(self) -> bool:
        return True

    def seconds_since(self, earlier: Any) -> float:
        return self._at_s - float(earlier._at_s)


class HostDevice:
    """A CPU, which has no streams."""

    is_host = True

    def index(self, numbers: tuple[int, ...]) -> Tensor:
        return self.upload(numbers)

    def upload(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64)

    def upload_table(self, numbers: np.ndarray) -> Tensor:
        return torch.from_numpy(numbers)

    def mark(self) -> Mark:
        return _Reached()

    def beside(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def follow(self, mark: Mark) -> None:
        pass

    def borrow(self, tensors: Iterable[Tensor]) -> None:
        pass

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor

    def settle(self) -> None:
        pass


class _Event:
    """A mark on a GPU."""

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
        # From memory that is not pinned the copy would wait until the device has done all that it was told before.
        return torch.tensor(numbers, dtype=torch.int64, pin_memory=True).to(self._device, non_blocking=True)

    def upload_table(self, numbers: np.ndarray) -> Tensor:
        return torch.from_numpy(numbers).pin_memory().to(self._device, non_blocking=True)

    def mark(self) -> Mark:
        return _Event()

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        # A new thread is on the first GPU, whichever SGLang's own thread has chosen.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def follow(self, mark: Mark) -> None:
        assert isinstance(mark, _Event)
        torch.cuda.current_stream().wait_event(mark.event)

    def borrow(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            tensor.record_stream(torch.cuda.current_stream())

    def to_host(self, tensor: Tensor) -> Tensor:
        self.borrow([tensor])
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)


def device_layer(device: torch.device) -> Device:
    """Raises ConfigError for a device whose work nobody here knows how to wait for."""
    match device.type:
        case "cpu":
            return HostDevice()
        case "cuda":
            return CudaDevice(device)
        case other:
            raise ConfigError(f"the plugin cannot wait for {other}: run SGLang on a CUDA GPU or a CPU")

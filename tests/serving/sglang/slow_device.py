"""Stands in for a GPU: what the main stream is told is done when the test says so, and waiting for it is noticed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from serving.sglang.device import CpuDevice, DeviceEvent


class WaitedError(AssertionError):
    """The host would have waited for the device in the midst of a step."""


_aten = torch.ops.aten
_WAIT = {
    _aten._local_scalar_dense.default,
    _aten.is_nonzero.default,
    _aten.equal.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten._unique2.default,
    _aten.repeat_interleave.Tensor,
}
"""They read a value, or make as many elements as the data say."""


class NoWaiting(TorchDispatchMode):
    """Tells tensors that stand for the device from those of the host. What makes one of the other waits.

    A tensor is the device's where it was placed there, or computed from one that is. A tensor that an operator fills
    without any data (`zeros`, `arange`) may be either's. All others are the host's, those of Python's lists too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._device: dict[int, Tensor] = {}
        self._either: dict[int, Tensor] = {}
        self.num_operators = 0

    def place(self, *objects: Any) -> None:
        """All tensors in these, at any depth."""
        for one in objects:
            if isinstance(one, Tensor):
                self._device[id(one)] = one
            elif isinstance(one, dict | SimpleNamespace):
                self.place(*(one if isinstance(one, dict) else vars(one)).values())

    def to_host(self, tensor: Tensor) -> Tensor:
        with torch.utils._python_dispatch._disable_current_modes():
            return tensor.clone()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [one for one in tree_leaves((args, kwargs or {})) if isinstance(one, Tensor)]
        on_device = [one for one in given if id(one) in self._device]
        if on_device:
            self.num_operators += 1
            others = [one for one in given if id(one) not in self._device and id(one) not in self._either]
            if any(one.dim() for one in others):
                raise WaitedError(f"{func} mixes a tensor of the host with one of the device")
            is_mask = func in (_aten.index.Tensor, _aten.index_put_.default, _aten._index_put_impl_.default) and any(
                one is not None and one.dtype == torch.bool for one in args[1]
            )
            if func in _WAIT or is_mask:
                raise WaitedError(f"{func} needs the values of a tensor of the device")
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor):
                if on_device:
                    self._device[id(one)] = one
                elif all(id(source) in self._either for source in given):
                    self._either[id(one)] = one
        return result


class SlowEvent:
    def __init__(self, at_s: float) -> None:
        self.at_s, self.reached = at_s, threading.Event()

    def wait(self) -> None:
        assert self.reached.wait(10), "nobody has let the device finish"

    @property
    def is_reached(self) -> bool:
        return self.reached.is_set()

    def seconds_since(self, earlier: SlowEvent) -> float:
        return self.at_s - earlier.at_s


class SlowDevice(CpuDevice):
    """Events hold the device's time, `now_s`. What a side stream is told is done at once.

    Under a `NoWaiting` it tells that one which tensors are on the device.
    """

    is_host = False

    def __init__(self, watched: NoWaiting | None = None) -> None:
        self._watched = watched
        self.now_s = 0.0
        self.log: list[str] = []
        self._nesting = threading.local()
        self._events: list[SlowEvent] = []

    def finish(self) -> None:
        """The main stream has done all that it was told."""
        events, self._events = self._events, []
        for event in events:
            event.reached.set()

    @property
    def _stream(self) -> str:
        return "side" if getattr(self._nesting, "depth", 0) else "main"

    def record_event(self) -> DeviceEvent:
        self.log.append(f"{self._stream}: event")
        event = SlowEvent(self.now_s)
        if self._stream == "side":
            event.reached.set()
        else:
            self._events.append(event)
        return event

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        self._nesting.depth = getattr(self._nesting, "depth", 0) + 1
        try:
            yield
        finally:
            self._nesting.depth -= 1

    def wait_event(self, event: DeviceEvent) -> None:
        self.log.append(f"{self._stream}: wait event")

    def record_stream(self, tensors: Iterable[Tensor]) -> None:
        self.log.append(f"{self._stream}: record stream {len(list(tensors))}")

    def to_host(self, tensor: Tensor) -> Tensor:
        self.log.append(f"{self._stream}: to host")
        if self._watched is None:
            return tensor.clone()
        return self._watched.to_host(tensor)

    def upload(self, numbers: Sequence[int]) -> Tensor:
        return self._placed(super().upload(numbers))

    def upload_table(self, numbers: np.ndarray) -> Tensor:
        return self._placed(super().upload_table(numbers))

    def _placed(self, tensor: Tensor) -> Tensor:
        if self._watched is not None:
            self._watched.place(tensor)
        return tensor

    def synchronize(self) -> None:
        self.log.append("synchronize")
        self.finish()

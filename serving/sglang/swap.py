"""Swap the weights of SGLang's running draft: verify and stage them beside it, then exchange them between two steps.

Staging lets SGLang's own `load_weights` fill tensors that are shaped like the draft's parameters, so it fuses and
shards weights as usual. The exchange writes into the same storage: CUDA graphs stay valid, no request has to end, the
prefix cache stays. It swaps contents, so a copy that fails half-way is undone from the staged tensors.

There is one set of staged tensors, allocated at the start, so a swap needs no memory of a GPU that serving has filled.
A GPU executes the exchange later than it is called. Until then nobody may write to the set again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import structlog
import torch
from torch import Tensor, nn

from serving.engine import SwapReport
from serving.sglang.device import Device, DeviceEvent
from speculator.errors import DraftFileError, DraftMismatchError, EngineBusyError, EngineDeadError, EngineError
from speculator.tracing import span

log = structlog.get_logger(__name__)
LoadDraft = Callable[[int], dict[str, Tensor]]
"""Reads and verifies a stored version; raises DraftError or StoreError."""
_EMBEDDING = "embed_tokens"
_IDLE_AFTER_S = 0.25
_MEETING_WITHIN_S = 20.0
"""Longest wait for a meeting: dozens of slow steps. The engine's report waits, too, and would be missed after 30 s."""


class WeightExchange(NamedTuple):
    """An exchange of weights that the device was told to make."""

    version: int
    previous: int
    step: int
    begin: DeviceEvent
    end: DeviceEvent
    """From here on the device uses the new weights, and nothing reads the staged ones."""


class SglangDraft:
    """The draft that SGLang runs. Call `install_draft` on a side thread, `at_boundary` on the scheduler's."""

    def __init__(self, model: nn.Module, version: int, load: LoadDraft, *, device: Device, alone: bool) -> None:
        """`alone` says that no other rank has to swap in the same step.

        Raises DraftMismatchError when what SGLang has loaded is not this version, bit for bit.
        """
        self._model, self._load, self._device, self._alone = model, load, device, alone
        self._parameters = {name: value for name, value in model.named_parameters() if _EMBEDDING not in name}
        device.synchronize()
        with device.side_stream():
            self.staged = {name: _like(parameter) for name, parameter in self._parameters.items()}
            """By the names of the draft's parameters."""
        self._in_use: DeviceEvent | None = None
        """Up to this event the device reads or writes the staged tensors."""
        self._version = version
        self._lock = threading.Lock()
        self._pending: tuple[int, Future[WeightExchange]] | None = None
        """The staged version that waits for a step boundary."""
        self._is_closed = False
        self.stepping = threading.Lock()
        """Held while a step is launched, so whoever else holds it runs between two steps."""
        self._check_in_service()

    @property
    def draft_version(self) -> int:
        return self._version

    @property
    def staged_version(self) -> int:
        """The version that waits for a step boundary, 0 where none does."""
        pending = self._pending
        return pending[0] if pending else 0

    def stage(self, version: int) -> None:
        """Fill the staged tensors. Raises DraftError or StoreError for a version that cannot come into service here."""
        state = self._load(version)
        if self._in_use is not None:
            self._in_use.wait()
        view = _StagingView(self._model, self.staged)
        # d2t is frozen: it was compared when the file was read, and SGLang has copied it elsewhere at start.
        weights = [(name, tensor) for name, tensor in state.items() if name not in ("d2t", "t2d")]
        with torch.no_grad(), self._device.side_stream():
            for tensor in self.staged.values():
                # What the file leaves unset stays NaN.
                tensor.fill_(float("nan"))
            fill: Callable[..., Any] = type(self._model).load_weights  # type: ignore[attr-defined]
            fill(view, weights)
            missed = [name for name, tensor in self.staged.items() if not bool(torch.isfinite(tensor).all())]
            self._pack()
            self._device.record_event().wait()
        if missed:
            raise DraftFileError(f"draft version {version} leaves {missed[0]} of SGLang's draft unset or not finite")

    def _pack(self) -> None:
        """Reorder staged weights as SGLang has reordered those of its draft, for its operators on a CPU with AMX."""
        for name, module in self._model.named_modules():
            staged = self.staged.get(f"{name}.weight")
            if staged is not None and getattr(module, "use_intel_amx_backend", False):
                staged.copy_(torch.ops.sgl_kernel.convert_weight_packed(staged))

    def install_draft(self, version: int) -> SwapReport:
        """Stage a version and wait until a step boundary has put it into service. A rank alone swaps while idle, too.

        Raises DraftError, StoreError, EngineDeadError, EngineBusyError where the ranks do not all meet with this
        version in time, or EngineError where the copy failed; the version in service then stays.
        """
        with span("stage", version=version):
            self.stage(version)
        with span("install", version=version):
            made = self._install(version)
            made.end.wait()
        stall_ms = 1000 * made.end.seconds_since(made.begin)
        return SwapReport(version=made.version, previous=made.previous, stall_ms=stall_ms, step=made.step)

    def _install(self, version: int) -> WeightExchange:
        done = Future[WeightExchange]()
        with self._lock:
            if self._is_closed:
                raise EngineDeadError("the engine has stopped")
            self._pending = (version, done)
        try:
            return done.result(_IDLE_AFTER_S if self._alone else _MEETING_WITHIN_S)
        except TimeoutError:
            return self._install_idle(done)

    def _install_idle(self, done: Future[WeightExchange]) -> WeightExchange:
        """Install while no step comes: a rank alone swaps now, one of several withdraws its staged version."""
        if self._alone:
            with self.stepping, self._device.side_stream():
                self._device.synchronize()
                if (made := self.at_boundary(0)) is not None:
                    # The next step runs on another stream, and must read the new weights.
                    made.end.wait()
            return done.result()
        with self._lock:
            if self._pending is not None and self._pending[1] is done:
                self._pending = None
                raise EngineBusyError(
                    f"the ranks did not all meet with this version in {_MEETING_WITHIN_S:.0f} s (no step came, or one "
                    "has not read it): it is offered again"
                )
        return done.result()

    def at_boundary(self, step: int, agree: Callable[[bool], bool] = bool) -> WeightExchange | None:
        """Exchange the staged version into service, if there is one.

        `agree` returns whether all ranks have copied it. If one failed or withdrew its version, no rank keeps it.
        """
        with self._lock:
            pending, self._pending = self._pending, None
        if pending is None:
            agree(False)
            return None
        version, done = pending
        begin = self._device.record_event()
        failure = self._try_to_exchange()
        is_agreed = agree(not failure)
        if not is_agreed and not failure:
            self._exchange()
        self._in_use = end = self._device.record_event()
        if not is_agreed:
            reason = failure or "another rank could not copy it"
            log.error("draft version could not be copied into service", version=version, error=reason)
            done.set_exception(EngineError(f"draft version {version} could not be copied: {reason}"))
            return None
        made = WeightExchange(version, self._version, step, begin, end)
        self._version = version
        done.set_result(made)
        return made

    def close(self) -> None:
        """End a waiting `install_draft`: no further step will come."""
        with self._lock:
            self._is_closed = True
            pending, self._pending = self._pending, None
        if pending is not None:
            pending[1].set_exception(EngineDeadError("the engine stopped before the swap"))

    def _try_to_exchange(self) -> str:
        """Exchange the weights; returns the error, empty on success."""
        try:
            self._exchange()
        except Exception as error:
            return repr(error)
        return ""

    def _exchange(self) -> None:
        exchanged: list[str] = []
        try:
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    before = parameter.clone()
                    exchanged.append(name)
                    parameter.copy_(self.staged[name])
                    self.staged[name].copy_(before)
        except Exception:
            # The old weights of the last one are in `before` or still in place; those of the others are in `staged`.
            with torch.no_grad():
                if exchanged:
                    self._parameters[exchanged[-1]].copy_(before)
                for name in exchanged[:-1]:
                    self._parameters[name].copy_(self.staged[name])
            raise

    def _check_in_service(self) -> None:
        self.stage(self._version)
        with self._device.side_stream():
            for name, parameter in self._parameters.items():
                if not torch.equal(parameter, self.staged[name]):
                    raise DraftMismatchError(
                        f"SGLang's draft differs in {name} from version {self._version} of the store: start it with "
                        "that version's folder as --speculative-draft-model-path, in bfloat16 and without quantization"
                    )


class _StagingView:
    """Stands in for SGLang's draft while its `load_weights` runs: the same in everything but the parameters."""

    def __init__(self, model: nn.Module, staged: dict[str, nn.Parameter]) -> None:
        self._model, self.staged = model, staged
        self.hot_token_id: Any = None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.staged.items()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _like(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter that SGLang's weight loaders treat alike."""
    copy = nn.Parameter(torch.empty_like(parameter), requires_grad=False)
    copy.__dict__.update(parameter.__dict__)
    return copy

"""New draft weights into SGLang's running draft: verified and staged beside it, then exchanged between two steps.

Staging lets SGLang's own `load_weights` fill tensors that are shaped like the draft's parameters, so fused and sharded
weights come out as they must. The exchange writes into the same storage: CUDA graphs stay valid, nothing drains, the
prefix cache stays. It swaps contents, so a copy that fails half-way is undone with what was taken out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import structlog
import torch
from torch import Tensor, nn

from serving.engine import SwapReport
from speculator.errors import DraftFileError, DraftMismatchError, EngineBusyError, EngineDeadError, EngineError
from speculator.tracing import span

log = structlog.get_logger(__name__)
LoadDraft = Callable[[int], dict[str, Tensor]]
"""Reads and verifies a stored version; raises DraftError or StoreError."""
_EMBEDDING = "embed_tokens"
_IDLE_AFTER_S = 0.25
_MEETING_WITHIN_S = 10.0


@dataclass(frozen=True)
class StagedDraft:
    """A version's tensors on the device, by the names of the draft's own parameters."""

    version: int
    tensors: dict[str, nn.Parameter]


class SglangDraft:
    """The draft that SGLang runs. `install_draft` is for a side thread, `at_boundary` for the thread of the steps."""

    def __init__(self, model: nn.Module, version: int, load: LoadDraft, *, alone: bool) -> None:
        """`alone` says that no other rank has to swap in the same step.

        Raises DraftMismatchError when what SGLang has loaded is not this version, bit for bit.
        """
        self._model, self._load, self._alone = model, load, alone
        self._parameters = {name: value for name, value in model.named_parameters() if _EMBEDDING not in name}
        self._is_cuda = next(model.parameters()).is_cuda
        self._version = version
        self._lock = threading.Lock()
        self._pending: tuple[StagedDraft, Future[SwapReport]] | None = None
        self._is_closed = False
        self.stepping = threading.Lock()
        """Held while a step is launched: whoever else holds it stands between two steps."""
        self._check_in_service()

    @property
    def draft_version(self) -> int:
        return self._version

    @property
    def staged_version(self) -> int:
        """The version that waits for a step boundary, 0 where none does."""
        pending = self._pending
        return pending[0].version if pending else 0

    def stage(self, version: int) -> StagedDraft:
        """Raises DraftError or StoreError for a version that cannot come into service here."""
        state = self._load(version)
        staged = {name: _like(parameter) for name, parameter in self._parameters.items()}
        view = _StagingView(self._model, staged)
        # d2t is frozen: it was compared when the file was read, and SGLang has copied it elsewhere at start.
        weights = [(name, tensor) for name, tensor in state.items() if name not in ("d2t", "t2d")]
        with torch.no_grad():
            fill: Callable[..., Any] = type(self._model).load_weights  # type: ignore[attr-defined]
            fill(view, weights)
        if self._is_cuda:
            torch.cuda.current_stream().synchronize()
        missed = [name for name, tensor in staged.items() if not bool(torch.isfinite(tensor).all())]
        if missed:
            raise DraftFileError(f"draft version {version} leaves {missed[0]} of SGLang's draft unset or not finite")
        return StagedDraft(version, staged)

    def install_draft(self, version: int) -> SwapReport:
        """Stage a version and wait until a step boundary has put it into service; an idle server needs none.

        Raises DraftError, StoreError, EngineDeadError, EngineBusyError where other ranks have to take part and no step
        comes, or EngineError where the copy failed; the version in service then stays.
        """
        with span("stage", version=version):
            staged = self.stage(version)
        with span("install", version=version):
            return self._install(staged)

    def _install(self, staged: StagedDraft) -> SwapReport:
        done = Future[SwapReport]()
        with self._lock:
            if self._is_closed:
                raise EngineDeadError("the engine has stopped")
            self._pending = (staged, done)
        try:
            return done.result(_IDLE_AFTER_S if self._alone else _MEETING_WITHIN_S)
        except TimeoutError:
            return self._install_idle(done)

    def _install_idle(self, done: Future[SwapReport]) -> SwapReport:
        """No step came. Alone, take the place between two steps; otherwise take the offer back."""
        if self._alone:
            with self.stepping:
                if self._is_cuda:
                    torch.cuda.synchronize()
                self.at_boundary(0)
                if self._is_cuda:
                    torch.cuda.synchronize()
            return done.result()
        with self._lock:
            if self._pending is not None and self._pending[1] is done:
                self._pending = None
                raise EngineBusyError("the server is idle and its ranks cannot agree on a step")
        return done.result()

    def at_boundary(self, step: int, agree: Callable[[bool], bool] = bool) -> SwapReport | None:
        """Put a staged version into service, if there is one.

        `agree` says whether all ranks have copied it; where one could not, or has taken its offer back, none keeps it.
        """
        with self._lock:
            pending, self._pending = self._pending, None
        if pending is None:
            agree(False)
            return None
        staged, done = pending
        started_s = time.perf_counter()
        failure = self._try_to_exchange(staged)
        if not agree(not failure):
            if not failure:
                self._exchange(staged)
            reason = failure or "another rank could not"
            log.error("draft version %d could not be copied into service: %s", staged.version, reason)
            done.set_exception(EngineError(f"draft version {staged.version} could not be copied: {reason}"))
            return None
        stall_ms = 1000 * (time.perf_counter() - started_s)
        report = SwapReport(version=staged.version, previous=self._version, stall_ms=stall_ms, step=step)
        self._version = staged.version
        done.set_result(report)
        return report

    def close(self) -> None:
        """End a waiting `install_draft`: no further step will come."""
        with self._lock:
            self._is_closed = True
            pending, self._pending = self._pending, None
        if pending is not None:
            pending[1].set_exception(EngineDeadError("the engine stopped before the swap"))

    def _try_to_exchange(self, staged: StagedDraft) -> str:
        """Why it failed; empty where it did not."""
        try:
            self._exchange(staged)
        except Exception as error:
            return repr(error)
        return ""

    def _exchange(self, staged: StagedDraft) -> None:
        exchanged: list[str] = []
        try:
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    before = parameter.clone()
                    exchanged.append(name)
                    parameter.copy_(staged.tensors[name])
                    staged.tensors[name].copy_(before)
        except Exception:
            # The last one holds the old weights in `before` or still in itself; all others in the staging copy.
            with torch.no_grad():
                if exchanged:
                    self._parameters[exchanged[-1]].copy_(before)
                for name in exchanged[:-1]:
                    self._parameters[name].copy_(staged.tensors[name])
            raise

    def _check_in_service(self) -> None:
        staged = self.stage(self._version)
        for name, parameter in self._parameters.items():
            if not torch.equal(parameter, staged.tensors[name]):
                raise DraftMismatchError(
                    f"SGLang's draft differs in {name} from version {self._version} of the store: start it with that "
                    "version's folder as --speculative-draft-model-path, in bfloat16 and without quantization"
                )


class _StagingView:
    """Stands in for SGLang's draft while its `load_weights` runs: the same in everything but the parameters."""

    def __init__(self, model: nn.Module, staged: dict[str, nn.Parameter]) -> None:
        self._model, self._staged = model, staged
        self.hot_token_id: Any = None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._staged.items()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _like(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter that SGLang's weight loaders treat alike; not finite, so that what they leave out is noticed."""
    copy = nn.Parameter(torch.full_like(parameter, float("nan")), requires_grad=False)
    copy.__dict__.update(parameter.__dict__)
    return copy

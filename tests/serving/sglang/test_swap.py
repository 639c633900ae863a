"""The exchange of weights between two steps, with a small stand-in for SGLang's draft."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from serving.engine import SwapReport
from serving.sglang.device import CpuDevice, Device, DeviceEvent, device_layer
from serving.sglang.swap import SglangDraft
from speculator.errors import (
    ConfigError,
    DraftFileError,
    DraftMismatchError,
    EngineBusyError,
    EngineDeadError,
    EngineError,
)
from tests.fixtures.waiting import wait_until
from tests.serving.sglang.slow_device import SlowDevice, SlowEvent


class FusedDraft(nn.Module):
    """Fuses q and k as SGLang does, and shares its embedding with the target."""

    def __init__(self, embed: nn.Parameter) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(4, 2)
        self.embed_tokens.weight = embed
        self.qk = nn.Parameter(torch.zeros(4, 2))
        self.norm = nn.Parameter(torch.zeros(2))
        self.factor = 1.0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        with torch.no_grad():
            for name, tensor in weights:
                if name in ("q", "k"):
                    half = parameters["qk"][:2] if name == "q" else parameters["qk"][2:]
                    half.copy_(tensor * self.factor)
                elif name in parameters:
                    parameters[name].copy_(tensor)


def state(value: float) -> dict[str, Tensor]:
    return {
        "q": torch.full((2, 2), value),
        "k": torch.full((2, 2), value + 0.5),
        "norm": torch.full((2,), value),
        "d2t": torch.zeros(2),
    }


VERSIONS = {1: state(1.0), 2: state(2.0), 3: {"q": state(3.0)["q"], "norm": state(3.0)["norm"]}}


@pytest.fixture
def model() -> FusedDraft:
    model = FusedDraft(nn.Parameter(torch.ones(4, 2)))
    model.load_weights(VERSIONS[1].items())
    return model


def make_draft(model: FusedDraft, *, alone: bool = True, version: int = 1, device: Device | None = None) -> SglangDraft:
    return SglangDraft(model, version, VERSIONS.__getitem__, device=device or CpuDevice(), alone=alone)


def install_in_thread(draft: SglangDraft, version: int) -> tuple[threading.Thread, list[object]]:
    outcome: list[object] = []

    def install() -> None:
        try:
            outcome.append(draft.install_draft(version))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=install)
    thread.start()
    return thread, outcome


def test_a_swap_writes_into_the_same_storage_and_leaves_the_embedding_alone(model: FusedDraft) -> None:
    draft = make_draft(model)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    thread, outcome = install_in_thread(draft, 2)
    while draft.at_boundary(17) is None:
        pass
    thread.join()
    [report] = outcome
    assert isinstance(report, SwapReport)
    assert (report.version, report.previous, report.step, draft.draft_version) == (2, 1, 17, 2)
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert model.qk.tolist() == [[2, 2], [2, 2], [2.5, 2.5], [2.5, 2.5]]
    assert model.embed_tokens.weight.tolist() == [[1, 1]] * 4


def test_an_idle_server_swaps_without_a_step(model: FusedDraft) -> None:
    draft = make_draft(model)
    assert draft.install_draft(2).version == 2
    assert model.norm.tolist() == [2, 2]


def test_a_running_step_is_waited_for(model: FusedDraft) -> None:
    draft = make_draft(model)
    with draft.stepping:
        thread, outcome = install_in_thread(draft, 2)
        thread.join(0.6)
        assert thread.is_alive()
        assert model.norm.tolist() == [1, 1]
    thread.join()
    assert draft.draft_version == 2
    assert len(outcome) == 1


def test_ranks_that_run_no_step_take_the_offer_back(model: FusedDraft, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.sglang.swap._MEETING_WITHIN_S", 0.05)
    draft = make_draft(model, alone=False)
    with pytest.raises(EngineBusyError):
        draft.install_draft(2)
    assert (draft.staged_version, draft.draft_version) == (0, 1)
    assert draft.at_boundary(1) is None


def test_weights_that_a_file_lacks_are_noticed(model: FusedDraft) -> None:
    with pytest.raises(DraftFileError, match="leaves qk of SGLang's draft unset"):
        make_draft(model).install_draft(3)


def test_another_draft_than_the_stores_is_refused(model: FusedDraft) -> None:
    with pytest.raises(DraftMismatchError, match="differs in qk from version 2"):
        make_draft(model, version=2)


def test_a_copy_that_fails_half_way_is_undone(model: FusedDraft, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = make_draft(model)
    copy, copies = Tensor.copy_, [0]

    def failing_copy(self: Tensor, source: Tensor, *args: object) -> Tensor:
        if self is model.norm and copies[0] == 0:
            copies[0] += 1
            copy(self, torch.full_like(self, 99.0))
            raise RuntimeError("the device fell off the bus")
        return copy(self, source)

    thread, outcome = install_in_thread(draft, 2)
    with draft.stepping:
        wait_until(lambda: draft.staged_version == 2)
        monkeypatch.setattr(Tensor, "copy_", failing_copy)
    thread.join()
    assert isinstance(outcome[0], EngineError)
    assert "could not be copied" in str(outcome[0])
    assert draft.draft_version == 1
    assert model.qk.tolist() == [[1, 1], [1, 1], [1.5, 1.5], [1.5, 1.5]]
    assert model.norm.tolist() == [1, 1]
    monkeypatch.undo()
    assert draft.install_draft(2).version == 2


@pytest.mark.parametrize("is_here", [True, False])
def test_what_one_rank_cannot_copy_no_rank_keeps(model: FusedDraft, is_here: bool) -> None:
    """Or each would run its own part of another version. `is_here`: this rank had the version, and another failed."""
    draft = make_draft(model, alone=False)
    told: list[bool] = []

    def agree(copied: bool) -> bool:
        told.append(copied)
        return False

    if is_here:
        thread, outcome = install_in_thread(draft, 2)
        wait_until(lambda: draft.staged_version == 2)
    assert draft.at_boundary(32, agree) is None
    if is_here:
        thread.join()
        assert "another rank could not" in str(outcome[0])
    assert told == [is_here]
    assert draft.draft_version == 1
    assert model.qk.tolist() == [[1, 1], [1, 1], [1.5, 1.5], [1.5, 1.5]]
    assert model.norm.tolist() == [1, 1]


def test_closing_ends_a_waiting_install(model: FusedDraft) -> None:
    draft = make_draft(model, alone=False)
    thread, outcome = install_in_thread(draft, 2)
    while draft.staged_version != 2:
        pass
    draft.close()
    thread.join()
    assert isinstance(outcome[0], EngineDeadError)
    with pytest.raises(EngineDeadError):
        draft.install_draft(2)


def test_staged_weights_stay_until_the_device_has_read_them(model: FusedDraft) -> None:
    """It exchanges later than it is told to. What is written to them before would come into service."""
    device = SlowDevice()
    draft = make_draft(model, device=device)
    first, outcome = install_in_thread(draft, 2)
    wait_until(lambda: draft.staged_version == 2)
    device.now_s = 1.0
    made = draft.at_boundary(5)
    assert made is not None
    assert not made.end.is_reached
    second, later = install_in_thread(draft, 1)
    first.join(0.3)
    assert first.is_alive(), "the device has not said yet how long that took"
    assert draft.staged_version == 0, "the next version waits for the staged tensors"
    device.finish()
    first.join()
    wait_until(lambda: draft.staged_version == 1)
    draft.close()
    second.join()
    assert [type(one) for one in (*outcome, *later)] == [SwapReport, EngineDeadError]


def test_the_stall_is_the_devices_time(model: FusedDraft) -> None:
    device = SlowDevice()
    draft = make_draft(model, device=device)
    thread, outcome = install_in_thread(draft, 2)
    wait_until(lambda: draft.staged_version == 2)

    def agree(holds: bool) -> bool:
        device.now_s += 0.25
        return holds

    draft.at_boundary(5, agree)
    device.finish()
    thread.join()
    assert isinstance(outcome[0], SwapReport)
    assert outcome[0].stall_ms == 250


def test_an_idle_swap_waits_for_what_runs_and_is_through_before_the_next_step(model: FusedDraft) -> None:
    device = SlowDevice()
    draft = make_draft(model, device=device)
    device.log.clear()
    draft.install_draft(2)
    assert device.log == ["side: event", "synchronize", "side: event", "side: event"], "staged; then begin and end"


def test_no_step_begins_before_the_device_has_made_an_idle_swap(model: FusedDraft) -> None:
    """It would read weights that are half exchanged."""
    held: list[bool] = []

    class WatchedEvent(SlowEvent):
        def wait(self) -> None:
            held.append(draft.stepping.locked())
            super().wait()

    class Watched(SlowDevice):
        def record_event(self) -> DeviceEvent:
            event = WatchedEvent(self.now_s)
            event.reached.set()
            return event

    draft = make_draft(model)
    draft._device = Watched()
    draft.install_draft(2)
    assert held == [False, True, False], "staged; the exchange, while no step may begin; the report's own wait"


@pytest.mark.parametrize(("kind", "hip", "named"), [("cuda", "6.4", "ROCm"), ("xpu", None, "xpu")])
def test_devices_that_it_cannot_wait_for_are_refused(
    kind: str, hip: str | None, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch calls AMD's GPUs cuda, too."""
    monkeypatch.setattr(torch.version, "hip", hip)
    with pytest.raises(ConfigError, match=f"cannot wait for {named}"):
        device_layer(torch.device(kind))

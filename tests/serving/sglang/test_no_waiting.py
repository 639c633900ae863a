"""In the midst of a step nothing on the scheduler's thread waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.gpu.launch import cost
from serving.sglang.capture.device_reads import DraftLogprobRecorder
from serving.sglang.swap import SglangDraft
from speculator.trace import Trace
from tests.fixtures.waiting import wait_until
from tests.serving.sglang.harness import decode_half_of_a_batch, make_capture
from tests.serving.sglang.slow_device import NoWaiting, SlowDevice, WaitedError
from tests.serving.sglang.test_swap import VERSIONS, FusedDraft, install_in_thread


@pytest.mark.parametrize(
    "work",
    [
        lambda found: found[[0, 1]],
        lambda found: found[torch.tensor([0, 1])],
        lambda found: found[found > 0],
        lambda found: found[0].item(),
        lambda found: bool(found.any()),
        lambda found: found.nonzero(),
        lambda found: found + torch.tensor([1.0, 2.0, 3.0]),
        lambda found: torch.repeat_interleave(found, found.long()),
    ],
)
def test_what_waits_is_noticed(work: Callable[[torch.Tensor], object]) -> None:
    watched, found = NoWaiting(), torch.tensor([0.0, 1.0, 2.0])
    watched.place(found)
    with watched, pytest.raises(WaitedError):
        work(found)


def test_what_does_not_wait_goes_through() -> None:
    watched, found = NoWaiting(), torch.tensor([0.0, 1.0, 2.0])
    watched.place(found)
    with watched:
        index = torch.arange(2)
        assert (found[index] * 2 + torch.zeros(2)).shape == (2,)
        found[:2].copy_(torch.ones(2))
    assert watched.num_operators > 3


def test_capture_of_half_a_batch() -> None:
    traces: list[Trace] = []
    watched = NoWaiting()
    probe = DraftLogprobRecorder(num_slots=4, max_batch=4, max_proposals=3, topk=1, device=torch.device("cpu"))
    device = SlowDevice(watched)
    capture = make_capture(traces, device=device, probe=probe)
    watched.place({name: value for name, value in vars(probe).items() if isinstance(value, torch.Tensor)})

    def step(hook: Callable[[], object], objects: list[Any]) -> object:
        watched.place(*objects)
        with watched:
            return hook()

    decode_half_of_a_batch(capture, probe, traces, step)
    assert watched.num_operators > 50
    # One allocation of pinned memory and one copy a step, whatever is read of it.
    assert sum(line.endswith("to host") for line in device.log) == 3


def test_a_committed_token_crosses_the_bus_in_two_fifths_of_what_others_move() -> None:
    """Features and hidden state of an 8B in 16 bits, and two numbers: 8d + 8 bytes."""
    width = 4096
    found = cost(torch.device("meta"), width, batch=8, captured=4, steps=1)
    assert 3 * width < found["bytes_a_token"] <= 0.4 * (8 * width + 8)


def test_a_swap_at_a_boundary() -> None:
    watched, model = NoWaiting(), FusedDraft(torch.nn.Parameter(torch.ones(4, 2)))
    model.load_weights(VERSIONS[1].items())
    device = SlowDevice(watched)
    draft = SglangDraft(model, 1, VERSIONS.__getitem__, device=device, alone=True)
    thread, outcome = install_in_thread(draft, 2)
    wait_until(lambda: draft.staged_version == 2)
    watched.place(dict(model.named_parameters()), draft.staged)
    with watched:
        assert draft.at_boundary(1) is not None
    device.finish()
    thread.join()
    assert watched.num_operators >= 6
    assert len(outcome) == 1

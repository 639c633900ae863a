"""What only a real GPU shows: work that ends later than it is told, and waiting that CUDA itself refuses."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from serving.sglang.capture.device_reads import DraftLogprobRecorder
from serving.sglang.device import CudaDevice
from serving.sglang.swap import SglangDraft
from speculator.trace import Trace
from tests.fixtures.waiting import wait_until
from tests.serving.sglang.harness import VOCAB, decode_half_of_a_batch, make_capture
from tests.serving.sglang.test_penalties import LAGS, SHAPES, check_against_plain
from tests.serving.sglang.test_swap import FusedDraft, install_in_thread

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LATER_CYCLES = 400_000_000
"""For which a GPU is kept busy, a fifth of a second."""


@pytest.fixture
def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Whoever waits for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _move(thing: Any, gpu: torch.device) -> None:
    """All tensors in these, in place: others hold them, too."""
    if isinstance(thing, Tensor):
        thing.data = thing.data.to(gpu)
    elif isinstance(thing, SimpleNamespace | dict):
        for value in (thing if isinstance(thing, dict) else vars(thing)).values():
            _move(value, gpu)


def test_a_host_index_would_have_waited(gpu: torch.device) -> None:
    found = torch.zeros(3, device=gpu)
    with no_waiting(), pytest.raises(RuntimeError):
        found[[0, 1]]


@LAGS
@SHAPES
def test_penalties_wait_for_nothing(
    gpu: torch.device, num_nodes: int, num_children: int, depth: int, lags: bool
) -> None:
    def on_device(*objects: Any) -> contextlib.AbstractContextManager[None]:
        for one in objects:
            _move(one, gpu)
        return no_waiting()

    check_against_plain(CudaDevice(gpu), on_device, num_nodes, num_children, depth, lags=lags)


def test_capture_of_half_a_batch_waits_for_nothing(gpu: torch.device) -> None:
    traces: list[Trace] = []
    probe = DraftLogprobRecorder(num_slots=4, max_batch=4, max_proposals=3, topk=1, device=gpu)
    capture = make_capture(traces, device=CudaDevice(gpu), probe=probe)

    def step(hook: Callable[[], object], objects: list[Any]) -> object:
        for one in objects:
            _move(one, gpu)
        with no_waiting():
            return hook()

    decode_half_of_a_batch(capture, probe, traces, step)


def test_the_probe_is_repeated_with_a_graph(gpu: torch.device) -> None:
    probe = DraftLogprobRecorder(num_slots=4, max_batch=4, max_proposals=3, topk=1, device=gpu)
    logits = torch.randn(2, VOCAB, device=gpu)
    slots = torch.arange(2, device=gpu)

    def extend() -> None:
        probe.on_forward(SimpleNamespace(next_token_logits=logits))
        probe.on_extend(slots)

    extend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        extend()
    logits.copy_(torch.randn(2, VOCAB))
    graph.replay()
    read = probe.logprobs(slots, 1)
    assert torch.allclose(read[:, 0], torch.log_softmax(logits, -1).max(-1).values, atol=1e-5)


class WideDraft(FusedDraft):
    """So large that an exchange takes the device a while."""

    def __init__(self, gpu: torch.device, value: float) -> None:
        super().__init__(nn.Parameter(torch.ones(4, 2)))
        self.qk = nn.Parameter(torch.full((2 * _ROWS, _WIDTH), value))
        self.norm = nn.Parameter(torch.full((_WIDTH,), value))
        self.to(gpu)

    def load_weights(self, weights: Any) -> None:
        parameters = dict(self.named_parameters())
        with torch.no_grad():
            for name, tensor in weights:
                if name in parameters:
                    parameters[name].copy_(tensor)


_ROWS, _WIDTH = 2048, 4096


def _version(number: int) -> dict[str, Tensor]:
    return {"qk": torch.full((2 * _ROWS, _WIDTH), float(number)), "norm": torch.full((_WIDTH,), float(number))}


def test_nobody_writes_to_what_the_device_still_reads(gpu: torch.device) -> None:
    """Two swaps in quick succession, while the device is far behind what it was told."""
    model = WideDraft(gpu, 1.0)
    draft = SglangDraft(model, 1, _version, device=CudaDevice(gpu), alone=True)
    forward = torch.cuda.Stream(gpu)
    seen = []
    for number in range(2, 8):
        thread, outcome = install_in_thread(draft, number)
        wait_until(lambda number=number: draft.staged_version == number)
        with draft.stepping, torch.cuda.stream(forward):
            torch.cuda._sleep(LATER_CYCLES)
            with no_boundary_wait():
                assert draft.at_boundary(number) is not None
            # A step of SGLang's reads the new weights behind the exchange.
            seen.append((number, model.qk.amin(), model.qk.amax(), model.norm.sum()))
        thread.join()
        (report,) = outcome
        assert report.version == number
        assert 0 < report.stall_ms < 100
    torch.cuda.synchronize()
    for number, low, high, total in seen:
        assert (float(low), float(high), float(total)) == (number, number, number * _WIDTH)


@contextlib.contextmanager
def no_boundary_wait() -> Iterator[None]:
    # `no_waiting` would wait itself, for the long kernel.
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_an_idle_server_swaps_too(gpu: torch.device) -> None:
    model = WideDraft(gpu, 1.0)
    draft = SglangDraft(model, 1, _version, device=CudaDevice(gpu), alone=True)
    assert draft.install_draft(2).version == 2
    assert float(model.qk.amin()) == float(model.qk.amax()) == 2


def test_another_threads_work_would_end_the_capture_of_a_graph(gpu: torch.device) -> None:
    """Why the follower starts behind SGLang's own captures, which are as strict as this one."""
    model = WideDraft(gpu, 1.0)
    draft = SglangDraft(model, 1, _version, device=CudaDevice(gpu), alone=True)
    begun, staged = threading.Event(), threading.Event()
    failure: list[BaseException] = []

    def stage() -> None:
        begun.wait(10)
        try:
            draft.stage(2)
        except BaseException as error:
            failure.append(error)
        staged.set()

    thread = threading.Thread(target=stage)
    thread.start()
    broken = False
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="global"):
            torch.zeros(8, device=gpu)
            begun.set()
            staged.wait(10)
    except RuntimeError:
        broken = True
    thread.join()
    assert broken or failure
    torch.cuda.synchronize()


def test_each_thread_works_on_the_devices_own_gpu(gpu: torch.device) -> None:
    device = CudaDevice(gpu)
    found: list[Any] = []

    def work() -> None:
        with device.side_stream():
            found.append((torch.cuda.current_device(), torch.cuda.current_stream() == torch.cuda.default_stream()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(gpu.index, False)]

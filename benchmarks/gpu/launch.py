"""Cost of capture in a decode step of a large target: time of the scheduler's thread, and of the GPU if there is one.

A batch like SGLang's stands in for it, with tensors of the target's real widths. Without a GPU launches and bytes are
counted on PyTorch's `meta` device, and the scheduler's thread is timed with tensors so narrow that what they hold takes
no time: `meta` itself is slower than a launch, being Python.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from serving.capture.sampling import DEFAULT_BRANCH_SHARE
from serving.sglang.capture.assembler import Gathering
from serving.sglang.capture.capture import StepCapture
from serving.sglang.capture.device_reads import DraftLogprobRecorder
from serving.sglang.capture.verification_rows import TopTokens
from serving.sglang.device import CpuDevice, Device, device_layer
from serving.sglang.penalties import TreePenalties
from serving.sglang.proposals.remembered_text import RememberedText, ring_size
from serving.sglang.proposals.splice import CommittedTokens, TextSplice
from speculator.proposals.length_planner import LengthPlanner
from tests.serving.sglang.harness import Request, make_capture, prefill, settle, verify

DEPTH, TOPK, VOCAB = 4, 64, 151_936
_NARROW = (1, 4, 1)
"""Width, vocabulary, kept tokens; the vocabulary has more blocks of `_NARROW_BLOCK` than these."""
_NARROW_BLOCK = 2


class Elsewhere(CpuDevice):
    """Stands in for a GPU: its tensors are not on the host."""

    is_host = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Cached, as in the device layer for GPUs.
        self._indices: dict[tuple[int, ...], Tensor] = {}

    def index(self, numbers: tuple[int, ...]) -> Tensor:
        if numbers not in self._indices:
            self._indices[numbers] = self.upload(numbers)
        return self._indices[numbers]

    def upload(self, numbers: Sequence[int]) -> Tensor:
        return super().upload(numbers).to(self._device)

    def upload_table(self, numbers: np.ndarray) -> Tensor:
        return super().upload_table(numbers).to(self._device)


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts kernel launches on the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.count += 1
        return func(*args, **(kwargs or {}))


class _Drain:
    """Replaces the assembler and drops everything that it gets."""

    has_room, is_behind, held_share, target_version = True, False, 0.0, 0

    def hand_over(self, step: Any) -> None:
        self.num_bytes = step.copy.num_bytes

    def end(self, ticket: Any, tokens: list[int]) -> None:
        pass


def decode_step(
    device: torch.device, sizes: tuple[int, int, int], batch: int, captured: int, branch_share: float
) -> tuple[StepCapture, Callable[[], None]]:
    """A capture, and one verification of a batch as SGLang hands it over; of each request one proposal is accepted."""
    width, vocab, topk = sizes
    layer = device_layer(device) if device.type == "cuda" else Elsewhere(device)
    num_nodes = DEPTH + 1
    probe = DraftLogprobRecorder(num_slots=batch, max_batch=batch, max_proposals=DEPTH, topk=1, device=device)
    capture = make_capture([], device=layer, probe=probe, capture_topk=topk, branch_share=branch_share)
    if sizes == _NARROW:
        capture.top_tokens = TopTokens(topk, layer, block=_NARROW_BLOCK)
    capture.assembler.close(5)
    capture.assembler = _Drain()  # type: ignore[assignment]
    requests = [
        Request([1] * 8, str(number), custom_params={"slipstream": {"capture": number < captured}})
        for number in range(batch)
    ]
    hidden = torch.empty(8 * batch, 3 * width, dtype=torch.bfloat16, device=device)
    logits = torch.empty(batch, vocab, dtype=torch.float32, device=device)
    first = SimpleNamespace(reqs=requests, prefix_lens=[0] * batch, extend_lens=[8] * batch)
    capture.read_prefill(first, hidden, logits)
    links = torch.zeros(batch, num_nodes, dtype=torch.int64, device=device)
    spec_info = SimpleNamespace(
        draft_token=torch.zeros(batch * num_nodes, dtype=torch.int64, device=device),
        draft_token_num=num_nodes,
        draft_probs=None,
        topk=1,
        retrieve_next_token=links,
        retrieve_next_sibling=links,
    )
    whole = SimpleNamespace(
        reqs=requests,
        spec_info=spec_info,
        seq_lens=torch.zeros(batch, dtype=torch.int64, device=device),
        req_pool_indices=torch.zeros(batch, dtype=torch.int64, device=device),
    )
    accept_index = torch.zeros(batch, num_nodes, dtype=torch.int32, device=device)
    result = SimpleNamespace(
        accept_lens=torch.ones(batch, dtype=torch.int32, device=device),
        logits_output=SimpleNamespace(
            hidden_states=torch.empty(batch * num_nodes, 3 * width, dtype=torch.bfloat16, device=device),
            next_token_logits=torch.randn(batch * num_nodes, vocab, dtype=torch.float32, device=device),
        ),
    )

    def step() -> None:
        capture.after_verify(whole, capture.before_verify(whole), result, accept_index, 1)
        capture.verified([1] * batch)

    return capture, step


def cost(device: torch.device, width: int, batch: int, captured: int, steps: int) -> dict[str, Any]:
    """Median milliseconds of the thread and of the GPU a step, launches, and bytes that cross the bus.

    Launches and bytes are those of committed rows alone. On the `meta` device the thread is timed with narrow tensors
    on the CPU.
    """
    is_gpu = device.type == "cuda"
    capture, step = decode_step(device, (width, VOCAB, TOPK), batch, captured, branch_share=0.0)
    step()
    launches = Launches()
    with launches:
        step()
    found = {
        "width": width,
        "batch": batch,
        "captured": captured,
        "launches": launches.count,
        "bytes_a_token": getattr(capture.assembler, "num_bytes", 0) // max(2 * captured, 1),
    }
    timed, sizes = (device, (width, VOCAB, TOPK)) if is_gpu else (torch.device("cpu"), _NARROW)
    _, step = decode_step(timed, sizes, batch, captured, branch_share=DEFAULT_BRANCH_SHARE)
    found["host_ms"], device_ms = _times_ms(device_layer(timed), step, steps)
    return found | ({"device_ms": device_ms} if is_gpu else {})


def assembling_us(batch: int, steps: int) -> float:
    """Microseconds of Python a request and step on the assembler's thread, which holds the scheduler's GIL.

    The whole batch is captured, for `steps` verifications at once, with tiny tensors.
    """
    device = torch.device("cpu")
    probe = DraftLogprobRecorder(num_slots=batch, max_batch=batch, max_proposals=DEPTH, topk=1, device=device)
    waiting = Gathering(seconds=3600, num_bytes=1 << 40, behind_bytes=1 << 40)
    capture = make_capture([], device=Elsewhere(device), probe=probe, gathering=waiting)
    requests = [Request([1] * 8, str(number)) for number in range(batch)]
    prefill(capture, requests)
    for step in range(steps):
        verify(capture, requests, [8 + 2 * step] * batch, [[1] * DEPTH] * batch, [1] * batch)
    begun_s = time.process_time()
    settle(capture)
    return 1e6 * (time.process_time() - begun_s) / (batch * steps)


_CONTEXT = 4000
_SUFFIX_DEPTH, _HEAD_LENGTHS, _LENGTHS = 16, [0, 1, 2, 4], [0, 1, 2, 4, 8, 16]


def remembering_ms(device: torch.device, batch: int, steps: int) -> float:
    """Median milliseconds a step that suffix drafting takes of the scheduler's thread, with overlap scheduling.

    Requests of `_CONTEXT` tokens write what their prompts have. Another thread looks meanwhile; it has ended when the
    next step begins, as beside a device that computes.
    """
    dice = random.Random(0)
    phrases = [[dice.randrange(30_000) for _ in range(50)] for _ in range(1000)]
    prompts = [[token for _ in range(_CONTEXT // 50) for token in dice.choice(phrases)] for _ in range(batch)]
    requests = [Request(prompt, str(number), max_new_tokens=1000) for number, prompt in enumerate(prompts)]
    device = torch.device("cpu") if device.type == "meta" else device
    layer = device_layer(device) if device.type == "cuda" else Elsewhere(device)
    text = RememberedText(depth=_SUFFIX_DEPTH, overlaps=True, captures_unmarked=True)
    committed = CommittedTokens(batch, ring_size(text.width), device)
    splice = TextSplice(layer, width=text.width, committed=committed)
    planner, slots = LengthPlanner(max_depth=_HEAD_LENGTHS[-1]), torch.arange(batch, device=device)
    for length in _LENGTHS:
        for uses_head in (True, False):
            for _ in range(20):
                planner.observe(batch, length, 1 + 0.05 * length, uses_head=uses_head and length in _HEAD_LENGTHS)
    nodes = torch.zeros(batch, 1 + _SUFFIX_DEPTH, dtype=torch.int64, device=device)
    times_ms = []
    for step in range(5 + steps):
        for request, prompt in zip(requests, prompts, strict=True):
            request.output_ids += prompt[2 * step : 2 * step + 2]
        seq_lens = torch.full((batch,), _CONTEXT + 2 * step, device=device)
        begun_s = time.perf_counter()
        text.processed(requests)
        taken_s = time.perf_counter() - begun_s
        while (found := text.find(requests)) is None or found.first[0] < len(prompts[0]) + len(requests[0].output_ids):
            time.sleep(0.001)
        begun_s = time.perf_counter()
        continuations = text.find(requests)
        gains = None if continuations is None else continuations.gains(_LENGTHS)
        plan = planner.plan(batch, _LENGTHS, head_lengths=_HEAD_LENGTHS, text_gains_BL=gains)
        splice.stage(plan, continuations)
        asked = SimpleNamespace(draft_token=nodes.flatten(), draft_token_num=nodes.shape[1], draft_probs=None)
        if plan.num_proposals == _SUFFIX_DEPTH:
            splice.splice(asked, SimpleNamespace(seq_lens=seq_lens, req_pool_indices=slots))
        splice.committed(slots, seq_lens, nodes, ahead=1)
        if continuations is not None:
            continuations.agree(requests, plan.from_text)
        times_ms.append(1000 * (taken_s + time.perf_counter() - begun_s))
    text.close()
    return round(statistics.median(times_ms[5:]), 4)


def penalties_cost(device: torch.device, batch: int, steps: int) -> dict[str, Any]:
    """Launches, and median milliseconds of the thread and of the GPU, that penalties of all requests add to a step."""
    is_gpu = device.type == "cuda"

    def new_step(device: torch.device, vocab: int) -> Callable[[], object]:
        layer = device_layer(device) if device.type == "cuda" else Elsewhere(device)
        penalties = TreePenalties(layer, lags=True)
        requests = [Request([1] * 8, str(number), repetition_penalty=1.05) for number in range(batch)]
        for request in requests:
            penalties.prefilled(request)
        nodes = torch.zeros(batch, DEPTH + 1, dtype=torch.int64, device=device)
        tree = SimpleNamespace(
            draft_token=nodes.flatten(),
            draft_token_num=DEPTH + 1,
            positions=nodes.flatten(),
            retrieve_next_token=nodes - 1,
            retrieve_next_sibling=nodes - 1,
            topk=1,
            spec_steps=DEPTH,
        )
        output = SimpleNamespace(next_token_logits=torch.randn(nodes.numel(), vocab, device=device))
        result = (None, None, torch.zeros(batch, DEPTH + 1, dtype=torch.int32, device=device))

        def step() -> None:
            info = SimpleNamespace(acc_additive_penalties=output, acc_scaling_penalties=None)
            idle = SimpleNamespace(is_idle=lambda: False)
            asked = SimpleNamespace(reqs=requests, sampling_info=info, forward_mode=idle)
            penalties.around_sampling(lambda *_: result, tree, asked, output)

        return step

    step, launches = new_step(device, VOCAB), Launches()
    step()
    with launches:
        step()
    timed = device if is_gpu else torch.device("cpu")
    host_ms, device_ms = _times_ms(device_layer(timed), step if is_gpu else new_step(timed, _NARROW[1]), steps)
    found = {"batch": batch, "launches": launches.count, "host_ms": host_ms}
    return found | ({"device_ms": device_ms} if is_gpu else {})


def _times_ms(layer: Device, step: Callable[[], object], steps: int) -> tuple[float, float]:
    """Median milliseconds of the thread and of the device a step."""
    host_ms, device_ms = [], []
    for _ in range(5 + steps):
        begin, begun_s = layer.record_event(), time.perf_counter()
        step()
        host_ms.append(1000 * (time.perf_counter() - begun_s))
        end = layer.record_event()
        end.wait()
        device_ms.append(1000 * end.seconds_since(begin))
    return round(statistics.median(host_ms[5:]), 4), round(statistics.median(device_ms[5:]), 4)


def top_tokens_ms(device: torch.device, rows: int, steps: int) -> dict[str, Any]:
    """Milliseconds that a GPU takes to find the likeliest tokens of float32 logits."""
    layer, logits = device_layer(device), torch.randn(rows, VOCAB, device=device)
    top_tokens = TopTokens(TOPK, layer)
    _, device_ms = _times_ms(layer, lambda: top_tokens(logits), steps)
    return {"rows": rows, "vocab": VOCAB, "device_ms": device_ms}


def measure(*, quick: bool) -> dict[str, Any]:
    """Costs for both target widths, with none, half and all of a batch captured."""
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("meta")
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if is_gpu else "meta",
        "steps": [
            cost(device, width, batch, captured, 20 if quick else 60)
            for width in (4096, 8192)
            for batch in ((1, 64) if quick else (1, 64, 256))
            for captured in sorted({0, (batch + 1) // 2, batch})
        ],
    }
    found["remembering_ms"] = {str(batch): remembering_ms(device, batch, 30 if quick else 100) for batch in (1, 64)}
    found["penalties"] = [penalties_cost(device, batch, 20 if quick else 60) for batch in (1, 64)]
    found["assembling_us"] = round(statistics.median(assembling_us(64, 50) for _ in range(5)), 2)
    if is_gpu:
        found["top_tokens"] = [top_tokens_ms(device, rows, 30) for rows in (5, 160, 320, 1280)]
    return found

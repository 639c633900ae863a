"""Capture and assembler as in an SGLang server, with stand-ins for SGLang's own objects."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from serving.capture.sampling import CaptureSampler
from serving.sglang.capture.assembler import Gathering, TraceAssembler
from serving.sglang.capture.capture import ByteBudget, StepCapture
from serving.sglang.capture.device_reads import DraftLogprobRecorder, TextRows
from serving.sglang.capture.request import Origin
from serving.sglang.device import CpuDevice, Device
from serving.sglang.settings import PluginSettings
from speculator.trace import Trace

WIDTH, VOCAB, KEPT = 6, 32, 4


class Finish:
    def __init__(self, kind: str) -> None:
        self._kind = kind

    def to_json(self) -> dict[str, str]:
        return {"type": self._kind}


class Request:
    """The part of SGLang's `Req` that capture reads."""

    def __init__(self, prompt: list[int], rid: str = "r", **changes: Any) -> None:
        self.rid, self.origin_input_ids, self.output_ids = rid, prompt, list[int]()
        self.finished_reason: Finish | None = None
        self.is_retracted, self.spec_num_cap_tokens = False, 0
        self.time_stats = SimpleNamespace(scheduler_recv_time=time.perf_counter())
        self.extra_key: str | None = None
        self.lora_id = self.multimodal_inputs = self.input_embeds = self.grammar = self.custom_logit_processor = None
        params = {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 1,
            "min_p": 0.0,
            "min_new_tokens": 0,
            "logit_bias": None,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "custom_params": None,
        }
        self.sampling_params = SimpleNamespace(**params | changes)

    @property
    def output_ids_through_stop(self) -> list[int]:
        return self.output_ids

    def finished(self) -> bool:
        return self.finished_reason is not None


def make_capture(
    traces: list[Trace],
    *,
    budget: ByteBudget | None = None,
    probe: DraftLogprobRecorder | None = None,
    sampler: CaptureSampler | None = None,
    gathering: Gathering = Gathering(),  # noqa: B008 - frozen
    device: Device | None = None,
    **settings: Any,
) -> StepCapture:
    """With an assembler of its own, which hands its traces to `traces`."""
    device = device or CpuDevice()
    plugin_settings = PluginSettings(**{"capture": True, "capture_topk": KEPT, **settings})
    assembler = TraceAssembler(
        plugin_settings,
        origin=Origin("e", "f" * 64, "target_only"),
        device=device,
        on_trace=traces.append,
        gathering=gathering,
    )
    return StepCapture(
        plugin_settings,
        assembler,
        device=device,
        probe=probe
        or DraftLogprobRecorder(num_slots=4, max_batch=4, max_proposals=3, topk=1, device=torch.device("cpu")),
        budget=budget or ByteBudget(0),
        sampler=sampler,
    )


Step = Callable[[Callable[[], object], list[Any]], object]
"""Runs a hook that SGLang calls with these objects."""


def called(hook: Callable[[], object], _: list[Any]) -> object:
    return hook()


def prefill(
    capture: StepCapture, requests: list[Request], starts: list[int] | None = None, *, step: Step = called
) -> None:
    starts = starts or [0] * len(requests)
    lengths = [len(request.origin_input_ids) - start for request, start in zip(requests, starts, strict=True)]
    batch = SimpleNamespace(reqs=requests, prefix_lens=starts, extend_lens=lengths)
    hidden, logits = torch.randn(sum(lengths), WIDTH).bfloat16(), torch.randn(len(requests), VOCAB)
    step(lambda: capture.read_prefill(batch, hidden, logits), [hidden, logits])


def verify(
    capture: StepCapture,
    requests: list[Request],
    positions: list[int],
    proposals: list[list[int]],
    accepted: list[int],
    version: int = 7,
    *,
    drawn_from: torch.Tensor | None = None,
    text: TextRows | None = None,
    step: Step = called,
) -> None:
    """One chain verification of the same width for all; the requests' outputs grow as SGLang's would."""
    num_nodes = 1 + len(proposals[0])
    nodes = torch.tensor([[0, *chain] for chain in proposals])
    links = torch.tensor([[*range(1, num_nodes), -1]] * len(requests))
    index = torch.full((len(requests), num_nodes), -1)
    for row, count in enumerate(accepted):
        index[row, : count + 1] = torch.arange(row * num_nodes, row * num_nodes + count + 1)
    spec_info = SimpleNamespace(
        draft_token=nodes.flatten(),
        draft_token_num=num_nodes,
        draft_probs=drawn_from,
        topk=1,
        retrieve_next_token=links,
        retrieve_next_sibling=torch.full_like(links, -1),
    )
    batch = SimpleNamespace(
        reqs=requests,
        spec_info=spec_info,
        seq_lens=torch.tensor(positions),
        req_pool_indices=torch.arange(len(requests)),
    )
    result = SimpleNamespace(
        accept_lens=torch.tensor(accepted) + 1,
        logits_output=SimpleNamespace(
            hidden_states=torch.randn(len(requests) * num_nodes, WIDTH).bfloat16(),
            next_token_logits=torch.randn(len(requests) * num_nodes, VOCAB),
        ),
    )
    before = capture.before_verify(batch)
    step(lambda: capture.after_verify(batch, before, result, index, version, text), [batch, result, index])
    step(lambda: capture.verified(accepted), [])
    for request, chain, count in zip(requests, proposals, accepted, strict=True):
        request.output_ids += [*chain[:count], 30]


def end(capture: StepCapture, request: Request, kind: str = "length") -> None:
    request.finished_reason = Finish(kind)
    capture.on_release(request)


def settle(capture: StepCapture) -> None:
    capture.assembler.close(5)


def decode_half_of_a_batch(capture: StepCapture, probe: DraftLogprobRecorder, traces: list[Trace], step: Step) -> None:
    """Two of four requests opt out; a prefill, and two rounds with the draft's passes. The others have their traces."""
    opted_out = {"slipstream": {"capture": False}}
    requests = [Request([1, 2, 3], "a", custom_params=opted_out), Request([4, 5], "b")]
    requests += [Request([6, 7, 8, 9], "c"), Request([1, 1], "d", custom_params=opted_out)]

    def saw(rows: int) -> None:
        output = SimpleNamespace(next_token_logits=torch.randn(rows, VOCAB))
        step(lambda: probe.on_forward(output), [output])

    prefill(capture, requests, step=step)
    slots = torch.arange(4)
    for request in requests:
        request.output_ids += [5]
    for lengths in ([3, 2, 4, 2], [5, 4, 6, 4]):
        saw(4)
        step(lambda: probe.on_extend(slots), [slots])
        probe.around_draft(lambda: saw(4))
        verify(capture, requests, lengths, [[7, 8]] * 4, [1, 1, 1, 1], step=step)
    for request in requests:
        end(capture, request)
    settle(capture)
    assert {trace.header.request_id for trace in traces} == {"b", "c"}
    assert not capture.assembler.dropped

"""Share of a large target's finished requests that become traces in Redis, with default settings.

A batch of long requests is read and decoded as SGLang would have it, with features of an 8B's width and a small
vocabulary. Somebody reads the stream. What is captured goes its whole way: copied, quantised as on a GPU, assembled,
encoded, written to a real Redis.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.gpu.launch import DEPTH, Elsewhere
from serving.sglang.capture.device_reads import DraftLogprobRecorder
from serving.sglang.capture.pipeline import TracePipeline
from serving.sglang.capture.request import Origin
from serving.sglang.settings import PluginSettings
from speculator.redis.client import connect
from speculator.redis.embedded import EmbeddedRedis
from speculator.redis.trace_stream import TraceStream, cap_for
from tests.serving.sglang.harness import Finish, Request

_HIDDEN, _VOCAB = 4096, 1024
_STEP_S = 0.03
"""Time of a decode step of 64 such requests on a GPU, rather underestimated."""
_WRITTEN_WITHIN_S = 60.0


def measure(*, num_requests: int = 64, prompt: int = 2000, answer: int = 500) -> dict[str, Any]:
    """Requests that finished, traces that arrived, and why the others did not."""
    device, width, num_nodes = Elsewhere(torch.device("cpu")), 3 * _HIDDEN, DEPTH + 1
    with tempfile.TemporaryDirectory() as name, EmbeddedRedis(Path(name) / "redis") as redis:
        model_dir = Path(name) / "target"
        model_dir.mkdir()
        sizes = {"hidden_size": _HIDDEN, "intermediate_size": 14_336, "num_hidden_layers": 32, "vocab_size": _VOCAB}
        sizes |= {"num_attention_heads": 32, "max_position_embeddings": 8192}
        (model_dir / "config.json").write_text(json.dumps(sizes))
        pipeline = TracePipeline(
            PluginSettings(redis_url=redis.url, capture=True),
            origin=Origin("yield", "f" * 64, "target_only"),
            model_key="yield",
            model_dir=model_dir,
            device=device,
            probe=DraftLogprobRecorder(
                num_slots=num_requests, max_batch=num_requests, max_proposals=DEPTH, topk=1, device=torch.device("cpu")
            ),
        )
        read, done = _reader(TraceStream(connect(redis.url), "yield", max_bytes=cap_for(model_dir)))
        requests = [Request([1] * prompt, str(number)) for number in range(num_requests)]
        hidden = torch.randn(prompt, width).bfloat16()
        for request in requests:
            one = SimpleNamespace(reqs=[request], prefix_lens=[0], extend_lens=[prompt])
            pipeline.capture.read_prefill(one, hidden, torch.randn(1, _VOCAB))
            request.output_ids = [1]
        links = torch.tensor([[*range(1, num_nodes), -1]]).expand(num_requests, -1).contiguous()
        result = SimpleNamespace(
            logits_output=SimpleNamespace(
                hidden_states=torch.randn(num_requests * num_nodes, width).bfloat16(),
                next_token_logits=torch.randn(num_requests * num_nodes, _VOCAB),
            )
        )
        # One of four proposals is accepted: two tokens a step.
        for step in range(answer // 2):
            begun_s = time.perf_counter()
            batch = SimpleNamespace(
                reqs=requests,
                spec_info=SimpleNamespace(
                    draft_token=torch.ones(num_requests * num_nodes, dtype=torch.int64),
                    draft_token_num=num_nodes,
                    draft_probs=None,
                    topk=1,
                    retrieve_next_token=links,
                    retrieve_next_sibling=torch.full_like(links, -1),
                ),
                seq_lens=torch.full((num_requests,), prompt + 2 * step),
                req_pool_indices=torch.arange(num_requests),
            )
            before = pipeline.capture.before_verify(batch)
            pipeline.capture.after_verify(batch, before, result, torch.empty(0), 1)
            pipeline.capture.verified([1] * num_requests)
            for request in requests:
                request.output_ids += [1, 1]
            time.sleep(max(_STEP_S - (time.perf_counter() - begun_s), 0.0))
        for request in requests:
            request.finished_reason = Finish("length")
            pipeline.capture.on_release(request)
        status = _settled(pipeline, num_requests)
        done.set()
        read.join()
        pipeline.close()
    return {
        "finished": num_requests,
        "appended": status["appended"],
        "dropped_by_reason": status["dropped_by_reason"],
        "bytes": status["trace_bytes"],
    }


def _settled(pipeline: TracePipeline, num_requests: int) -> dict[str, Any]:
    """The pipeline's report, once every request is accounted for."""
    deadline_s = time.monotonic() + _WRITTEN_WITHIN_S
    while True:
        status: dict[str, Any] = pipeline.status()
        if status["appended"] + status["dropped"] >= num_requests or time.monotonic() > deadline_s:
            return status
        time.sleep(0.1)


def _reader(stream: TraceStream) -> tuple[threading.Thread, threading.Event]:
    """A thread that reads the stream, in place of a trainer that keeps up."""
    done = threading.Event()

    def run() -> None:
        while not done.is_set():
            stream.ack([entry.id for entry in stream.read(16, 100)])

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, done

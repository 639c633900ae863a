"""The way of traces out of SGLang."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from serving.sglang.capture.device_reads import DraftLogprobRecorder
from serving.sglang.capture.pipeline import TracePipeline
from serving.sglang.capture.request import Origin
from serving.sglang.device import CpuDevice
from serving.sglang.settings import PluginSettings
from tests.serving.sglang.harness import KEPT, Request, end, prefill


def test_the_report_counts_what_was_refused_and_what_was_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    pipeline = TracePipeline(
        PluginSettings(
            redis_url="redis://127.0.0.1:1/0",
            capture=True,
            capture_topk=KEPT,
            capture_unmarked=False,
            stream_max_bytes=1,
        ),
        origin=Origin("e", "f" * 64, "target_only"),
        model_key="m",
        model_dir=Path(),
        device=CpuDevice(),
        probe=DraftLogprobRecorder(num_slots=4, max_batch=4, max_proposals=3, topk=1, device=torch.device("cpu")),
    )
    marked, unmarked = Request([1, 2], custom_params={"slipstream": {"tenant": "t"}}), Request([3, 4])
    prefill(pipeline.capture, [marked, unmarked])
    for request in (marked, unmarked):
        end(pipeline.capture, request, "abort")
    pipeline.close()
    status = pipeline.status()
    assert (status["dropped"], status["dropped_by_reason"]) == (2, "aborted=1,unmarked=1")

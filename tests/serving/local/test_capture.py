"""What capture computes behind the engine: in order, bounded, and never by the weights of another target."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from serving.local.capture import MOST_WAITING, LocalCapture
from serving.local.config import LocalEngineConfig
from serving.local.request import TopK
from serving.local.target.model import Ranking
from serving.metrics import EngineMetrics
from tests.fixtures.waiting import wait_until

VOCAB, KEPT = 11, 4


class Head:
    """A target as far as capture needs it."""

    def __init__(self) -> None:
        self.weight, self.reading = torch.randn(VOCAB, 3), threading.Event()
        self.may_read = threading.Event()
        self.may_read.set()
        self.ranking = Ranking(None)

    def logits(self, hidden: Tensor) -> Tensor:
        self.reading.set()
        assert self.may_read.wait(10)
        return hidden @ self.weight.T


class Scene:
    def __init__(self) -> None:
        self.head, self.registry, self.traces = Head(), CollectorRegistry(), list[Any]()
        target: Any = self.head
        config = LocalEngineConfig(model_dir=Path(), model_name="toy")
        metrics = EngineMetrics(self.registry)
        self.capture = LocalCapture(config, target, self.traces.append, target_fingerprint="", metrics=metrics)

    def label(self) -> tuple[TopK, Tensor]:
        unknown, hidden = TopK.unknown(7, 2, KEPT), torch.randn(2, 3)
        self.capture.label(unknown, hidden)
        return unknown, hidden

    def count(self, name: str) -> float | None:
        return self.registry.get_sample_value(f"slipstream_capture_{name}_total")


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    scene.capture.start()
    yield scene
    scene.head.may_read.set()
    scene.capture.close()


def test_a_trace_has_what_was_asked_for_before_it(scene: Scene) -> None:
    scene.head.may_read.clear()
    unknown, hidden = scene.label()
    lent = unknown.before(8)
    built: Any = lambda: unknown.ids.copy()  # noqa: E731
    scene.capture.finish(built)
    hidden_then = hidden.clone()
    hidden.zero_()  # The engine goes on with its buffers.
    scene.head.may_read.set()
    scene.capture.drain()
    expected = (hidden_then @ scene.head.weight.T).log_softmax(-1).topk(KEPT, -1)
    assert np.array_equal(scene.traces[0], expected.indices.numpy())
    assert np.allclose(unknown.logprobs, expected.values.numpy(), atol=1e-2)
    assert np.array_equal(lent.ids, unknown.ids[:1]), "a sibling has them, too"


def test_beyond_a_number_that_waits_prompts_go_without_and_traces_do_not(scene: Scene) -> None:
    scene.head.may_read.clear()
    scene.label()
    assert scene.head.reading.wait(10)
    for _ in range(MOST_WAITING):
        scene.label()
    late, _ = scene.label()
    nothing: Any = lambda: "trace"  # noqa: E731
    scene.capture.finish(nothing)
    scene.head.may_read.set()
    scene.capture.drain()
    assert (late.ids == -1).all()
    assert scene.count("unlabelled_positions") == 2
    assert scene.traces == ["trace"]


@pytest.mark.parametrize("is_reading", [True, False])
def test_what_another_target_would_say_is_left_out(scene: Scene, is_reading: bool) -> None:
    scene.head.may_read.clear()
    first, _ = scene.label()
    assert scene.head.reading.wait(10)
    second, _ = scene.label()
    scene.capture.cancel_labels()
    scene.head.may_read.set()
    scene.capture.drain()
    assert ((first if is_reading else second).ids == -1).all()
    assert scene.count("unlabelled_positions") == 4
    third, _ = scene.label()
    scene.capture.drain()
    assert (third.ids >= 0).all()


def test_who_closes_it_waits_for_the_traces_and_not_for_distributions(scene: Scene) -> None:
    whole: Any = lambda: "trace"  # noqa: E731
    scene.head.may_read.clear()
    scene.label()
    assert scene.head.reading.wait(10)
    scene.head.reading.clear()
    for _ in range(3):
        waiting, _ = scene.label()
        scene.capture.finish(whole)
    closing = threading.Thread(target=scene.capture.close)
    closing.start()
    wait_until(lambda: scene.capture.num_waiting == 7)
    scene.head.may_read.set()
    closing.join(10)
    assert scene.traces == 3 * ["trace"]
    assert not scene.head.reading.is_set(), "but for the piece that was being computed"
    assert (waiting.ids == -1).all()
    assert scene.count("unlabelled_positions") == 8


def test_what_fails_is_counted_and_ends_nothing(scene: Scene) -> None:
    broken: Any = lambda: 1 / 0  # noqa: E731
    whole: Any = lambda: "trace"  # noqa: E731
    scene.capture.finish(broken)
    scene.capture.finish(whole)
    scene.capture.close()
    assert scene.count("failures") == 1
    assert scene.traces == ["trace"]
    scene.capture.drain()

"""A toy target for the whole session, and one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
import torch
from prometheus_client import CollectorRegistry

from speculator.redis.trace_stream import TraceStream
from speculator.trace import Trace
from tests.fixtures.toy import make_toy_model
from tests.trainer.answers import answer_traces
from tests.trainer.examples import config_for, promote
from tests.trainer.trainers import MakeTrainer
from trainer.config import TrainerConfig
from trainer.loop import Trainer


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_model(tmp_path_factory.mktemp("toy-target"))


@pytest.fixture(scope="session")
def traces(model_dir: Path) -> list[Trace]:
    """Greedy answers of the toy target, with its real features and distributions."""
    return answer_traces(model_dir, num_traces=8)


@pytest.fixture
def stream(redis_client: redis.Redis) -> TraceStream:
    return TraceStream(redis_client, "toy", max_bytes=10**8)


@pytest.fixture
def settings(model_dir: Path, tmp_path: Path, redis_url: str) -> Callable[..., TrainerConfig]:
    return lambda **changes: config_for(model_dir, tmp_path, redis_url=redis_url, **changes)


@pytest.fixture
def start(settings: Callable[..., TrainerConfig], stream: TraceStream) -> MakeTrainer:
    return lambda **changes: Trainer(settings(**changes), CollectorRegistry())


@pytest.fixture
def open_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.release.gate.decide", promote)

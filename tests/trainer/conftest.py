"""A toy target's answers for the whole session, a random draft, and one thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import torch
from prometheus_client import CollectorRegistry
from transformers import LlamaForCausalLM

from speculator.draft.eagle3 import Eagle3Draft
from speculator.redis.trace_stream import TraceStream
from speculator.trace import Trace
from tests.fixtures.toy import random_draft
from tests.trainer.answers import answer_traces
from tests.trainer.examples import config_for
from tests.trainer.trainers import MakeTrainer
from trainer.config import TrainerConfig
from trainer.loop import Trainer
from trainer.release.gate import Decide, decide


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def traces(model_dir: Path) -> list[Trace]:
    """Greedy answers of the toy target, with its real features and distributions."""
    return answer_traces(model_dir, num_traces=8)


@pytest.fixture(scope="module")
def target(model_dir: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(model_dir).eval()


@pytest.fixture(scope="module")
def draft(model_dir: Path) -> Eagle3Draft:
    return random_draft(model_dir, seed=3, draft_vocab_size=30)


@pytest.fixture
def stream(redis_client: redis.Redis) -> TraceStream:
    return TraceStream(redis_client, "toy", max_bytes=10**8)


@pytest.fixture
def settings(model_dir: Path, tmp_path: Path, redis_url: str) -> Callable[..., TrainerConfig]:
    return lambda **changes: config_for(model_dir, tmp_path, redis_url=redis_url, **changes)


@pytest.fixture
def start(settings: Callable[..., TrainerConfig], stream: TraceStream) -> MakeTrainer:
    """A trainer with these settings; `decide` takes the place of the gate's rule, and `clock` that of the time."""

    def started(*, decide: Decide = decide, clock: Callable[[], float] = time.time, **changes: Any) -> Trainer:
        return Trainer(settings(**changes), CollectorRegistry(), decide=decide, clock=clock)

    return started

"""A toy target for the whole session, and one thread."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from speculator.trace import Trace
from tests.toy import make_toy_model
from tests.trainer.answers import answer_traces


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

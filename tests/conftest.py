"""A real Redis and a toy target for every test that wants one; logs as each test finds them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import structlog

from slipstream.logs import HANDLER
from speculator.redis.client import connect
from speculator.redis.embedded import EmbeddedRedis

_FIRST = (
    "tests/slipstream/test_loop.py",
    "tests/slipstream/",
    "tests/examples/",
    "tests/trainer/",
    "tests/deploy/",
    "tests/sglang/test_capture.py",
    "tests/sglang/test_remembered_text.py",
    "tests/sglang/test_gpu_command.py",
    "tests/sglang/test_server.py",
)
"""Where tests take minutes. Files are run whole: one of these last would leave all processes but one without work."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; the order within a file stays."""

    def rank(item: pytest.Item) -> int:
        return next((rank for rank, start in enumerate(_FIRST) if item.nodeid.startswith(start)), len(_FIRST))

    items.sort(key=rank)


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One embedded server for the whole session."""
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[redis.Redis]:
    """A client of the session's server, which is empty at the start of the test."""
    client = connect(redis_url)
    client.flushall()
    yield client
    client.close()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy target for the whole session; no test writes into it."""
    from tests.fixtures.toy import make_toy_model  # most tests need neither PyTorch nor a target

    return make_toy_model(tmp_path_factory.mktemp("toy"))


@pytest.fixture(autouse=True)
def _no_logs_of_another_test() -> Iterator[None]:
    """Commands that run in this process configure its logs, for a standard error that ends with their test."""
    yield
    structlog.reset_defaults()
    root = logging.getLogger()
    root.handlers = [handler for handler in root.handlers if handler.get_name() != HANDLER]
    sys.excepthook = sys.__excepthook__

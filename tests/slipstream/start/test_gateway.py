"""The gateway in front of SGLang: what it waits for, and what it tells engines while Redis is away."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import redis
import structlog

from serving.gateway.config import GatewaySettings
from serving.sglang.outside.client import SglangClient
from serving.sglang.outside.launcher import SglangProcess
from slipstream.start.gateway import _rollouts, _tell_ended, _until_ended
from speculator.errors import EngineDeadError, StreamError
from speculator.redis.control_plane import EndedGroups


class _Away:
    def __init__(self) -> None:
        self.num_calls, self._lock = 0, threading.Lock()

    def add(self, tenant: str, group_id: str) -> None:
        with self._lock:
            self.num_calls += 1
        threading.Event().wait(0.05)
        raise StreamError("Redis does not answer")


class _Present:
    def __init__(self) -> None:
        self.added: list[tuple[str, str]] = []

    def add(self, tenant: str, group_id: str) -> None:
        self.added.append((tenant, group_id))


@pytest.mark.parametrize("bad", ["sglang:30000", "http://sglang:3000O", "http://:1", "localhost"])
def test_no_start_waits_for_what_is_no_address(
    refused: Callable[..., str], toy_model: Path, tmp_path: Path, bad: str
) -> None:
    words = ("--model", toy_model, "--store", tmp_path, "--pool", "--sglang", "https://good", "--sglang", bad)
    assert f"--sglang {bad} is not an address" in refused("gateway", *words)


def test_a_tokenizer_with_its_own_code_costs_the_rollouts_alone(toy_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(toy_model, tmp_path / "model")
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}}
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, **own}))
    with structlog.testing.capture_logs() as logs:
        found = _rollouts(
            ("http://127.0.0.1:1",),
            cast(SglangClient, None),
            GatewaySettings(),
            cast(redis.Redis, None),
            folder,
            "f" * 64,
        )
    assert found is None
    assert "custom code" in logs[0]["reason"]


def test_a_groups_end_is_told_once_for_all_servers() -> None:
    """Of so many entries the stream would keep none for long enough."""
    present = _Present()

    async def run() -> None:
        tell = _tell_ended(cast(EndedGroups, present))
        for number in range(32):
            tell("default", f"group-{number // 16}")
        await asyncio.get_running_loop().shutdown_default_executor()

    asyncio.run(run())
    assert sorted(present.added) == [("default", "group-0"), ("default", "group-1")]


def test_a_redis_that_hangs_does_not_take_all_threads_of_the_event_loop() -> None:
    """They also turn prompts into tokens, and the end of the process waits for them."""
    away = _Away()

    async def run() -> None:
        tell = _tell_ended(cast(EndedGroups, away))
        for number in range(500):
            tell("default", f"group-{number}")
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "encoded"), 2) == "encoded"

    asyncio.run(run())
    assert away.num_calls <= 32, "of 500: at most one for each thread"


def test_the_end_of_sglang_is_noticed_without_a_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sandboxes such as gVisor refuse to make one."""

    def pidfd_open(*_: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    class Ended:
        pid, is_alive = os.getpid(), False

        def check(self) -> None:
            raise EngineDeadError("SGLang ended with code 9")

    monkeypatch.setattr(os, "pidfd_open", pidfd_open)
    with pytest.raises(EngineDeadError, match="code 9"):
        asyncio.run(_until_ended(cast(SglangProcess, Ended())))

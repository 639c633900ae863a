"""`slipstream serve` with the local engine: how it ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serving.gateway.config import GatewaySettings
from serving.local.config import LocalEngineConfig
from serving.sglang.outside.launcher import SglangStart
from slipstream.start import local, sglang
from slipstream.start.local import ServeOptions, wait_for_failure
from speculator.errors import EngineDeadError
from tests.fixtures.doubles import DoubleEngine


def test_an_engine_that_fails_ends_the_server() -> None:
    """With exit code 1, so that a supervisor starts it again."""
    engine = DoubleEngine()

    async def run() -> None:
        watching = asyncio.create_task(wait_for_failure(engine, poll_s=0))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not watching.done()
        engine.alive, engine.detail = False, "RuntimeError"
        with pytest.raises(EngineDeadError, match="RuntimeError"):
            await watching

    asyncio.run(run())


@pytest.fixture
def handler() -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, kept in before.items():
        signal.signal(number, kept)


def _serve(folder: Path) -> None:
    engine = LocalEngineConfig(model_dir=folder, model_name="m")
    options = ServeOptions(
        engine=engine,
        store=folder,
        redis_url="redis://127.0.0.1:1",
        host="127.0.0.1",
        port=0,
        stream_max_bytes=0,
        draft_vocab_size=None,
        vocab_texts=[],
        seed=None,
    )
    local.run_server(options, GatewaySettings())


def _become_sglang(folder: Path) -> None:
    start = SglangStart(
        python=None,
        model_dir=folder,
        model_name="m",
        depth=4,
        dtype="auto",
        device="cpu",
        redis_url="redis://127.0.0.1:1",
        store=folder,
        capture=False,
        suffix_depth=16,
        control_share=0,
        plain_share=0,
        context_window=512,
        capture_bytes_per_s=0,
        stream_max_bytes=0,
    )
    sglang.exec_sglang(start, host="127.0.0.1", port=30000, engine_id="e")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("run", [_serve, _become_sglang])
@pytest.mark.usefixtures("handler")
def test_a_start_ends_on_a_signal(
    run: Callable[[Path], None], number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux ignores SIGTERM for a container's first process that handles it not: it would load on, and be killed."""

    def load(*_: object) -> None:
        assert signal.getsignal(number) is not signal.SIG_DFL
        os.kill(os.getpid(), number)

    monkeypatch.setattr(local, "bind", load)
    monkeypatch.setattr(sglang, "checked_interpreter", load)
    with pytest.raises(SystemExit) as ended:
        run(tmp_path)
    assert ended.value.code == 128 + number

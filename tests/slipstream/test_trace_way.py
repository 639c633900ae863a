"""How many files one trace enters, from its verification in the engine to the swap that it led to."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import httpx
import pytest

from slipstream.demo.servers import Scrape
from speculator.redis.embedded import EmbeddedRedis
from tests.fixtures.waiting import url_in, wait_until
from tests.slipstream.conftest import service

MOST_FILES = 64
"""62 or 63 as a rule. On a busy machine something fails and is tried again, which enters another."""
OF_REQUESTS = ("serving/gateway/", "serving/rollout/", "serving/answer_text.py", "slipstream/")
"""Not the way of a trace: how requests come in and answers go out as text, how services are started and ended."""
TRACED = "tests.slipstream.traced"


def test_a_trace_enters_few_files(toy_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine, trainer = tmp_path / "engine.txt", tmp_path / "trainer.txt"
    with EmbeddedRedis(tmp_path / "redis") as redis:
        common = ("--model", toy_model, "--redis-url", redis.url, "--store", tmp_path / "drafts")
        serve_log, train_log = tmp_path / "serve.log", tmp_path / "train.log"
        train = ("train", *common, "--state", tmp_path / "state")
        serve = ("serve", *common, "--port", 0, "--capture", "--draft-vocab-size", 24)
        with service(serve_log, engine, *serve, module=TRACED) as server:
            url = url_in(serve_log)
            with service(train_log, trainer, *train, module=TRACED) as learner:
                wait_until(lambda: '"training"' in train_log.read_text())
                for process in (server, learner):
                    process.send_signal(signal.SIGUSR1)

                def swapped() -> bool:
                    for number in range(4):
                        body = {"model": "toy", "prompt": f"question {number}", "max_tokens": 24}
                        httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()
                    return Scrape.parse(0, httpx.get(f"{url}/metrics").text).total("slipstream_draft_version") >= 2

                wait_until(swapped)
    entered = {*engine.read_text().splitlines(), *trainer.read_text().splitlines()}
    way = sorted(name for name in entered if not name.startswith(OF_REQUESTS))
    with capsys.disabled():
        sys.stdout.write("\n  ".join([f"\n{len(way)} files from a verification to the swap:", *way]) + "\n")
    assert "serving/capture/recorder.py" in way
    assert len(way) <= MOST_FILES

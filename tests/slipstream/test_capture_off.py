"""Nobody's answers become traces until somebody turns that on: a real server, and all that its Redis has."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import redis

from tests.fixtures.waiting import url_in


def test_without_the_option_no_request_leaves_a_trace(
    toy_model: Path, redis_url: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    """Not even one that asks for it."""
    log = tmp_path / "serve.log"
    words = ["serve", "--model", str(toy_model), "--redis-url", redis_url, "--store", str(tmp_path / "drafts")]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "slipstream", *words, "--port", "0"],
            stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        url = url_in(log)
        body: dict[str, Any] = {"model": "toy", "prompt": "0123", "max_tokens": 20}
        for asked in ({}, {"capture": True, "domain": "a"}):
            httpx.post(f"{url}/v1/completions", json={**body, "slipstream": asked}, timeout=60).raise_for_status()
    finally:
        process.send_signal(signal.SIGTERM)
        # What waits for Redis is sent before the process ends.
        assert process.wait(60) == 0, log.read_text()[-2000:]
    kept = {key: redis_client.type(key) for key in redis_client.scan_iter()}
    assert b"hash" in kept.values(), "the engine has not reported: this is not its Redis"
    assert b"stream" not in kept.values(), kept

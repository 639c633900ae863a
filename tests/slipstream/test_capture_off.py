"""Nobody's answers become traces until somebody turns that on: a real server, and all that its Redis has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import redis

from tests.fixtures.waiting import url_in, wait_until
from tests.slipstream.conftest import service


def test_without_the_option_no_request_leaves_a_trace(
    toy_model: Path, redis_url: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    """Not even one that asks for it."""
    log = tmp_path / "serve.log"
    words = ("serve", "--model", toy_model, "--redis-url", redis_url, "--store", tmp_path / "drafts", "--port", 0)

    def kept() -> dict[bytes, bytes]:
        return {key: redis_client.type(key) for key in redis_client.scan_iter()}

    # What waits for Redis is sent before the process ends.
    with service(log, *words):
        url = url_in(log)
        body: dict[str, Any] = {"model": "toy", "prompt": "0123", "max_tokens": 20}
        for asked in ({}, {"capture": True, "domain": "a"}):
            httpx.post(f"{url}/v1/completions", json={**body, "slipstream": asked}, timeout=60).raise_for_status()
        # Its report: this is its Redis.
        wait_until(lambda: b"hash" in kept().values())
    assert b"stream" not in kept().values(), kept()

"""`slipstream serve --engine sglang` on the CPU as a child process, and a collector that its spans go to."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from speculator.host import free_port
from tests.fixtures.telemetry import collecting
from tests.sglang.server import dtype_flags, environment


@dataclass(frozen=True, kw_only=True)
class Served:
    url: str
    """The gateway's."""
    process: subprocess.Popen[bytes]
    log: Path
    store: Path
    exported: list[bytes]
    """What the collector was sent: an ExportTraceServiceRequest each."""

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=5, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", trust_env=False).text

    def port_of_sglang(self) -> int:
        found = re.search(r'"sglang_url": "http://127\.0\.0\.1:(\d+)".*"sglang started"', self.log.read_text())
        assert found, self.log.read_text()[:3000]
        return int(found[1])


@contextlib.contextmanager
def serving(folder: Path, model_dir: Path, redis_url: str) -> Iterator[Served]:
    port, log, store = free_port(), folder / "serve.log", folder / "drafts"
    command = [
        *(sys.executable, "-m", "slipstream", "serve", "--engine", "sglang", "--device", "cpu", "--capture"),
        *("--model", str(model_dir), "--redis-url", redis_url, "--store", str(store)),
        *("--port", str(port), "--depth", "2", "--control-share", "0.2", "--plain-share", "0.2", *dtype_flags()),
        # SGLang sets its gauges every so many decode steps.
        *("--", "--skip-server-warmup", "--decode-log-interval", "5", "--tool-call-parser", "hermes"),
    ]
    with collecting() as (collector, exported), log.open("wb") as output:
        spans = {
            "SLIPSTREAM_OTEL": "1",
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector,
            "OTEL_BSP_SCHEDULE_DELAY": "200",
        }
        # Nearly the whole context, so that it changes nothing but where a long prompt leaves less.
        limit = {"SLIPSTREAM_GATEWAY_MAX_COMPLETION_TOKENS": "8000"}
        variables = {**os.environ, **environment(), **spans, **limit}
        process = subprocess.Popen(command, env=variables, stdout=output, stderr=subprocess.STDOUT)
        served = Served(url=f"http://127.0.0.1:{port}", process=process, log=log, store=store, exported=exported)
        try:
            deadline = time.monotonic() + 240
            while not served.answers():
                assert process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline, log.read_text()[-3000:]
                time.sleep(0.2)
            yield served
        finally:
            process.kill()
            process.wait()

"""The whole loop as processes: gateway, engine, Redis, trainer, on a toy target, to a swap and past a kill."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from slipstream.scrape import Sample
from speculator.embedded_redis import EmbeddedRedis
from speculator.store import DraftStore
from tests.slipstream.conftest import RunCli
from tests.waiting import wait_until

TRAINER_ENV = {
    "SLIPSTREAM_TRAINER_PUBLISH_MIN_TOKENS": "50",
    "SLIPSTREAM_TRAINER_PUBLISH_INTERVAL_S": "0.5",
    "SLIPSTREAM_TRAINER_CHECKPOINT_INTERVAL_S": "0.5",
    "SLIPSTREAM_TRAINER_NICE": "0",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}


@contextlib.contextmanager
def _process(log: Path, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "slipstream", *map(str, arguments)],
            stdout=output,
            stderr=output,
            env={**os.environ, **TRAINER_ENV},
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) == 0, log.read_text()


def _metrics(url: str) -> Sample:
    return Sample.parse(0, httpx.get(f"{url}/metrics").text)


def _url(log: Path) -> str | None:
    found = re.search(r'"url": "([^"]+)"', log.read_text()) if log.exists() else None
    return found[1] if found else None


def test_the_loop_reaches_a_swap_and_goes_on_after_the_trainer_is_killed(toy_model: Path, tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis") as redis:
        common = ("--model", toy_model, "--redis-url", redis.url, "--store", tmp_path / "drafts")
        train = ("train", *common, "--state", tmp_path / "state")
        (tmp_path / "texts.jsonl").write_text('{"domain": "toy", "prompt": "question 0123456789"}\n')
        serve = ("serve", *common, "--port", 0, "--capture", "--draft-vocab-size", 24, "--control-share", 0.2)
        serve = (*serve, "--vocab-from", tmp_path / "texts.jsonl")
        serve_log, train_log = tmp_path / "serve.log", tmp_path / "train.log"
        with _process(serve_log, *serve) as server:
            wait_until(lambda: _url(serve_log), timeout_s=90)
            url = _url(serve_log) or ""
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

            def ask(number: int) -> str:
                answer = client.chat.completions.create(
                    model="toy",
                    messages=[{"role": "user", "content": f"question {number}"}],
                    max_tokens=40,
                    temperature=0,
                )
                return answer.choices[0].message.content or ""

            first = ask(0)
            asked = iter(range(1, 10_000))

            def version_at_least(version: int) -> bool:
                ask(next(asked))
                return _metrics(url).total("slipstream_draft_version") >= version

            with _process(train_log, *train) as trainer:
                wait_until(lambda: version_at_least(2), timeout_s=90)
                trainer.kill()
                trainer.wait()
            killed_at = _metrics(url).total("slipstream_draft_version")
            with _process(train_log, *train):
                wait_until(lambda: version_at_least(int(killed_at) + 1), timeout_s=90)
                captured = _metrics(url).total("slipstream_traces_captured_total")
                wait_until(lambda: _accounted(redis.url, tmp_path / "drafts", toy_model) >= captured, timeout_s=60)
            assert "trainer resumed" in train_log.read_text()
            states = DraftStore(tmp_path / "drafts").lifecycle
            wait_until(lambda: ask(next(asked)) and (states.last_good() or 0) >= killed_at, timeout_s=90)
            assert ask(0) == first, "a swap changed the text"
            assert server.poll() is None
            final = _metrics(url)
            assert final.total("slipstream_swaps_total", outcome="failed") == 0
            assert final.total("slipstream_traces_dropped_total") == 0
            assert final.total("slipstream_speedup_measured_ratio") > 0


def _accounted(redis_url: str, store: Path, model: Path) -> int:
    """Traces that the trainer has settled: learnt from, durably."""
    from slipstream.layout import model_key
    from speculator.checkpoint import target_fingerprint
    from speculator.stream import TraceStream, connect

    client = connect(redis_url)
    try:
        key = model_key(model, target_fingerprint(model))
        lag = TraceStream(client, key, max_bytes=2**30, consumer="test").lag()
    finally:
        client.close()
    assert lag.lost == 0
    assert lag.dead_lettered == 0
    return lag.acked


def test_the_demo_runs_and_writes_its_figures(
    toy_model: Path, tmp_path: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in TRAINER_ENV.items():
        monkeypatch.setenv(name, value)
    document, plot = tmp_path / "out.json", tmp_path / "out.png"
    result = run_cli(
        *("demo", "--model", toy_model, "--minutes", 0.4, "--json", document, "--plot", plot, "--port", 18765),
        *("--max-tokens", 40, "--context-length", 256, "--draft-vocab-size", 24, "--dtype", "float32"),
    )
    assert result.returncode == 0, result.stderr
    figures = json.loads(document.read_text())
    assert {"model", "minutes", "requests", "failed_requests", "completion_tokens", "swaps"} <= figures.keys()
    assert {"accept_length", "speedup", "inter_token_ms", "traces", "draft_version", "host"} <= figures.keys()
    assert figures["failed_requests"] == 0
    assert figures["requests"] > 5
    assert figures["swaps"] >= 1
    assert figures["draft_version"] >= 1 + figures["swaps"]
    traces = figures["traces"]
    settled = traces["dropped"] + traces["trained"] + traces["dead_lettered"] + traces["lost"] + traces["waiting"]
    assert traces["captured"] == settled == figures["requests"]
    assert traces["waiting"] == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "measured speedup" in result.stderr

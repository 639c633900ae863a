"""The whole loop as processes: gateway, engine, Redis, trainer, on a toy target, to a swap and past a kill."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx
import openai
import pytest

from slipstream.demo.servers import Scrape
from speculator.draft.checkpoint import model_key, target_fingerprint
from speculator.redis.client import connect
from speculator.redis.embedded import EmbeddedRedis
from speculator.redis.trace_deletion import ErasureOrders
from speculator.redis.trace_stream import TraceStream
from tests.fixtures.telemetry import LIVE, last_time_up, query, questions, recorded, without_data
from tests.fixtures.toy import moved_model
from tests.fixtures.waiting import url_in, wait_until
from tests.slipstream.conftest import WatchedDemo, service


def _metrics(url: str) -> Scrape:
    return Scrape.parse(0, httpx.get(f"{url}/metrics").text)


ADMIN_KEY = "xyzzy-canary-of-the-admin-key"


def test_the_loop_reaches_a_swap_and_goes_on_after_the_trainer_is_killed(
    toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And in the end the target moves, and the tenant is erased."""
    monkeypatch.setenv("SLIPSTREAM_GATEWAY_ADMIN_KEY", ADMIN_KEY)
    monkeypatch.setenv("SLIPSTREAM_GATEWAY_TARGETS_DIR", str(tmp_path / "targets"))
    with EmbeddedRedis(tmp_path / "redis") as redis:
        common = ("--model", toy_model, "--redis-url", redis.url, "--store", tmp_path / "drafts")
        train = ("train", *common, "--state", tmp_path / "state")
        (tmp_path / "texts.jsonl").write_text('{"domain": "toy", "prompt": "question 0123456789"}\n')
        serve = ("serve", *common, "--port", 0, "--capture", "--draft-vocab-size", 24, "--control-share", 0.2)
        # In bfloat16 PyTorch may round otherwise in passes of another width.
        serve = (*serve, "--vocab-from", tmp_path / "texts.jsonl", "--dtype", "float32")
        serve_log, train_log = tmp_path / "serve.log", tmp_path / "train.log"
        with service(serve_log, *serve) as server:
            url = url_in(serve_log)
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

            with service(train_log, *train) as trainer:
                wait_until(lambda: version_at_least(2))
                trainer.kill()
                trainer.wait()
            killed_at = _metrics(url).total("slipstream_draft_version")
            with service(train_log, *train):
                wait_until(lambda: version_at_least(int(killed_at) + 1))
                captured = _metrics(url).total("slipstream_traces_captured_total")
                wait_until(lambda: _accounted(redis.url, tmp_path / "drafts", toy_model) >= captured)
                # Later the stream fills up, since nobody learns from it.
                assert _metrics(url).total("slipstream_traces_dropped_total") == 0
            assert "trainer resumed" in train_log.read_text()
            assert ask(0) == first, "a swap changed the text"
            assert server.poll() is None
            final = _metrics(url)
            assert final.total("slipstream_swaps_total", outcome="failed") == 0
            assert final.total("slipstream_speedup_measured_ratio") > 0
            moved_model(toy_model, tmp_path / "targets" / "step-5")
            announced = httpx.post(
                f"{url}/v1/target-version",
                headers={"authorization": f"Bearer {ADMIN_KEY}"},
                json={"version": 5, "path": "step-5"},
            )
            assert announced.json()["version"] == 5, announced.text
            assert ask(0) != first
            moved = _metrics(url)
            assert moved.total("slipstream_target_version") == 5
            rollout = {"id": "r", "model": "toy", "groups": [{"prompt": "question", "max_tokens": 4}]}
            said = httpx.post(f"{url}/v1/rollouts", json=rollout).text.splitlines()
            assert json.loads(said[1])["target_version"] == 5
            assert httpx.get(f"{url}/v1/rollouts/r").status_code == 200
            with connect(redis.url) as connection:
                ErasureOrders(connection, model_key(toy_model, target_fingerprint(toy_model))).order("default")
            wait_until(lambda: httpx.get(f"{url}/v1/rollouts/r").status_code == 410)


def _accounted(redis_url: str, store: Path, model: Path) -> int:
    """Traces that the trainer has settled: learnt from, durably."""
    client = connect(redis_url)
    try:
        key = model_key(model, target_fingerprint(model))
        lag = TraceStream(client, key, max_bytes=2**30, consumer="test").lag()
    finally:
        client.close()
    assert lag.lost == 0
    assert lag.dead_lettered == 0
    return lag.acked


def test_the_demo_runs_and_writes_its_figures(watched_demo: WatchedDemo) -> None:
    assert watched_demo.returncode == 0, watched_demo.stderr
    figures = json.loads(watched_demo.document.read_text())
    assert {"model", "minutes", "requests", "failed_requests", "completion_tokens", "swaps"} <= figures.keys()
    assert {"accept_length", "speedup", "inter_token_ms", "traces", "draft_version", "host"} <= figures.keys()
    ab, client = figures["ab"], figures["client_speedup"]
    assert 0 < ab["both_over_suffix_whole_run"]["low"] < ab["both_over_suffix_whole_run"]["high"]
    assert 0 < ab["both_over_plain"]["low"] < ab["both_over_plain"]["median"] < ab["both_over_plain"]["high"]
    assert ab["both_rounds"] > ab["suffix_only_rounds"] > 50
    assert 0 < client["low"] < client["median"] < client["high"]
    assert [chapter["name"] for chapter in figures["chapters"]] == [
        "day_0",
        "learning",
        "shift",
        "poisoned_draft",
        "restart",
    ]
    assert figures["chapters"][0]["swaps"] == 0, "nothing learns on day 0"
    drift = figures["chapters"][2]["drift"]
    assert drift["accept_length_before"] >= 1
    assert drift["accept_length_lowest"] >= 1
    assert figures["chapters"][4]["both_over_suffix_first_minute"].keys() == {"median", "low", "high"}
    assert figures["accepted_by_source"]["head"] > 0
    assert figures["poisoned"]["version"] > 1
    assert client["plain_stretches"] == 6
    assert client["plain_requests"] > 5
    assert client["plain_failed_requests"] == 0
    assert figures["failed_requests"] == 0
    assert figures["requests"] > 5
    assert figures["swaps"] >= 1
    # One that is taken back is a swap, too.
    assert figures["draft_version"] > 1 or figures["swaps"] > 1
    traces = figures["traces"]
    settled = traces["dropped"] + traces["trained"] + traces["dead_lettered"] + traces["lost"] + traces["waiting"]
    assert traces["captured"] == settled == figures["requests"]
    assert traces["waiting"] == 0
    assert watched_demo.plot.read_bytes().startswith(b"\x89PNG")
    told = " ".join(watched_demo.stderr.split())
    assert "drift alarm rose" in told
    assert "A restart." in told
    assert "In the first minute after the restart both were" in told
    assert "a client's clock saw" in told


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no Prometheus: make system-packages installs it")
def test_every_query_of_the_live_dashboard_and_of_the_rules_has_data(watched_demo: WatchedDemo) -> None:
    assert watched_demo.returncode == 0, watched_demo.stderr
    url = watched_demo.prometheus_url
    # The demo's last chapter begins with a restart of the engine, and is too short for every figure.
    ended_s = last_time_up(url, ("gateway", "trainer"), counted="slipstream_rounds_total")
    asked = [*questions(LIVE), *recorded()]
    assert len(asked) > 90
    assert without_data(url, asked, ended_s) == []
    by_source = query(url, "slipstream:acceptance_by_position:ratio_rate5m", ended_s)
    assert {labels["source"] for labels, _ in by_source} == {"head"}  # --suffix-depth 0
    groups = httpx.get(f"{url}/api/v1/rules", trust_env=False).json()["data"]["groups"]
    assert [rule for group in groups for rule in group["rules"] if rule["health"] != "ok"] == []
    quiet = ("SlipstreamEngineDown", "SlipstreamTracesDropped", "SlipstreamTracesRefused", "SlipstreamTargetMismatch")
    assert not any(query(url, f'ALERTS{{alertname="{name}"}}', ended_s) for name in quiet)

"""The CPU variant, every service but Grafana's as a process, from its start to its end.

The tests follow one another on one deployment: up, used, down.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis

from slipstream.demo.servers import Scrape
from speculator.draft.checkpoint import model_key, target_fingerprint
from speculator.redis.client import RedisKeys
from tests.deploy.compose import CPU
from tests.deploy.machine import Machine, has
from tests.fixtures.toy import make_toy_model
from tests.fixtures.waiting import wait_until

needs_prometheus = pytest.mark.skipif(
    not has("prometheus", "promtool"), reason="there is no Prometheus here: install Debian's package prometheus"
)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    root = tmp_path_factory.mktemp("compose")
    machine = Machine(
        CPU, root, {"SLIPSTREAM_MODEL": "/models/toy", "SLIPSTREAM_MODEL_NAME": "toy", "SLIPSTREAM_CAPTURE": "1"}
    )
    make_toy_model(Path(machine.here("/models/toy")))
    yield machine
    machine.close()


def chat(machine: Machine, text: str) -> httpx.Response:
    body = {"model": "toy", "messages": [{"role": "user", "content": text}], "max_tokens": 20}
    key = {"authorization": f"Bearer {machine.secret('gateway_client')}"}
    return httpx.post(f"{machine.url(8000)}/v1/chat/completions", json=body, headers=key, timeout=60)


def test_up_in_healthy_order(machine: Machine) -> None:
    machine.up("redis", "init", "gateway", "trainer")


def test_a_request_is_answered_and_learnt_from(machine: Machine) -> None:
    answer = chat(machine, "what is a draft?")
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["finish_reason"]

    def admitted() -> float:
        metrics = httpx.get(f"{machine.url(9101)}/metrics").text
        return Scrape.parse(0, metrics).total("slipstream_trainer_traces_total", outcome="admitted")

    wait_until(lambda: admitted() >= 1)


def test_secrets_come_from_files(machine: Machine) -> None:
    drafts = f"{machine.url(8000)}/admin/drafts"
    assert httpx.get(drafts).status_code == 401
    key = machine.secret("gateway_admin")
    answer = httpx.get(drafts, headers={"authorization": f"Bearer {key}"})
    assert [draft["version"] for draft in answer.json()["drafts"]] == [1]
    assert httpx.get(f"{machine.url(8000)}/v1/models").status_code == 401
    for name in ("redis", "init", "gateway", "trainer"):
        assert key not in machine.log(name).read_text()
        assert machine.secret("gateway_client") not in machine.log(name).read_text()


@needs_prometheus
def test_prometheus_scrapes_them(machine: Machine) -> None:
    machine.up("prometheus")

    def health() -> dict[str, str]:
        answer = httpx.get(f"{machine.url(9090)}/api/v1/targets", params={"state": "active"}).json()
        return {target["labels"]["job"]: target["health"] for target in answer["data"]["activeTargets"]}

    wait_until(lambda: health() == {"gateway": "up", "trainer": "up", "prometheus": "up"})
    assert machine.stop("prometheus") == 0


def test_down_within_the_grace_periods(machine: Machine) -> None:
    for name in ("trainer", "gateway", "redis"):
        assert machine.stop(name) == 0, machine.log(name).read_text()


def test_up_again_with_what_was_kept(machine: Machine) -> None:
    """The next start finds the traces in Redis and leaves the store as it is."""
    machine.up("redis", "init")
    model = Path(machine.here("/models/toy"))
    traces = RedisKeys(model_key=model_key(model, target_fingerprint(model))).traces
    with redis.Redis(
        port=int(machine.here("6379")), username="engine", password=machine.secret("redis_engine"), protocol=2
    ) as client:
        assert client.xlen(traces) >= 1
    assert machine.stop("redis") == 0

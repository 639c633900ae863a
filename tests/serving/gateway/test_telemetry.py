from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from serving.engine import EngineHealth
from serving.gateway.metrics import GatewayMetrics, HealthCollector
from speculator.errors import EngineBusyError, EngineDeadError
from tests.fixtures.doubles import DoubleEngine, says
from tests.serving.gateway.client import CHAT, HELLO, ask, gateway
from tests.serving.gateway.keyfile import KeyFile

CANARY = "xyzzy-canary"
BODY = {"model": "double", "messages": HELLO, "max_tokens": 8}


def count(registry: CollectorRegistry, route: str, status: int) -> float | None:
    labels = {"model_name": "double", "route": route, "status": str(status)}
    return registry.get_sample_value("slipstream_gateway_requests_total", labels)


def test_requests_are_counted_by_route_template_and_status() -> None:
    registry = CollectorRegistry()
    engine = DoubleEngine()

    async def talk(client: httpx.AsyncClient) -> None:
        await client.post(CHAT, json=BODY)
        await client.post(CHAT, json={**BODY, "n": 2, "stream": True})
        await client.post(CHAT, json={**BODY, "n": 0})
        await client.get("/v1/models/no/such/model")
        await client.get("/one/unknown/path")
        await client.get("/another/unknown/path")
        await client.put(CHAT)
        engine.failure, engine.fail_at = EngineDeadError("gone"), 1
        await client.post(CHAT, json={**BODY, "stream": True})

    ask(gateway(engine, registry), talk)
    assert count(registry, CHAT, 200) == 2
    assert count(registry, CHAT, 400) == 1
    assert count(registry, CHAT, 405) == 1
    # The stream had sent its 200: what counts is how it ended.
    assert count(registry, CHAT, 503) == 1
    assert count(registry, "/v1/models/{model:path}", 404) == 1
    assert count(registry, "unmatched", 404) == 2
    # One first token a request, whatever its samples.
    of_chat = {"model_name": "double", "route": CHAT}
    assert registry.get_sample_value("slipstream_gateway_time_to_first_token_seconds_count", of_chat) == 3
    assert registry.get_sample_value("slipstream_gateway_request_duration_seconds_count", of_chat) == 5
    assert registry.get_sample_value("slipstream_gateway_generations_in_flight", {"model_name": "double"}) == 0


def test_tokens_are_counted_by_tenant_and_the_pace_of_every_sample(tmp_path: Path) -> None:
    registry, keys = CollectorRegistry(), KeyFile(tmp_path / "keys.json")
    one, two, *others = [keys.add(str(number)) for number in range(70)]
    engine = DoubleEngine(answer=says("0123456789"))
    app = gateway(engine, registry, keys_file=keys.path)

    def tokens(kind: str, tenant: str) -> float | None:
        labels = {"model_name": "double", "tenant": tenant}
        return registry.get_sample_value(f"slipstream_gateway_{kind}_tokens_total", labels)

    def paces() -> float | None:
        labels = {"model_name": "double", "route": CHAT}
        return registry.get_sample_value("slipstream_gateway_inter_token_latency_seconds_count", labels)

    async def talk(client: httpx.AsyncClient) -> None:
        await client.post(CHAT, json={**BODY, "n": 2}, headers=one)
        await client.post(CHAT, json={**BODY, "stream": True}, headers=two)
        assert paces() == 3
        await client.post(CHAT, json={**BODY, "max_tokens": 2}, headers=two)
        assert paces() == 3, "an answer in one piece has no pace"
        for headers in (*others, one):
            await client.post(CHAT, json={**BODY, "max_tokens": 1}, headers=headers)

    ask(app, talk)
    prompt = len(engine.requests[0].prompt_token_ids)
    assert (tokens("prompt", "tenant-of-0"), tokens("generation", "tenant-of-0")) == (
        2 * prompt,
        17,
    ), "it had a label before there were too many"
    assert (tokens("prompt", "tenant-of-1"), tokens("generation", "tenant-of-1")) == (2 * prompt, 10)
    assert tokens("generation", "tenant-of-63") == 1
    assert tokens("generation", "tenant-of-64") is None, "labels are bounded"
    assert tokens("generation", "other") == 6


def test_the_prompt_of_a_request_that_never_ran_is_not_counted() -> None:
    registry, engine = CollectorRegistry(), DoubleEngine(failure=EngineBusyError("full"))
    labels = {"model_name": "double", "tenant": "default"}

    async def talk(client: httpx.AsyncClient) -> None:
        assert (await client.post(CHAT, json=BODY)).status_code == 429

    ask(gateway(engine, registry), talk)
    assert not registry.get_sample_value("slipstream_gateway_prompt_tokens_total", labels)


@pytest.mark.parametrize(("alive", "ready", "up"), [(True, True, 1), (True, False, 0), (False, True, 0)])
def test_an_engine_that_takes_no_requests_is_not_up(alive: bool, ready: bool, up: int) -> None:
    registry = CollectorRegistry()
    health = EngineHealth(alive=alive, ready=ready, num_running=2, num_waiting=3)
    registry.register(HealthCollector(lambda: health, "double"))
    names = ("engine_up", "requests_running", "requests_waiting")
    found = [registry.get_sample_value(f"slipstream_{name}", {"model_name": "double"}) for name in names]
    assert found == [up, 2, 3]


@pytest.mark.parametrize(("seconds", "num_tokens", "paces"), [(0.0, 5, 0), (1.0, 0, 0), (1.0, -0.5, 0), (1.0, 4, 1)])
def test_an_answer_without_a_second_token_has_no_pace(seconds: float, num_tokens: float, paces: int) -> None:
    """Of one token, and with its usage in an event behind it; or of several samples, some without any."""
    registry = CollectorRegistry()
    GatewayMetrics(registry, "double").observe_pace(CHAT, seconds, num_tokens)
    labels = {"model_name": "double", "route": CHAT}
    name = "slipstream_gateway_inter_token_latency_seconds"
    assert (registry.get_sample_value(f"{name}_count", labels) or 0) == paces
    assert (registry.get_sample_value(f"{name}_sum", labels) or 0) == paces * 0.25


def test_two_gateways_do_not_share_a_registry() -> None:
    registry = CollectorRegistry()
    gateway(DoubleEngine(), registry)
    with pytest.raises(ValueError, match="Duplicated"):
        gateway(DoubleEngine(), registry)


def test_every_response_has_its_own_id_and_a_log_line() -> None:
    async def talk(client: httpx.AsyncClient) -> list[httpx.Response]:
        return [await client.post(CHAT, json=BODY), await client.get("/nowhere")]

    with capture_logs() as logs:
        responses = ask(gateway(DoubleEngine()), talk)
    ids = [response.headers["x-request-id"] for response in responses]
    assert len(set(ids)) == 2
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in ids)
    lines = [line for line in logs if line["event"] == "request"]
    assert [line["request_id"] for line in lines] == ids
    assert [(line["route"], line["status"]) for line in lines] == [(CHAT, 200), ("unmatched", 404)]


def test_a_request_leaves_no_id_to_the_log_lines_behind_it() -> None:
    async def talk(client: httpx.AsyncClient) -> dict[str, Any]:
        assert (await client.get("/v1/models")).status_code == 200
        return structlog.contextvars.get_contextvars()

    with structlog.contextvars.bound_contextvars(request_id="of the caller"):
        assert ask(gateway(DoubleEngine()), talk)["request_id"] == "of the caller"


def test_a_clients_id_is_kept_where_it_is_one_and_never_names_two_requests_of_the_engine() -> None:
    engine, usable = DoubleEngine(), "0Az._:-" + "x" * 121
    unusable = ("", "x" * 129, "a b", "a/b", "a\t", b"\xe9", 'a"', "{}")

    async def talk(client: httpx.AsyncClient) -> list[str]:
        found = []
        for given in (usable, usable, *unusable):
            response = await client.post(CHAT, json=BODY, headers={"x-request-id": given})
            found.append(response.headers["x-request-id"])
        return found

    with capture_logs() as logs:
        first, second, *others = ask(gateway(engine), talk)
    assert first == second == usable
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in others)
    assert len({request.request_id for request in engine.requests}) == 2 + len(unusable)
    lines = [line for line in logs if line["event"] == "request"]
    assert [line["request_id"] for line in lines] == [first, second, *others]
    named = [line.get("engine_request_id", line["request_id"]) for line in lines]
    assert [request.request_id.partition("-")[0] for request in engine.requests] == named


def test_no_prompt_and_no_answer_in_logs_or_metrics(capfd: pytest.CaptureFixture[str]) -> None:
    registry = CollectorRegistry()
    engine = DoubleEngine(answer=lambda request: f"{CANARY} answer")

    def broken(messages: list[dict[str, Any]], *_: Any) -> list[int]:
        raise KeyError(messages[0]["content"])

    async def talk(client: httpx.AsyncClient) -> str:
        canary = {**BODY, "messages": [{"role": "user", "content": CANARY}]}
        await client.post(CHAT, json=canary)
        await client.post(CHAT, json={**canary, "stream": True, "user": CANARY, "stop": CANARY})
        await client.post(CHAT, json={**canary, "temperature": CANARY})
        await client.post(CHAT, json={**canary, CANARY: 1})
        await client.post(CHAT, json={**canary, "model": CANARY})
        await client.get(f"/v1/models/{CANARY}")
        await client.get(f"/{CANARY}")
        engine.failure, engine.fail_at = RuntimeError(CANARY), 1
        await client.post(CHAT, json={**canary, "stream": True})
        await client.post(CHAT, json=canary)
        engine.tokenizer.encode_chat = broken
        await client.post(CHAT, json=canary)
        return (await client.get("/metrics")).text

    with capture_logs() as logs:
        metrics = ask(gateway(engine, registry), talk)
    assert len(logs) >= 10
    assert CANARY not in repr(logs)
    assert CANARY not in metrics
    assert CANARY not in "".join(capfd.readouterr())
    failed = [line for line in logs if line["event"] == "request failed, unexpected error"]
    assert [line["error"] for line in failed] == ["RuntimeError", "RuntimeError", "KeyError"]
    assert any("broken" in frame for frame in failed[2]["at"])


def test_who_polls_fills_no_log() -> None:
    async def with_client(client: httpx.AsyncClient) -> None:
        for path in ("/health", "/metrics", "/v1/models"):
            assert (await client.get(path)).status_code == 200

    with capture_logs() as logs:
        ask(gateway(DoubleEngine()), with_client)
    levels = {line["route"]: line["log_level"] for line in logs if line["event"] == "request"}
    assert levels == {"/health": "debug", "/metrics": "debug", "/v1/models": "info"}

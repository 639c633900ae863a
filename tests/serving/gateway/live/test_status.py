from __future__ import annotations

import httpx
from prometheus_client import CollectorRegistry, Gauge

from tests.fixtures.doubles import DoubleEngine
from tests.serving.gateway.client import ask, error_of, gateway


def get(engine: DoubleEngine, path: str, registry: CollectorRegistry | None = None) -> httpx.Response:
    return ask(gateway(engine, registry), lambda client: client.get(path))


def test_models() -> None:
    engine = DoubleEngine(model="org/name", context_length=77)
    listed = get(engine, "/v1/models").json()
    assert listed["object"] == "list"
    [model] = listed["data"]
    assert model["id"] == "org/name"
    assert model["max_model_len"] == 77
    assert get(engine, "/v1/models/org/name").json()["id"] == "org/name"


def test_live_but_not_ready() -> None:
    engine = DoubleEngine(ready=False, detail="loading the model")
    assert get(engine, "/health").status_code == 200
    response = get(engine, "/ready")
    assert response.status_code == 503
    assert response.headers["retry-after"]
    error = error_of(response)
    assert error["code"] == "engine_not_ready"
    assert "loading the model" in error["message"]


def test_ready() -> None:
    engine = DoubleEngine()
    engine.install_draft(4)
    assert get(engine, "/ready").json() == {"status": "ready", "draft_version": 4, "num_running": 0, "num_waiting": 0}


def test_dead() -> None:
    engine = DoubleEngine(alive=False, detail="out of memory")
    assert get(engine, "/health").status_code == 503
    assert get(engine, "/ready").status_code == 503


def test_metrics_show_the_registry_that_was_given() -> None:
    registry = CollectorRegistry()
    Gauge("someone_elses", "Also shown", registry=registry).set(3)
    response = get(DoubleEngine(), "/metrics", registry)
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert "someone_elses 3.0" in response.text
    assert 'slipstream_gateway_generations_in_flight{model_name="double"} 0.0' in response.text


def test_openapi_describes_the_bodies_without_dangling_references() -> None:
    schema = get(DoubleEngine(), "/openapi.json")
    operation = schema.json()["paths"]["/v1/chat/completions"]["post"]
    body = operation["requestBody"]["content"]["application/json"]["schema"]
    assert body["properties"]["messages"]["items"]["properties"]["role"]["enum"][0] == "system"
    assert "$defs" not in schema.text
